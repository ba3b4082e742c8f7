"""Files, pictures, random seeds and recipes in; samples out: the same bytes for both sides of a comparison.

`load_samples` reads what `-i` and `--preprocess` say, `samples_from_python` what the Python API and pytest are given.
Both answer with `Loaded`: the samples, and the notes that the user should see.
"""

from __future__ import annotations

from equivcheck.inputs.arguments import load_samples, samples_from_python
from equivcheck.inputs.recipe import Recipe, Recipes
from equivcheck.inputs.sample import Feed, InputSpec, Loaded, Sample

__all__ = ["Feed", "InputSpec", "Loaded", "Recipe", "Recipes", "Sample", "load_samples", "samples_from_python"]
