"""Preprocessing recipes: how a picture becomes a feed, as data.

Inline, comma between keys, colon within a list: `resize=224x224,scale=1/255,mean=0.485:0.456:0.406`.
As TOML, `[image]` for every input and `[image.INPUT]` for one (its keys override those of `[image]` one by one)::

    [image]
    resize = [224, 224]
    scale = "1/255"
    mean = [0.485, 0.456, 0.406]

The order is always: decode, EXIF turn, resize, crop, colour, float64, * scale, - mean, / std, layout, dtype.

=======  ===============================================  ==============================================================
key      value                                            when it is left out
=======  ===============================================  ==============================================================
resize   HxW or [h, w], pixels                            the input's H and W; nothing when `crop` is given with
                                                          fit=stretch (the crop is then cut from the picture itself)
fit      stretch, shorter, letterbox                      stretch. shorter: the smallest size of the same aspect that
                                                          covers `resize`, then a centre crop to `crop` or `resize`.
                                                          letterbox: the largest that fits in, centred, padded
filter   nearest bilinear bicubic box hamming lanczos     bilinear (Pillow's, which antialiases when it shrinks)
pad      0..255                                           114; the grey around a letterboxed picture
crop     HxW or [h, w], pixels                            no crop; it is cut from the centre, odd rests half-even, as
                                                          torchvision's CenterCrop does
color    RGB, BGR, GRAY                                   RGB for 3 channels, GRAY for 1
scale    number or fraction (1/127.5)                     no multiplication
mean     one number, or one a channel (order of `color`)  no subtraction
std      one number, or one a channel (order of `color`)  no division
layout   NCHW, NHWC                                       from where the input has its 1 or 3 channels
dtype    numpy's name                                     the input's; integers are rounded half-even and saturate.
                                                          int8 without scale, mean and std: pixel - 128
=======  ===============================================  ==============================================================
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from equivcheck.errors import RecipeError, near
from equivcheck.inputs.files import is_file, neighbours, real

DTYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_VERSION = re.compile(r"\s*\(Pillow [^()]*\)\s*$")
_SIZE = re.compile(r"(\d{1,6})x(\d{1,6})")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one picture becomes one feed; None leaves a key out. `str()` is the inline form, and parses back.

    Raises RecipeError for a value that a key cannot take.
    """

    resize: tuple[int, int] | None = None
    fit: str | None = None
    filter: str | None = None
    pad: int | None = None
    crop: tuple[int, int] | None = None
    color: str | None = None
    scale: float | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    layout: str | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        for key, value in self._given():
            object.__setattr__(self, key, _converted(key, value, key, "recipe"))

    def __str__(self) -> str:
        return ",".join(f"{key}={_written(key, value)}" for key, value in self._given())

    def _given(self) -> Iterator[tuple[str, Any]]:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                yield field.name, value

    @classmethod
    def parse(cls, text_or_path: str | os.PathLike[str]) -> Recipe:
        """One recipe from inline text or a TOML file with an `[image]` table.

        Raises RecipeError, also for a file with `[image.INPUT]` tables: those need `Recipes.parse`.
        """
        recipes = Recipes.parse(text_or_path)
        if recipes.by_input or recipes.default is None:
            raise RecipeError(
                f"{os.fspath(text_or_path)} holds recipes for single inputs: {', '.join(recipes.by_input)}",
                asked=os.fspath(text_or_path),
                hint="Recipes.parse reads all of them",
            )
        return recipes.default

    @classmethod
    def from_table(cls, table: Mapping[str, object], *, path: str = "", where: str = "recipe") -> Recipe:
        """A recipe from TOML's values. `path` ("image.left") and `where` (the file) are for the error text."""
        prefix = f"{path}." if path else ""
        for key in table:
            if key not in KEYS:
                nearest = [prefix + hit for hit in near(key, KEYS)]
                hint = f"keys: {', '.join(KEYS)}"
                raise RecipeError(f"{where}: unknown key {prefix}{key}", asked=prefix + key, nearest=nearest, hint=hint)
        return cls(**{key: _converted(key, value, prefix + key, where) for key, value in table.items()})


@dataclass(frozen=True, slots=True)
class Recipes:
    """The recipes of one `--preprocess`: one for every input, and those for inputs with one of their own."""

    default: Recipe | None
    by_input: Mapping[str, Recipe]

    def of(self, name: str) -> Recipe | None:
        """The recipe for the input `name`, or None when none was given."""
        return self.by_input.get(name, self.default)

    @classmethod
    def parse(cls, text_or_path: str | os.PathLike[str]) -> Recipes:
        """Read a TOML file, or inline text (which has a `=` and is no file). Raises RecipeError."""
        text = os.fspath(text_or_path)
        if is_file(text):
            return _from_file(text)
        body = _VERSION.sub("", text).strip()  # a recipe copied from a report carries Pillow's version
        if isinstance(text_or_path, str) and not text.lower().endswith(".toml") and ("=" in body or not body):
            return cls(_from_inline(body), {})
        hint = "give a TOML file or inline keys, such as --preprocess resize=224x224,scale=1/255"
        raise RecipeError(f"no recipe file {text}", asked=text, nearest=neighbours(text), hint=hint)


KEYS = tuple(field.name for field in fields(Recipe))


def _from_file(path: str) -> Recipes:
    try:
        with real(path).open("rb") as file:
            document = tomllib.load(file)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        message = f"{path} is not readable as TOML: {' '.join(str(error).split())}"
        raise RecipeError(message, asked=path, hint='a recipe file starts with "[image]"') from error
    for key in document:
        if key != "image":
            hint = "keys go under [image], or [image.INPUT] for one input"
            raise RecipeError(f"{path}: unknown key {key}", asked=key, nearest=near(key, ["image"]), hint=hint)
    image = document.get("image")
    if not isinstance(image, dict):
        raise RecipeError(f"{path} holds no [image] table", asked=path, hint='start it with "[image]"')
    own = {key: value for key, value in image.items() if not isinstance(value, dict)}
    tables = {key: value for key, value in image.items() if isinstance(value, dict)}
    for name, table in tables.items():
        nested = next((key for key, value in table.items() if isinstance(value, dict) and key not in KEYS), None)
        if nested is not None:
            hint = f'quote an input name with a dot: [image."{name}.{nested}"]'
            raise RecipeError(f"{path}: image.{name}.{nested} is a table, not a key", asked=nested, hint=hint)
        Recipe.from_table(table, path=f"image.{name}", where=path)  # so that an error names the table it is in
    default = Recipe.from_table(own, path="image", where=path) if own or not tables else None
    return Recipes(default, {name: Recipe.from_table({**own, **table}, where=path) for name, table in tables.items()})


def _from_inline(body: str) -> Recipe:
    table: dict[str, object] = {}
    for part in body.split(",") if body else []:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            hint = "a comma separates keys, a colon the items of a list: mean=0.485:0.456:0.406"
            raise RecipeError(f"recipe {body!r}: {part.strip()!r} is not KEY=VALUE", asked=part, hint=hint)
        if key in table:
            raise RecipeError(f"recipe {body!r}: {key} is given twice", asked=key, hint="keep one")
        table[key] = value
    return Recipe.from_table(table)


# -- values: TOML's types or inline text in, the field's type out; _Unfit says what the key wants ----------------------


class _Unfit(Exception):
    """A value that its key cannot take; the text says what the key wants."""


def _converted(key: str, value: object, path: str, where: str) -> Any:
    try:
        return _CONVERTERS[key](value)
    except _Unfit as error:
        choices = error.args[1] if len(error.args) > 1 else ()
        nearest = near(value, choices) if isinstance(value, str) else []
        message = f"{where}: {path} = {value!r} does not fit"
        raise RecipeError(message, asked=f"{path}={value}", nearest=nearest, hint=f"it wants {error.args[0]}") from None


def _size(value: object) -> tuple[int, int]:
    if isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        value = [int(match[1]), int(match[2])]
    if isinstance(value, (list, tuple)) and len(value) == 2:
        height, width = value
        if _is_int(height) and _is_int(width) and 0 < height < 10**6 and 0 < width < 10**6:
            return height, width
    raise _Unfit("height x width in pixels, 224x224 or [224, 224]")


def _one_of(*choices: str) -> Callable[[object], str]:
    def choose(value: object) -> str:
        for choice in choices:
            if isinstance(value, str) and value.strip().casefold() == choice.casefold():
                return choice
        raise _Unfit("one of " + ", ".join(choices), choices)

    return choose


def _number(value: object) -> float:
    try:
        if isinstance(value, str):
            above, slash, below = value.partition("/")
            result = float(above) / float(below) if slash else float(above)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            result = float(value)
        else:
            raise _Unfit("a number")
    except (ValueError, ArithmeticError):
        raise _Unfit("a number or a fraction, such as 0.5 or 1/127.5") from None
    if not math.isfinite(result):
        raise _Unfit("a finite number")
    return result


def _factor(value: object) -> float:
    result = _number(value)
    if result == 0:
        raise _Unfit("a number other than 0")
    return result


def _each(one: Callable[[object], float]) -> Callable[[object], tuple[float, ...]]:
    def convert(value: object) -> tuple[float, ...]:
        items = value.split(":") if isinstance(value, str) else value if isinstance(value, (list, tuple)) else [value]
        if not items:
            raise _Unfit("one number, or one a channel")
        return tuple(one(item) for item in items)

    return convert


def _grey(value: object) -> int:
    if isinstance(value, str) and re.fullmatch(r"\d{1,3}", value.strip()):
        value = int(value)
    if isinstance(value, int) and _is_int(value) and 0 <= value <= 255:
        return int(value)
    raise _Unfit("a grey level, 0 to 255")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_CONVERTERS: dict[str, Callable[[object], Any]] = {
    "resize": _size,
    "fit": _one_of("stretch", "shorter", "letterbox"),
    "filter": _one_of("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"),
    "pad": _grey,
    "crop": _size,
    "color": _one_of("RGB", "BGR", "GRAY"),
    "scale": _factor,
    "mean": _each(_number),
    "std": _each(_factor),
    "layout": _one_of("NCHW", "NHWC"),
    "dtype": _one_of(*DTYPES),
}


def _written(key: str, value: Any) -> str:
    if key in ("resize", "crop"):
        return f"{value[0]}x{value[1]}"
    if key in ("mean", "std"):
        return ":".join(_short(item) for item in value)
    return _fraction(value) if key == "scale" else str(value)


def _short(number: float) -> str:
    return repr(number).removesuffix(".0")


def _fraction(number: float) -> str:
    """`1/127.5` where that is shorter than the decimal and reads back as the very same float64."""
    decimal = _short(number)
    inverse = 1 / number if math.isfinite(1 / number) else 0.0
    fraction = f"1/{inverse:.6g}"
    same = inverse != 0 and float(f"{inverse:.6g}") != 0 and 1 / float(f"{inverse:.6g}") == number
    return fraction if same and len(fraction) < len(decimal) else decimal
