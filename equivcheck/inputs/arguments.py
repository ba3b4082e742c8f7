"""From what the user gave, `-i` arguments or Python values, to the samples of a run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np

from equivcheck.errors import InputError, RecipeError, near
from equivcheck.inputs import files
from equivcheck.inputs.fitting import fitted
from equivcheck.inputs.image import read_picture
from equivcheck.inputs.recipe import Recipe, Recipes
from equivcheck.inputs.sample import Array, Feed, InputSpec, Loaded, Notes, Sample
from equivcheck.inputs.seeded import is_random, parse_random, random_array

RANDOM_NOTE = "RANDOM (seed 0): a real picture tests more (-i photo.jpg --preprocess recipe.toml)"
AnyRecipe = str | os.PathLike[str] | Recipe | Recipes | None


def load_samples(arguments: Sequence[str], specs: Sequence[InputSpec], *, recipe: AnyRecipe = None) -> Loaded:
    """The samples that `-i` arguments describe, for a model with the inputs `specs`; without arguments a random one.

    `X` is a sample of the only input (a file, a folder, a glob, `random:SEED[:SHAPE]`), or a .npz keyed by input
    names. `NAME=X` fills the current sample; a NAME it already has starts the next. `recipe` (TOML file, inline text)
    applies to pictures only. Raises InputError, RecipeError.
    """
    assembly = _Assembly(specs, _recipes(recipe, specs))
    for argument in arguments:
        assembly.add_argument(argument)
    return assembly.loaded() if arguments else assembly.loaded_random()


def samples_from_python(inputs: object, specs: Sequence[InputSpec], *, recipe: AnyRecipe = None) -> Loaded:
    """The samples that the Python API and pytest accept: like `load_samples`, from values.

    None (random), a str (as after `-i`), a path, an array (of the only input), a dict of input names to arrays or
    paths (one sample), or a list of those. Arrays are copied. Raises InputError, RecipeError.
    """
    assembly = _Assembly(specs, _recipes(recipe, specs))
    if inputs is None:
        return assembly.loaded_random()
    for item in inputs if isinstance(inputs, (list, tuple)) else [inputs]:
        assembly.add_value(item)
    return assembly.loaded()


def _recipes(recipe: AnyRecipe, specs: Sequence[InputSpec]) -> Recipes:
    if recipe is None or isinstance(recipe, Recipe):
        return Recipes(recipe, {})
    recipes = recipe if isinstance(recipe, Recipes) else Recipes.parse(recipe)
    names = [spec.name for spec in specs]
    for name in recipes.by_input:
        if name not in names:
            hint = f"the model's inputs: {', '.join(names)}"
            message = f"recipe: [image.{name}] is for no input"
            raise RecipeError(message, asked=name, nearest=near(name, names), hint=hint)
    return recipes


@dataclass
class _Draft:
    """A sample being filled. `label` is set when one argument makes the whole of it."""

    label: str | None = None
    feeds: dict[str, Feed] = field(default_factory=dict)


class _Assembly:
    """Takes arguments or values one by one; `loaded()` checks that every sample is complete and names them."""

    def __init__(self, specs: Sequence[InputSpec], recipes: Recipes) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._recipes = recipes
        self._notes = Notes()
        self._drafts: list[_Draft] = []

    def loaded_random(self) -> Loaded:
        if self._specs:
            self._notes.add(RANDOM_NOTE)
            self._add_random("random:0")
        else:
            self._drafts.append(_Draft("no inputs"))
        return self.loaded()

    def loaded(self) -> Loaded:
        if not self._drafts:
            raise InputError("an empty list of inputs", hint="give at least one sample, or None for a random one")
        samples = [self._sample(name, draft) for name, draft in zip(_ids(self._drafts), self._drafts, strict=True)]
        recipes = [feed.recipe for sample in samples for feed in sample.feeds.values()]
        if (self._recipes.default or self._recipes.by_input) and not any(recipes):
            self._notes.add("the recipe was not used: no input is a picture, and tensors are taken as they are")
        return Loaded(samples, self._notes.lines())

    def _sample(self, name: str, draft: _Draft) -> Sample:
        absent = [spec for spec in self._specs.values() if spec.name not in draft.feeds]
        if absent:
            message = f"sample {name} has nothing for input {', '.join(str(spec) for spec in absent)}"
            found = ", ".join(draft.feeds)
            raise InputError(message, asked=absent[0].name, found=found, hint=f"add -i {absent[0].name}=FILE")
        return Sample(name, {spec: draft.feeds[spec] for spec in self._specs})

    # -- one argument or value ----------------------------------------------------------------------------------------

    def add_argument(self, argument: str) -> None:
        name, rest = self._split(argument)
        if name is None:
            self._add_bare(rest)
        else:
            self._add_named(name, rest)

    def add_value(self, item: object) -> None:
        if isinstance(item, str):
            self.add_argument(item)
        elif isinstance(item, os.PathLike):
            self._add_bare(os.fsdecode(item))
        elif isinstance(item, (np.ndarray, np.generic)):
            only = self._only("an array", "inputs={NAME: array, ...}")
            self._drafts.append(_Draft())
            self._fill(only, np.asarray(item), "array")
        elif isinstance(item, Mapping):
            self._add_mapping(item)
        else:
            message = f"inputs of type {type(item).__name__}"
            hint = "give None, a path, an array (np.asarray), a dict of input names to arrays, or a list of those"
            raise InputError(message, asked=type(item).__name__, hint=hint)

    def _add_mapping(self, item: Mapping[object, object]) -> None:
        self._drafts.append(_Draft())
        for name, value in item.items():
            spec = self._spec(str(name), "inputs")
            if isinstance(value, (np.ndarray, np.generic)):
                self._fill(spec, np.asarray(value), "array")
            elif isinstance(value, (str, os.PathLike)):
                self._add_named(spec.name, os.fsdecode(value))
            else:
                message = f"inputs[{name!r}] is a {type(value).__name__}, neither an array nor a path"
                raise InputError(message, asked=str(name), hint=f'np.asarray(value, dtype="{spec.dtype}")')

    def _split(self, argument: str) -> tuple[str | None, str]:
        """`NAME=X` only where NAME is an input; else the whole is a path, should it exist."""
        whole = is_random(argument) or files.exists(argument)
        for name in sorted(self._specs, key=len, reverse=True):
            if argument.startswith(f"{name}="):
                rest = argument[len(name) + 1 :]
                if not whole or is_random(rest) or files.exists(rest):
                    return name, rest
        if "=" in argument and not whole:
            name = argument.partition("=")[0]
            nearest = near(name, self._specs) or files.neighbours(argument)
            message = f"-i {argument}: {name} is no input of the model, and there is no file of that whole name"
            raise InputError(message, asked=name, nearest=nearest, hint=self._inputs())
        return None, argument

    def _add_bare(self, text: str) -> None:
        if not self._specs:
            raise InputError(f"-i {text}: the model has no inputs", asked=text, hint="leave -i out")
        if is_random(text):
            self._add_random(text)
            return
        for path in files.find(text, self._notes):
            if files.suffix(path) == ".npz":
                self._add_npz(path)
                continue
            only = self._only(f"-i {path}", f"-i NAME=FILE for each, such as -i {next(iter(self._specs))}={path}")
            self._drafts.append(_Draft(Path(path).name))
            self._fill_from_file(only, path)

    def _add_random(self, text: str) -> None:
        if parse_random(text)[1] is not None:
            self._only(f"-i {text}", f"-i NAME={text} for each")
        self._drafts.append(_Draft(text))
        for spec in self._specs.values():
            self._fill_random(spec, text)

    def _add_npz(self, path: str) -> None:
        self._drafts.append(_Draft(Path(path).name))
        for key, array in files.read_npz(path).items():
            self._fill(self._spec(key, path), array, path)

    def _add_named(self, name: str, text: str) -> None:
        spec = self._specs[name]
        if is_random(text):
            self._start_unless_open(name, text)
            self._fill_random(spec, text)
            return
        paths = files.find(text, self._notes)
        if len(self._specs) > 1 and paths != [text]:
            message = f"-i {name}={text} stands for {len(paths)} file(s), but the model has {len(self._specs)} inputs"
            raise InputError(message, asked=text, hint=f"name one file a sample: -i {name}={paths[0]}")
        for path in paths:
            self._start_unless_open(name, Path(path).name)
            self._fill_from_file(spec, path)

    def _start_unless_open(self, name: str, label: str) -> None:
        """A sample that already has `name` is complete as far as the user is concerned: begin the next."""
        if not self._drafts or name in self._drafts[-1].feeds:
            self._drafts.append(_Draft())
        if len(self._specs) == 1:
            self._drafts[-1].label = label

    # -- one feed -----------------------------------------------------------------------------------------------------

    def _fill_from_file(self, spec: InputSpec, path: str) -> None:
        if files.suffix(path) in files.ARRAYS:
            self._fill(spec, files.read_array(path, spec), path)
        else:
            array, applied = read_picture(path, spec, self._recipes.of(spec.name), self._notes)
            self._fill(spec, array, path, applied)

    def _fill_random(self, spec: InputSpec, text: str) -> None:
        seed, shape = parse_random(text)
        position = list(self._specs).index(spec.name)
        self._fill(spec, random_array(spec, position, seed, shape, self._notes), text)

    def _fill(self, spec: InputSpec, array: Array, source: str, recipe: str | None = None) -> None:
        self._drafts[-1].feeds[spec.name] = fitted(array, spec, source, self._notes, recipe)

    # -- names --------------------------------------------------------------------------------------------------------

    def _only(self, what: str, hint: str) -> InputSpec:
        if len(self._specs) == 1:
            return next(iter(self._specs.values()))
        raise InputError(f"{what} is for one input, {self._inputs()}", asked=what, hint=hint)

    def _spec(self, name: str, where: str) -> InputSpec:
        if name in self._specs:
            return self._specs[name]
        message = f"{where}: {name!r} is no input of the model"
        raise InputError(message, asked=name, nearest=near(name, self._specs), hint=self._inputs())

    def _inputs(self) -> str:
        return f"the model's inputs: {', '.join(str(spec) for spec in self._specs.values()) or 'none'}"


def _ids(drafts: Sequence[_Draft]) -> list[str]:
    """The file's name where one file is the sample, its path where two share that name, else a number from 1."""
    labels = [draft.label or str(number) for number, draft in enumerate(drafts, 1)]
    counts = Counter(labels)
    names: dict[str, None] = {}
    for label, draft in zip(labels, drafts, strict=True):
        source = next((feed.source for feed in draft.feeds.values()), label)
        wanted = source if counts[label] > 1 and draft.label else label
        copies = (wanted if copy == 1 else f"{wanted}#{copy}" for copy in count(1))
        names[next(name for name in copies if name not in names)] = None
    return list(names)
