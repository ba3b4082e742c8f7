"""`-i` arguments and Python values: which samples they make, and what is said about mistakes."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from PIL import Image

from equivcheck import inputs
from equivcheck.errors import InputError, RecipeError
from equivcheck.inputs import InputSpec, Recipe, load_samples, samples_from_python
from equivcheck.inputs.arguments import RANDOM_NOTE

ROOT = Path(__file__).parents[2]
X = InputSpec("x", "float32", (1, 4))
LEFT, RIGHT = InputSpec("left", "float32", (1, 4)), InputSpec("right", "int8", (2,))
RAMP = np.arange(4, dtype=np.float32).reshape(1, 4)
PAIR = np.array([1, -1], np.int8)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("ramp.npy", RAMP)
    np.save("twice.npy", 2 * RAMP)
    np.save("pair.npy", PAIR)
    return tmp_path


def ids(loaded):
    return [sample.id for sample in loaded.samples]


def only(loaded):
    (sample,) = loaded.samples
    (feed,) = sample.feeds.values()
    return feed


def refused(call, *words, kind=InputError):
    with pytest.raises(kind) as caught:
        call()
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


# -- files -------------------------------------------------------------------------------------------------------------


def tensor_proto(name):
    with open(name, "wb") as file:
        file.write(numpy_helper.from_array(RAMP, "whatever").SerializeToString())


WRITERS = {
    "a.npy": lambda name: np.save(name, RAMP),
    "a.NPY": lambda name: Path("ramp.npy").rename(name),
    "a.npz": lambda name: np.savez(name, x=RAMP),
    "a.pb": tensor_proto,
    "a.raw": RAMP.astype("<f4").tofile,
    "a.bin": RAMP.astype("<f4").tofile,
    "swapped.npy": lambda name: np.save(name, RAMP.astype(">f4")),
    "fortran.npy": lambda name: np.save(name, np.asfortranarray(RAMP)),
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("prefix", ["", "x="])
def test_every_kind_of_file_gives_the_same_feed(name, prefix):
    WRITERS[name](name)
    loaded = load_samples([prefix + name], [X])
    feed = only(loaded)
    assert ids(loaded) == [name]
    assert feed.source == name
    assert feed.recipe is None
    assert feed.array.dtype == np.dtype("float32")
    assert feed.array.dtype.isnative
    assert feed.array.flags.c_contiguous
    assert not feed.array.flags.writeable
    np.testing.assert_array_equal(feed.array, RAMP)
    assert feed.sha256 == hashlib.sha256(RAMP.astype("<f4").tobytes()).hexdigest()
    assert loaded.notes == []


def test_a_folder_and_a_glob_give_a_sample_a_file_sorted():
    Path("photos").mkdir()
    for name in ("b.png", "a.jpg", "c.npy"):
        if name == "c.npy":
            np.save("photos/c.npy", np.zeros((1, 3, 2, 2), np.float32))
        else:
            Image.fromarray(np.arange(12, dtype=np.uint8).reshape(2, 2, 3)).save(f"photos/{name}")
    for name in ("labels.txt", ".hidden.png"):
        open(f"photos/{name}", "w").close()
    picture = InputSpec("x", "float32", (1, 3, 2, 2))
    loaded = load_samples(["photos"], [picture])
    assert ids(loaded) == ["a.jpg", "b.png", "c.npy"]
    assert [sample.feeds["x"].source for sample in loaded.samples] == ["photos/a.jpg", "photos/b.png", "photos/c.npy"]
    assert "folder photos: 1 entries left out, such as labels.txt" in loaded.notes
    assert sum("no recipe given" in note for note in loaded.notes) == 1
    assert ids(load_samples(["photos/*.[jp][pn]g"], [picture])) == ["a.jpg", "b.png"]
    assert ids(load_samples(["x=photos"], [picture])) == ["a.jpg", "b.png", "c.npy"]


def test_sample_names_are_unique():
    Path("other").mkdir()
    np.save("other/ramp.npy", RAMP)
    loaded = load_samples(["ramp.npy", "other/ramp.npy", "twice.npy", "ramp.npy", "random:0", "random:0"], [X])
    assert ids(loaded) == ["ramp.npy", "other/ramp.npy", "twice.npy", "ramp.npy#2", "random:0", "random:0#2"]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("rmap.npy", ["no file rmap.npy", "nearest: ramp.npy"]),
        ("nowhere/ramp.npy", ["there is no folder nowhere"]),
        ("*.jpeg", ["no file matches *.jpeg"]),
        ("empty", ["folder empty holds no picture", "found: nothing"]),
        ("", ["an input without a path"]),
        ("x=", ["an input without a path"]),
        ("garbage.npy", ["garbage.npy cannot be read", "magic string"]),
        ("cut.npy", ["cut.npy cannot be read"]),
        ("garbage.npz", ["garbage.npz is no .npz"]),
        ("garbage.pb", ["no readable ONNX TensorProto"]),
        ("empty.pb", ["no readable ONNX TensorProto", "no data type"]),
        ("external.pb", ["its data is in another file"]),
        ("pickle.npy", ["Python objects (a pickle)", "refused"]),
        ("pickle.npz", ["Python objects (a pickle)", "refused"]),
        ("short.raw", ["short.raw has 15 bytes", "x (float32 1x4) needs 16 bytes"]),
        ("double.npy", ["double.npy is float64", "wants float32", '.astype("float32")']),
        ("flat.npy", ["shape 4,", "wants 1x4", "array[np.newaxis]"]),
        ("tall.npy", ["shape 4x1,", "wants 1x4"]),
        ("keys.npz", ["'X1' is no input", "nearest: x"]),
        ("photo.png", ["does not take a single picture"]),
    ],
)
def test_a_mistake_with_a_file_is_one_line_with_the_way_out(argument, words):
    Path("empty").mkdir()
    for ending in ("npy", "npz", "pb"):
        with open(f"garbage.{ending}", "wb") as file:
            file.write(b"\xff\xfenot what it says")
    open("empty.pb", "wb").close()
    external = numpy_helper.from_array(RAMP)
    external.data_location = onnx.TensorProto.EXTERNAL
    with open("external.pb", "wb") as file:
        file.write(external.SerializeToString())
    with open("ramp.npy", "rb") as whole, open("cut.npy", "wb") as cut:
        cut.write(whole.read()[:-3])
    np.save("pickle.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.savez("pickle.npz", x=np.array([{}], dtype=object))
    np.arange(15, dtype=np.uint8).tofile("short.raw")
    np.save("double.npy", RAMP.astype("f8"))
    np.save("flat.npy", RAMP[0])
    np.save("tall.npy", RAMP.T)
    np.savez("keys.npz", X1=RAMP)
    Image.new("RGB", (2, 2)).save("photo.png")
    refused(lambda: load_samples([argument], [X]), *words)


def test_a_layout_mistake_shows_the_transposition():
    np.save("nhwc.npy", np.zeros((1, 8, 9, 3), np.float32))
    spec = InputSpec("x", "float32", (1, 3, 8, 9))
    refused(lambda: load_samples(["nhwc.npy"], [spec]), "1x8x9x3", "1x3x8x9", "array.transpose(0, 3, 1, 2)")


@pytest.mark.parametrize("given", [(0, 4), (5, 4)])
def test_a_symbolic_dimension_takes_any_size_of_a_given_array(given):
    for dim in ("N", None, -1):
        spec = InputSpec("x", "float32", (dim, 4))
        assert only(samples_from_python(np.ones(given, np.float32), [spec])).array.shape == given


def test_one_open_dimension_of_a_raw_file_follows_from_its_size():
    RAMP.tofile("a.raw")
    assert only(load_samples(["a.raw"], [InputSpec("x", "float32", ("N", 2))])).array.shape == (2, 2)
    refused(lambda: load_samples(["a.raw"], [InputSpec("x", "float32", ("N", 3))]), "a multiple of 12 bytes")
    refused(lambda: load_samples(["a.raw"], [InputSpec("x", "float32", ("N", "M"))]), "np.save")


# -- NAME=X ------------------------------------------------------------------------------------------------------------


def test_a_repeated_name_starts_the_next_sample():
    arguments = ["left=ramp.npy", "right=pair.npy", "right=pair.npy", "left=twice.npy"]
    loaded = load_samples(arguments, [LEFT, RIGHT])
    assert ids(loaded) == ["1", "2"]
    assert [list(sample.feeds) for sample in loaded.samples] == [["left", "right"]] * 2
    np.testing.assert_array_equal(loaded.samples[1].arrays()["left"], 2 * RAMP)


def test_a_npz_keyed_by_names_is_one_sample_and_may_be_completed():
    np.savez("both.npz", right=PAIR, left=RAMP)
    np.savez("half.npz", left=RAMP)
    loaded = load_samples(["both.npz", "half.npz", "right=pair.npy"], [LEFT, RIGHT])
    assert ids(loaded) == ["both.npz", "half.npz"]
    assert loaded.samples[0].feeds["right"].source == "both.npz"
    assert loaded.samples[1].feeds["right"].source == "pair.npy"
    assert only(load_samples(["left=both.npz"], [LEFT])).array.shape == (1, 4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ramp.npy"], ["-i ramp.npy is for one input", "left (float32 1x4), right (int8 2)", "-i left=ramp.npy"]),
        (["photo.png"], ["-i NAME=FILE", "-i left=photo.png"]),
        (["left=ramp.npy"], ["sample 1 has nothing for input right (int8 2)", "-i right=FILE"]),
        (["left=ramp.npy", "left=ramp.npy", "right=pair.npy"], ["sample 1 has nothing for input right"]),
        (["lfet=ramp.npy"], ["lfet is no input of the model", "nearest: left"]),
        (["left=rmap.npy"], ["no file rmap.npy", "nearest: ramp.npy"]),
        (["ramp=2.npy"], ["ramp is no input", "no file of that whole name", "nearest: ramp.npy"]),
        (["left=*.npy"], ["stands for 3 file(s)", "2 inputs"]),
        (["random:0:1x4"], ["is for one input", "-i NAME=random:0:1x4"]),
        (["three.npz"], ["'middle' is no input", "left (float32"]),
    ],
)
def test_a_mistake_with_names_is_one_line_with_the_way_out(arguments, words):
    Image.new("RGB", (2, 2)).save("photo.png")
    np.savez("three.npz", left=RAMP, middle=RAMP, right=PAIR)
    refused(lambda: load_samples(arguments, [LEFT, RIGHT]), *words)


def test_an_equals_sign_in_a_name_or_a_path_does_no_harm():
    np.save("a=1.npy", RAMP)
    Path("x=y").mkdir()
    np.save("x=y/ramp.npy", RAMP)
    assert only(load_samples(["a=1.npy"], [X])).source == "a=1.npy"
    assert only(load_samples(["x=y/ramp.npy"], [X])).source == "x=y/ramp.npy"
    assert only(load_samples(["x=a=1.npy"], [X])).source == "a=1.npy"
    odd = [InputSpec("a", "float32", (1, 4)), InputSpec("a=b", "float32", (1, 4))]
    loaded = load_samples(["a=b=ramp.npy", "a=twice.npy"], odd)
    assert [feed.source for feed in loaded.samples[0].feeds.values()] == ["twice.npy", "ramp.npy"]


def test_a_tilde_after_a_name_is_the_home_folder(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    assert only(load_samples(["x=~/ramp.npy"], [X])).source == "~/ramp.npy"
    refused(lambda: load_samples(["~nobody-here/ramp.npy"], [X]), "there is no folder")


# -- random ------------------------------------------------------------------------------------------------------------


def test_without_arguments_the_feeds_are_random_and_the_note_says_so():
    for loaded in (load_samples([], [LEFT, RIGHT]), samples_from_python(None, [LEFT, RIGHT])):
        assert ids(loaded) == ["random:0"]
        assert loaded.notes == [RANDOM_NOTE]
        assert {feed.source for feed in loaded.samples[0].feeds.values()} == {"random:0"}
    assert RANDOM_NOTE == "RANDOM (seed 0): a real picture tests more (-i photo.jpg --preprocess recipe.toml)"


def test_the_first_input_is_what_numpy_draws_and_two_inputs_differ():
    twin = InputSpec("y", "float32", (1, 4))
    arrays = load_samples(["random:7"], [X, twin]).samples[0].arrays()
    want = np.random.Generator(np.random.PCG64(7)).standard_normal((1, 4)).astype(np.float32)
    np.testing.assert_array_equal(arrays["x"], want)
    assert not np.array_equal(arrays["x"], arrays["y"])
    named = load_samples(["y=random:7", "x=random:7"], [X, twin]).samples[0].arrays()
    assert all(np.array_equal(named[name], arrays[name]) for name in arrays)


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [
        ("uint8", 0, 255),
        ("int8", -128, 127),
        ("int16", -32768, 32767),
        ("uint16", 0, 65535),
        ("int32", 0, 9),
        ("int64", 0, 9),
        ("uint64", 0, 9),
        ("bool", 0, 1),
    ],
)
def test_random_integers_fill_their_range_or_stay_small(dtype, low, high):
    array = only(load_samples(["random:0"], [InputSpec("x", dtype, (400_000,))])).array
    assert array.dtype == dtype
    assert abs(int(array.min()) - low) <= (high - low) // 1000
    assert abs(int(array.max()) - high) <= (high - low) // 1000
    assert abs(array.mean() - (low + high) / 2) < (high - low) / 100


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_random_floats_are_standard_normal(dtype):
    array = only(load_samples(["random:0"], [InputSpec("x", dtype, (100_000,))])).array.astype("f8")
    assert abs(array.mean()) < 0.02
    assert abs(array.std() - 1) < 0.02


def test_a_symbolic_first_dimension_becomes_one_and_others_need_a_shape():
    spec = InputSpec("x", "float32", ("batch", 3, 4))
    loaded = load_samples(["random:0"], [spec])
    assert only(loaded).array.shape == (1, 3, 4)
    assert loaded.notes == ["input x: dimension batch taken as 1"]
    assert only(load_samples(["random:0:5x3x4"], [spec])).array.shape == (5, 3, 4)
    open_width = InputSpec("x", "float32", (None, 3, 48, "W"))
    refused(lambda: load_samples([], [open_width]), "x (float32 ?x3x48xW)", "-i x=random:0:1x3x48x64")
    assert only(load_samples(["x=random:0:1x3x48x64"], [open_width])).array.shape == (1, 3, 48, 64)
    assert only(load_samples(["random:0"], [InputSpec("x", "float32", ())])).array.shape == ()


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("random:", ["random: is not random:SEED", "random:0:1x3x48x192"]),
        ("random:-1", ["is not random:SEED"]),
        ("random:0:1,4", ["is not random:SEED"]),
        ("random:0:1x5", ["random shape 1x5", "x (float32 1x4)"]),
        ("random:0:4", ["random shape 4 does not fit"]),
        ("random", ["no file random"]),
    ],
)
def test_a_mistake_with_random_is_one_line(argument, words):
    refused(lambda: load_samples([argument], [X]), *words)


def test_a_random_feed_too_large_or_of_a_strange_dtype_is_refused():
    spec = InputSpec("x", "float32", ("N", "M"))
    refused(lambda: load_samples(["random:0:999999999x999999999"], [spec]), "no memory")
    for dtype in ("bfloat16", "str", "object", "complex64"):
        refused(lambda name=dtype: load_samples([], [InputSpec("x", name, (2,))]), dtype, "FILE.pb")


# -- Python ------------------------------------------------------------------------------------------------------------


def test_python_values_become_samples(folder):
    np.testing.assert_array_equal(only(samples_from_python(RAMP, [X])).array, RAMP)
    assert only(samples_from_python("ramp.npy", [X])).source == "ramp.npy"
    assert only(samples_from_python(folder / "ramp.npy", [X])).source == str(folder / "ramp.npy")
    assert only(samples_from_python("x=ramp.npy", [X])).source == "ramp.npy"
    assert only(samples_from_python(np.float32(1), [InputSpec("x", "float32", ())])).array.shape == ()
    both = samples_from_python({"right": PAIR, "left": folder / "ramp.npy"}, [LEFT, RIGHT])
    assert ids(both) == ["1"]
    assert list(both.samples[0].arrays()) == ["left", "right"]
    many = samples_from_python([RAMP, {"x": 2 * RAMP}, "ramp.npy", "random:3"], [X])
    assert ids(many) == ["1", "2", "ramp.npy", "random:3"]
    assert ids(samples_from_python(("left=ramp.npy", "right=pair.npy"), [LEFT, RIGHT])) == ["1"]


def test_a_path_is_never_taken_for_name_equals_file(folder):
    np.save("x=ramp.npy", 2 * RAMP)
    np.testing.assert_array_equal(only(samples_from_python(folder / "x=ramp.npy", [X])).array, 2 * RAMP)


def test_a_feed_does_not_change_with_the_array_it_came_from():
    array = RAMP.copy()
    feed = only(samples_from_python(array, [X]))
    array[:] = 9
    np.testing.assert_array_equal(feed.array, RAMP)
    assert feed.source == "array"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], ["empty list of inputs"]),
        (3, ["inputs of type int", "np.asarray"]),
        ([[1.0, 2.0]], ["inputs of type list"]),
        ({"lfet": RAMP}, ["'lfet' is no input", "nearest: left"]),
        ({"left": [1, 2]}, ["inputs['left'] is a list", 'dtype="float32"']),
        ({"left": RAMP}, ["sample 1 has nothing for input right"]),
        ({}, ["nothing for input left (float32 1x4), right (int8 2)"]),
        (RAMP, ["an array is for one input", "inputs={NAME: array"]),
        ({"left": RAMP.astype(object)}, ["Python objects"]),
        ({"left": np.zeros(4, [("a", "f4")])}, ["records"]),
    ],
)
def test_a_mistake_in_python_is_one_line_with_the_way_out(value, words):
    refused(lambda: samples_from_python(value, [LEFT, RIGHT]), *words)


# -- notes and recipes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "note"),
    [
        (np.zeros(4, np.int8), "array: input x is constant (all 0): it tests little"),
        (np.full(4, 7, np.uint8), "array: input x is constant (all 7): it tests little"),
        (np.array([1.0, np.nan, np.inf, -np.inf], np.float32), "array: input x holds 1 NaN and 2 Inf of 4 elements"),
        (np.zeros(0, np.float32), "array: input x is empty (0): it tests nothing"),
        (np.array([5], np.int64), None),
        (np.ones(4, np.float32), None),
    ],
)
def test_what_makes_a_feed_a_poor_test_is_noted(array, note):
    spec = InputSpec("x", array.dtype.name, ("N",))
    assert samples_from_python(array, [spec]).notes == ([note] if note else [])


def test_the_same_remark_on_many_samples_is_one_note():
    loaded = load_samples(["ramp.npy", "twice.npy"], [X])
    assert loaded.notes == []
    spec = InputSpec("x", "int8", (2,))
    for name in ("a.npy", "b.npy", "c.npy"):
        np.save(name, np.zeros(2, np.int8))
    assert load_samples(["[abc].npy"], [spec]).notes == [
        "a.npy and 2 more: input x is constant (all 0): it tests little"
    ]


def test_each_input_gets_its_own_recipe():
    Image.fromarray(np.array([[1, 2]], np.uint8)).save("tiny.png")
    with open("recipe.toml", "w") as file:
        file.write("[image]\nscale = 1\n[image.b]\nscale = 10\n")
    specs = [InputSpec(name, "float32", (1, 1, 1, 2)) for name in "ab"]
    loaded = load_samples(["a=tiny.png", "b=tiny.png"], specs, recipe="recipe.toml")
    arrays = loaded.samples[0].arrays()
    assert arrays["a"].ravel().tolist() == [1, 2]
    assert arrays["b"].ravel().tolist() == [10, 20]
    assert "scale=10" in loaded.samples[0].feeds["b"].recipe


def test_a_recipe_for_no_input_is_an_error_and_one_without_a_picture_a_note():
    with open("recipe.toml", "w") as file:
        file.write("[image.xx]\nscale = 1\n")
    refused(lambda: load_samples(["ramp.npy"], [X], recipe="recipe.toml"), "[image.xx]", "nearest: x", kind=RecipeError)
    loaded = load_samples(["ramp.npy"], [X], recipe=Recipe(scale=2.0))
    np.testing.assert_array_equal(only(loaded).array, RAMP)
    assert loaded.notes == ["the recipe was not used: no input is a picture, and tensors are taken as they are"]


def test_a_model_without_inputs_has_one_empty_sample():
    loaded = load_samples([], [])
    assert [sample.arrays() for sample in loaded.samples] == [{}]
    refused(lambda: load_samples(["ramp.npy"], []), "the model has no inputs")


def test_an_onnx_runtime_session_takes_the_arrays_as_they_are():
    helper = onnx.helper
    ports = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", ports[:1], ports[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    sample = load_samples(["ramp.npy"], [X]).samples[0]
    np.testing.assert_array_equal(session.run(None, sample.arrays())[0], -RAMP)


def test_the_import_is_light():
    code = (
        "import sys, equivcheck.inputs; print(sorted({'PIL', 'onnx', 'onnxruntime', 'ml_dtypes'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"


def test_the_public_names_are_these():
    assert sorted(inputs.__all__) == [
        "Feed",
        "InputSpec",
        "Loaded",
        "Recipe",
        "Recipes",
        "Sample",
        "load_samples",
        "samples_from_python",
    ]
