"""Pictures to arrays: complete a recipe from what the input asks for, then carry it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from equivcheck.errors import InputError, RecipeError
from equivcheck.inputs.files import real
from equivcheck.inputs.recipe import DTYPES, Recipe
from equivcheck.inputs.sample import Array, Dim, InputSpec, Notes, known, shape_text

if TYPE_CHECKING:
    from PIL import Image

# Without a recipe only these have an obvious meaning; float pictures are nearly always scaled to 0..1 first.
_DEFAULTS = {
    "uint8": Recipe(),
    "int8": Recipe(),
    "float16": Recipe(scale=1 / 255),
    "float32": Recipe(scale=1 / 255),
    "float64": Recipe(scale=1 / 255),
}
_CHANNELS = {"RGB": 3, "BGR": 3, "GRAY": 1}
_PAD = 114
_FEW_CODES = 8  # a picture of no more codes was scaled to reals that an integer input cannot hold


def read_picture(path: str, spec: InputSpec, recipe: Recipe | None, notes: Notes) -> tuple[Array, str]:
    """The feed that `recipe` (None: a default, which is noted) makes of a picture, and the inline recipe as applied.

    Raises InputError for a file that is no picture, RecipeError for a recipe that does not fit the input.
    """
    complete = resolve(default_recipe(spec) if recipe is None else recipe, spec)
    array = to_array(decode(path, complete, notes), complete, batched=len(spec.shape) == 4)
    applied = f"{complete} (Pillow {_pillow_version()})"
    if recipe is None:
        doubt = "; the model's own preprocessing is unknown: --preprocess RECIPE" if complete.scale is not None else ""
        notes.add(f"input {spec.name}: no recipe given, applied {applied}{doubt}")
    if array.dtype.kind in "iu" and array.size > _FEW_CODES and complete.scale is not None:
        codes = np.unique(array).size
        if codes <= _FEW_CODES:
            notes.add(
                f"input {spec.name}: the recipe leaves {codes} different {array.dtype} codes of the picture; this input takes "
                "codes, not reals: leave scale, mean and std out (uint8: the pixels, int8: pixel - 128)"
            )
    if len(spec.shape) == 4 and not known(spec.shape[0]):
        notes.add(f"input {spec.name}: dimension {shape_text(spec.shape[:1])} taken as 1")
    return array, applied


def default_recipe(spec: InputSpec) -> Recipe:
    """What a picture means for an input of this dtype when nobody says: raw pixels, pixel - 128, or pixel / 255."""
    if spec.dtype not in _DEFAULTS:
        message = f"input {spec} has no obvious picture preprocessing"
        raise InputError(message, asked=spec.dtype, hint="say it, such as --preprocess scale=1, or give a .npy")
    return _DEFAULTS[spec.dtype]


def resolve(recipe: Recipe, spec: InputSpec) -> Recipe:
    """`recipe` with every omitted key filled in from `spec`, so that it stands alone. Raises InputError, RecipeError.

    `resize` stays None where nothing is resized: a crop of the picture as it is, or an input of any height and width.
    """
    layout = recipe.layout or _layout(spec)
    dims = spec.shape[-3:]
    height, width, channels = (dims[1], dims[2], dims[0]) if layout == "NCHW" else dims
    color = recipe.color or _color(channels, layout, spec)
    if known(channels) and _CHANNELS[color] != channels:
        what = f"color={color} makes {_CHANNELS[color]} channel(s)"
        raise _misfit(what, spec, f"{channels} in {layout}", "leave color out")
    if recipe.dtype not in (None, spec.dtype):
        raise _misfit(f"dtype={recipe.dtype}", spec, spec.dtype, "leave dtype out")
    if spec.dtype not in DTYPES:
        raise _misfit("a picture becomes a number", spec, spec.dtype, f"give a tensor: -i {spec.name}=FILE.npy")
    for key, values in (("mean", recipe.mean), ("std", recipe.std)):
        if values is not None and len(values) not in (1, _CHANNELS[color]):
            wanted = f"1 or {_CHANNELS[color]} ({color})"
            raise _misfit(f"{key} has {len(values)} numbers", spec, wanted, "give one a channel")
    resize = recipe.resize or _resize(recipe, height, width, spec)
    size = recipe.crop or resize
    if size is not None and any(known(dim) and dim != side for dim, side in zip((height, width), size, strict=True)):
        what = f"a picture of {shape_text(size)} (height x width)"
        raise _misfit(what, spec, shape_text((height, width)), "mend resize and crop, or leave them out")
    fit = recipe.fit or "stretch"
    untouched = recipe.scale is None and recipe.mean is None and recipe.std is None
    return replace(
        recipe,
        resize=resize,
        fit=fit if resize else None,
        filter=(recipe.filter or "bilinear") if resize else None,
        pad=(_PAD if recipe.pad is None else recipe.pad) if fit == "letterbox" else None,
        color=color,
        mean=(128.0,) if untouched and spec.dtype == "int8" else recipe.mean,
        layout=layout,
        dtype=spec.dtype,
    )


def _layout(spec: InputSpec) -> str:
    if len(spec.shape) not in (3, 4) or (len(spec.shape) == 4 and known(spec.shape[0]) and spec.shape[0] != 1):
        message = f"input {spec} does not take a single picture (1xCxHxW or 1xHxWxC)"
        raise InputError(message, asked=spec.name, hint=f"give it a tensor: -i {spec.name}=FILE.npy")
    first, last = spec.shape[-3], spec.shape[-1]
    for counts in ((1, 3), (4,)):
        if (first in counts) != (last in counts):
            return "NCHW" if first in counts else "NHWC"
    message = f"input {spec}: not clear which dimension holds the colours"
    raise InputError(message, asked=spec.name, hint="say it: --preprocess layout=NCHW (or NHWC)")


def _color(channels: Dim, layout: str, spec: InputSpec) -> str:
    if channels in (1, 3):
        return "RGB" if channels == 3 else "GRAY"
    if known(channels):
        message = f"input {spec} has {channels} channels in {layout}; a picture makes 3 (RGB, BGR) or 1 (GRAY)"
        raise InputError(message, asked=spec.name, hint=f"give it a tensor: -i {spec.name}=FILE.npy")
    message = f"input {spec} leaves the number of channels open in {layout}"
    raise RecipeError(message, asked=spec.name, hint="say it: --preprocess color=RGB (or BGR, GRAY)")


def _resize(recipe: Recipe, height: Dim, width: Dim, spec: InputSpec) -> tuple[int, int] | None:
    stretch = recipe.fit in (None, "stretch")
    if recipe.crop is not None and stretch:
        return None
    if isinstance(height, int) and isinstance(width, int) and known(height) and known(width):
        return height, width
    if not known(height) and not known(width) and stretch:
        return None
    message = f"input {spec} does not say to which height and width a picture goes"
    raise RecipeError(message, asked=spec.name, hint="say it: --preprocess resize=224x224")


def _misfit(what: str, spec: InputSpec, wanted: str, hint: str) -> RecipeError:
    return RecipeError(f"recipe: {what}, but input {spec} wants {wanted}", asked=what, found=wanted, hint=hint)


def decode(path: str, recipe: Recipe, notes: Notes) -> Array:
    """The picture after EXIF turn, resize, crop and colour of a complete recipe: uint8, height x width x channels."""
    picture = _cropped(_resized(_opened(path, notes), recipe), recipe, path)
    color = recipe.color or "RGB"
    pixels = np.asarray(picture.convert("L" if color == "GRAY" else "RGB"))
    pixels = pixels.reshape(picture.height, picture.width, _CHANNELS[color])
    return pixels[:, :, ::-1] if color == "BGR" else pixels


def to_array(pixels: Array, recipe: Recipe, *, batched: bool) -> Array:
    """The arithmetic of a complete recipe on uint8 pixels (HxWxC), in float64; `batched` puts a 1 in front."""
    values = pixels.astype(np.float64)
    if recipe.scale is not None:
        values = values * recipe.scale
    if recipe.mean is not None:
        values = values - np.array(recipe.mean)
    if recipe.std is not None:
        values = values / np.array(recipe.std)
    if recipe.layout == "NCHW":
        values = values.transpose(2, 0, 1)
    return _cast(values[np.newaxis] if batched else values, np.dtype(recipe.dtype))


def _cast(values: Array, dtype: np.dtype[Any]) -> Array:
    if dtype.kind == "f":
        with np.errstate(over="ignore"):  # float16: the infinity is noted with the feed
            return values.astype(dtype)
    limits = np.iinfo(dtype)
    top = float(limits.max)
    if top > limits.max:  # 2**63 and 2**64 do not fit; the largest float64 below does
        top = float(np.nextafter(top, 0))
    return np.clip(np.rint(values), float(limits.min), top).astype(dtype)


# -- Pillow ------------------------------------------------------------------------------------------------------------


def _pillow_version() -> str:
    import PIL

    return PIL.__version__


def _opened(path: str, notes: Notes) -> Image.Image:
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(real(path)) as file:
            if getattr(file, "n_frames", 1) > 1:
                notes.add("several frames: the first is used", path)
            return _eight_bits(ImageOps.exif_transpose(file), path, notes)
    except UnidentifiedImageError as error:
        message = f"{path} is neither a picture that Pillow can open nor a .npy, .npz, .pb, .raw or .bin"
        raise InputError(message, asked=path, hint="convert it, or rename it to what it is") from error
    except (OSError, ValueError, SyntaxError, EOFError, MemoryError, Image.DecompressionBombError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
        raise InputError(f"picture {path} cannot be read: {reason}", asked=path, hint="is the file whole?") from error


def _eight_bits(picture: Image.Image, path: str, notes: Notes) -> Image.Image:
    """The same picture as "L" or "RGB". 16 bits keep their high byte (as OpenCV and libpng do); alpha is dropped."""
    from PIL import Image

    mode = picture.mode
    if mode in ("L", "RGB") and "transparency" not in picture.info:
        return picture
    if mode.startswith("I"):
        values = np.asarray(picture)
        if values.min() < 0 or values.max() > 65535:
            message = f"picture {path} has 32-bit levels from {values.min()} to {values.max()}"
            raise InputError(message, asked=path, hint="save it with 8 bits, or give a .npy")
        notes.add("16-bit grey: the high byte is used", path)
        return Image.fromarray((values.astype(np.int64) >> 8).astype(np.uint8))
    if mode == "F":
        raise InputError(f"picture {path} has float levels", asked=path, hint="save it with 8 bits, or give a .npy")
    if mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in picture.info:
        solid = picture.convert("LA" if mode == "La" else "RGBA")
        if solid.getchannel("A").getextrema() != (255, 255):
            notes.add("alpha is dropped (the colours under it are kept)", path)
        return solid.convert("L" if mode in ("L", "LA", "La") else "RGB")
    if mode in ("CMYK", "LAB", "HSV", "YCbCr"):
        notes.add(f"{mode} colours converted to RGB by Pillow, without a colour profile", path)
    return picture.convert("L" if mode == "1" else "RGB")


def _resized(picture: Image.Image, recipe: Recipe) -> Image.Image:
    from PIL import Image

    if recipe.resize is None:
        return picture
    height, width = _fitted(picture.height, picture.width, recipe.resize, recipe.fit or "stretch")
    resampling = Image.Resampling[(recipe.filter or "bilinear").upper()]
    resized = picture.resize((width, height), resampling)
    if recipe.fit != "letterbox":
        return resized
    pad = _PAD if recipe.pad is None else recipe.pad
    canvas = Image.new(resized.mode, (recipe.resize[1], recipe.resize[0]), (pad,) * len(resized.getbands()))
    canvas.paste(resized, ((recipe.resize[1] - width) // 2, (recipe.resize[0] - height) // 2))
    return canvas


def _fitted(height: int, width: int, target: Sequence[int], fit: str) -> tuple[int, int]:
    """The size a height x width picture is resized to; integers and fractions only, so it cannot drift by a pixel."""
    if fit == "stretch":
        return target[0], target[1]
    ratios = Fraction(target[0], height), Fraction(target[1], width)
    if fit == "letterbox":  # the other side half-even, as the YOLO exporters' int(round(side * ratio))
        ratio = min(ratios)
        return max(1, round(height * ratio)), max(1, round(width * ratio))
    ratio = max(ratios)  # shorter: the other side is truncated, as torchvision.transforms.Resize does
    return int(height * ratio), int(width * ratio)


def _cropped(picture: Image.Image, recipe: Recipe, path: str) -> Image.Image:
    size = recipe.crop or (recipe.resize if recipe.fit == "shorter" else None)
    if size is None:
        return picture
    height, width = size
    if height > picture.height or width > picture.width:
        message = f"crop={shape_text(size)} is larger than {path}, {picture.height}x{picture.width} at that point"
        raise RecipeError(message, asked=shape_text(size), hint="resize to at least the crop, such as fit=shorter")
    top, left = round((picture.height - height) / 2), round((picture.width - width) / 2)
    return picture.crop((left, top, left + width, top + height))
