"""Recipes: what parses, what does not and with which words, and that `str()` parses back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equivcheck.errors import RecipeError
from equivcheck.inputs import Recipe, Recipes
from equivcheck.inputs.recipe import DTYPES, KEYS

SIDE = st.integers(1, 9999)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
FACTOR = NUMBER.filter(bool)
RECIPES = st.builds(
    Recipe,
    resize=st.none() | st.tuples(SIDE, SIDE),
    fit=st.sampled_from([None, "stretch", "shorter", "letterbox"]),
    filter=st.sampled_from([None, "nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"]),
    pad=st.none() | st.integers(0, 255),
    crop=st.none() | st.tuples(SIDE, SIDE),
    color=st.sampled_from([None, "RGB", "BGR", "GRAY"]),
    scale=st.none() | FACTOR | st.integers(1, 10**6).map(lambda n: 1 / n) | st.integers(1, 10**6).map(lambda n: 2 / n),
    mean=st.none() | st.lists(NUMBER, min_size=1, max_size=4).map(tuple),
    std=st.none() | st.lists(FACTOR, min_size=1, max_size=4).map(tuple),
    layout=st.sampled_from([None, "NCHW", "NHWC"]),
    dtype=st.sampled_from([None, *DTYPES]),
)


@given(RECIPES)
def test_the_inline_form_of_any_recipe_parses_back_to_it(recipe):
    assert Recipe.parse(str(recipe)) == recipe
    assert Recipe.parse(f"{recipe} (Pillow 13.0.0)") == recipe


@pytest.mark.parametrize(
    ("text", "recipe"),
    [
        ("", Recipe()),
        ("resize=224x224,scale=1/127.5,mean=1", Recipe(resize=(224, 224), scale=1 / 127.5, mean=(1.0,))),
        ("resize = 48x192 , fit=LETTERBOX, pad=0", Recipe(resize=(48, 192), fit="letterbox", pad=0)),
        ("mean=0.485:0.456:0.406,std=1/4", Recipe(mean=(0.485, 0.456, 0.406), std=(0.25,))),
        (
            "color=bgr,layout=nhwc,dtype=INT8,crop=10x20",
            Recipe(color="BGR", layout="NHWC", dtype="int8", crop=(10, 20)),
        ),
    ],
)
def test_inline_text_is_read(text, recipe):
    assert Recipe.parse(text) == recipe


@pytest.mark.parametrize(
    ("scale", "text"),
    [(1 / 255, "1/255"), (1 / 127.5, "1/127.5"), (2.0, "2"), (0.5, "0.5"), (0.1 + 0.2, "0.30000000000000004")],
)
def test_a_scale_is_written_as_people_write_it(scale, text):
    assert str(Recipe(scale=scale)) == f"scale={text}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("resiez=224x224", ["unknown key resiez", "nearest: resize", "keys: resize, fit"]),
        ("colour=RGB", ["unknown key colour", "nearest: color"]),
        ("resize=224", ["resize = '224'", "224x224"]),
        ("resize=0x5", ["resize = '0x5'"]),
        ("fit=leterbox", ["nearest: letterbox", "one of stretch, shorter, letterbox"]),
        ("mean=0.485,0.456,0.406", ["'0.456' is not KEY=VALUE", "mean=0.485:0.456:0.406"]),
        ("scale=1/0", ["scale = '1/0'", "fraction"]),
        ("scale=nan", ["scale = 'nan'", "finite"]),
        ("scale=0", ["other than 0"]),
        ("std=1:0:1", ["std = '1:0:1'", "other than 0"]),
        ("scale=1,scale=2", ["scale is given twice"]),
        ("dtype=float8", ["dtype = 'float8'", "one of float16"]),
        ("pad=256", ["0 to 255"]),
        ("recipe.tmol", ["no recipe file recipe.tmol", "inline keys"]),
    ],
)
def test_a_mistake_in_inline_text_is_one_line_with_the_way_out(text, words):
    with pytest.raises(RecipeError) as caught:
        Recipe.parse(text)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("key", KEYS)
def test_no_key_takes_a_bool_or_a_table(key):
    for value in (True, {}, [], object()):
        with pytest.raises(RecipeError, match=key):
            Recipe.from_table({key: value})


def test_python_values_are_validated_and_normalised():
    assert Recipe(resize=[4, 5], mean=1, scale="1/4") == Recipe(resize=(4, 5), mean=(1.0,), scale=0.25)
    assert hash(Recipe(mean=[1, 2, 3])) == hash(Recipe(mean=(1.0, 2.0, 3.0)))
    with pytest.raises(RecipeError, match="resize"):
        Recipe(resize=(4,))


def written(tmp_path, text):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return path


def test_a_toml_file_is_read_with_an_input_of_its_own_overriding_key_by_key(tmp_path):
    path = written(
        tmp_path,
        """
        [image]
        resize = [48, 192]
        scale = "1/255"
        mean = [0.5, 0.25, 1]
        [image."left:0"]
        scale = 2
        """,
    )
    common = Recipe(resize=(48, 192), scale=1 / 255, mean=(0.5, 0.25, 1.0))
    recipes = Recipes.parse(path)
    assert recipes.of("right") == common
    assert recipes.of("left:0") == Recipe(resize=(48, 192), scale=2.0, mean=(0.5, 0.25, 1.0))
    with pytest.raises(RecipeError, match="single inputs: left:0"):
        Recipe.parse(path)


def test_a_toml_file_with_one_table_is_one_recipe(tmp_path):
    assert Recipe.parse(str(written(tmp_path, "[image]\ncrop = '2x3'\n"))) == Recipe(crop=(2, 3))


def test_only_inputs_with_a_table_have_a_recipe_when_there_is_no_common_one(tmp_path):
    recipes = Recipes.parse(written(tmp_path, "[image.left]\nscale = 2\n"))
    assert recipes.of("right") is None
    assert recipes.of("left") == Recipe(scale=2.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[image]\nresiez = [1, 2]", ["recipe.toml: unknown key image.resiez", "nearest: image.resize"]),
        ("[image.left]\nscael = 1", ["unknown key image.left.scael", "nearest: image.left.scale"]),
        ("[image.left]\nscale = 'x'", ["image.left.scale = 'x'"]),
        ("[image]\nmean = [1, 'a']", ["image.mean = [1, 'a']"]),
        ("[imgae]\nscale = 1", ["unknown key imgae", "nearest: image"]),
        ("scale = 1", ["unknown key scale", "[image]"]),
        ("", ["no [image] table"]),
        ("[image", ["not readable as TOML"]),
        ("[image.a.b]\nscale = 1", ["image.a.b is a table", '[image."a.b"]']),
    ],
)
def test_a_mistake_in_a_toml_file_names_the_path_of_the_key(tmp_path, text, words):
    with pytest.raises(RecipeError) as caught:
        Recipes.parse(written(tmp_path, text))
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_recipe_file_that_does_not_exist_names_its_neighbours(tmp_path):
    written(tmp_path, "[image]")
    with pytest.raises(RecipeError, match=r"nearest: .*recipe\.toml"):
        Recipe.parse(str(tmp_path / "recip.toml"))


def test_inline_text_longer_than_a_file_name_may_be_is_still_read():
    assert len(Recipe.parse("mean=" + ":".join(["0.123456789"] * 100)).mean) == 100
