"""Pictures: the arithmetic against hand-written numpy, defaults from the input, and the odd kinds of picture."""

from __future__ import annotations

import numpy as np
import PIL
import pytest
from PIL import Image

from equivcheck.errors import InputError, RecipeError
from equivcheck.inputs import InputSpec, Recipe, load_samples

# 2 x 2, R G B
PIXELS = np.array([[[0, 10, 20], [255, 128, 1]], [[127, 200, 3], [90, 91, 92]]], dtype=np.uint8)
NCHW = InputSpec("x", "float32", (1, 3, 2, 2))


@pytest.fixture
def png(tmp_path):
    return saved(tmp_path / "four.png", Image.fromarray(PIXELS))


def saved(path, picture, **options):
    picture.save(path, **options)
    return str(path)


def feed(path, spec, recipe=None):
    loaded = load_samples([path], [spec], recipe=recipe)
    return loaded.samples[0].feeds[spec.name], loaded.notes


def numpy_says(scale=None, mean=None, std=None, dtype="float32", layout="NCHW", pixels=PIXELS):
    values = pixels.astype("f8")
    values = values * scale if scale is not None else values
    values = values - np.array(mean, "f8") if mean is not None else values
    values = values / np.array(std, "f8") if std is not None else values
    values = values.transpose(2, 0, 1)[None] if layout == "NCHW" else values[None]
    if np.dtype(dtype).kind == "f":
        return values.astype(dtype)
    info = np.iinfo(dtype)
    whole = [min(max(round(value), info.min), info.max) for value in values.ravel().tolist()]  # Python rounds half-even
    return np.array(whole, dtype).reshape(values.shape)


@pytest.mark.parametrize(
    ("recipe", "scale", "mean", "std"),
    [
        ("", None, None, None),
        ("scale=1/255", 1 / 255, None, None),
        ("scale=1/2", 1 / 2, None, None),
        ("scale=1/127.5,mean=1", 1 / 127.5, 1, None),
        (
            "scale=1/255,mean=0.485:0.456:0.406,std=0.229:0.224:0.225",
            1 / 255,
            [0.485, 0.456, 0.406],
            [0.229, 0.224, 0.225],
        ),
        ("mean=123.675:116.28:103.53,std=58.395", None, [123.675, 116.28, 103.53], 58.395),
    ],
)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int8", "uint8", "int32"])
def test_the_arithmetic_is_that_of_numpy(png, recipe, scale, mean, std, layout, dtype):
    spec = InputSpec("x", dtype, (1, 3, 2, 2) if layout == "NCHW" else (1, 2, 2, 3))
    if dtype == "int8" and not recipe:
        mean = 128
    got, notes = feed(png, spec, recipe)
    want = numpy_says(scale, mean, std, dtype, layout)
    assert got.array.dtype == want.dtype
    np.testing.assert_array_equal(got.array, want)
    assert not any("no recipe" in note for note in notes)


def test_halves_round_to_even_and_integers_saturate(png):
    got, _ = feed(png, InputSpec("x", "int8", (1, 3, 2, 2)), "scale=0.5")
    np.testing.assert_array_equal(got.array[0, 0], [[0, 127], [64, 45]])  # 255 / 2 = 127.5 -> 128 -> 127; 63.5 -> 64
    np.testing.assert_array_equal(got.array[0, 2], [[10, 0], [2, 46]])  # 0.5 -> 0, 1.5 -> 2
    wide, _ = feed(png, InputSpec("x", "int64", (1, 3, 2, 2)), "scale=1e30")
    assert wide.array.max() > 9.2e18
    assert wide.array.min() == 0


@pytest.mark.parametrize(
    ("dtype", "want", "applied"),
    [
        ("uint8", numpy_says(dtype="uint8"), "dtype=uint8"),
        ("int8", numpy_says(mean=128, dtype="int8"), "mean=128,layout=NCHW,dtype=int8"),
        ("float32", numpy_says(scale=1 / 255), "scale=1/255,layout=NCHW,dtype=float32"),
    ],
)
def test_without_a_recipe_the_input_decides_and_a_note_says_what(png, dtype, want, applied):
    got, notes = feed(png, InputSpec("x", dtype, (1, 3, 2, 2)))
    np.testing.assert_array_equal(got.array, want)
    assert got.recipe.startswith("resize=2x2,fit=stretch,filter=bilinear,color=RGB,")
    assert got.recipe.endswith(f"{applied} (Pillow {PIL.__version__})")
    (note,) = notes
    assert note.startswith(f"input x: no recipe given, applied {got.recipe}")
    assert ("preprocessing is unknown: --preprocess" in note) == (dtype == "float32")


@pytest.mark.parametrize("dtype", ["int8", "uint8", "float32"])
@pytest.mark.parametrize("recipe", [None, "", "fit=letterbox", "crop=2x2", "scale=2,color=BGR"])
def test_the_recorded_recipe_makes_the_same_bytes_again(png, dtype, recipe):
    spec = InputSpec("x", dtype, (1, 3, 2, 2))
    first, _ = feed(png, spec, recipe)
    again, _ = feed(png, spec, first.recipe)
    assert again.sha256 == first.sha256
    assert again.recipe == first.recipe


@pytest.mark.parametrize(
    ("shape", "recipe", "want"),
    [
        ((1, 3, 5, 7), None, (1, 3, 5, 7)),
        ((1, 5, 7, 3), None, (1, 5, 7, 3)),
        (("N", 3, "H", "W"), None, (1, 3, 2, 2)),
        ((None, None, None, 3), None, (1, 2, 2, 3)),
        ((-1, 3, 5, 7), None, (1, 3, 5, 7)),
        ((1, 1, 5, 7), None, (1, 1, 5, 7)),
        ((1, 3, 4, 4), None, (1, 3, 4, 4)),
        ((3, 5, 7), None, (3, 5, 7)),
        ((5, 7, 1), None, (5, 7, 1)),
        ((1, 3, "H", "W"), "resize=6x4", (1, 3, 6, 4)),
        (("N", "C", "H", "W"), "resize=6x4,layout=NCHW,color=GRAY", (1, 1, 6, 4)),
        ((1, 3, 5, 3), "layout=NHWC,color=RGB", (1, 3, 5, 3)),
        ((1, 1, 1, 1), "layout=NCHW", (1, 1, 1, 1)),
    ],
)
def test_layout_size_and_colour_come_from_the_input(png, shape, recipe, want):
    got, _ = feed(png, InputSpec("x", "uint8", shape), recipe)
    assert got.array.shape == want
    assert got.array.flags.c_contiguous


def test_a_symbolic_batch_is_taken_as_one_and_said(png):
    _, notes = feed(png, InputSpec("x", "uint8", ("N", 3, 2, 2)), "")
    assert notes == ["input x: dimension N taken as 1"]


@pytest.mark.parametrize(
    ("dtype", "shape", "recipe", "words"),
    [
        ("float32", (1, 3, 5, 3), None, ["1x3x5x3", "layout=NCHW"]),
        ("float32", (1, "C", 5, 5), None, ["layout=NCHW"]),
        ("float32", ("N", "C", 5, 5), "layout=NCHW", ["channels open", "color=RGB"]),
        ("float32", (1, 4, 5, 5), None, ["4 channels", "FILE.npy"]),
        ("float32", (8, 3, 5, 5), None, ["8x3x5x5", "does not take a single picture"]),
        ("float32", (1, 1000), None, ["1x1000", "does not take a single picture"]),
        ("int64", (1, 3, 2, 2), None, ["int64", "no obvious picture preprocessing", "scale=1"]),
        ("bool", (1, 3, 2, 2), "", ["bool", "FILE.npy"]),
        ("float32", (1, 3, "H", 5), None, ["height and width", "resize="]),
        ("float32", (1, 3, "H", "W"), "fit=letterbox", ["height and width", "resize="]),
        ("float32", (1, 3, 5, 5), "resize=4x5", ["4x5", "5x5", "leave them out"]),
        ("float32", (1, 3, 5, 5), "resize=9x9,crop=4x4", ["4x4", "5x5"]),
        ("float32", (1, 3, 5, 5), "color=GRAY", ["color=GRAY makes 1 channel", "wants 3"]),
        ("float32", (1, 3, 5, 5), "dtype=int8", ["dtype=int8", "wants float32"]),
        ("float32", (1, 3, 5, 5), "mean=1:2", ["mean has 2 numbers", "1 or 3"]),
        ("float32", (1, 3, 5, 5), "std=1:2:3:4", ["std has 4 numbers"]),
        ("float32", (1, 3, 3, 3), "layout=NCHW,crop=3x3", ["crop=3x3 is larger than", "2x2 at that point"]),
    ],
)
def test_what_does_not_fit_is_said_with_the_way_out(png, dtype, shape, recipe, words):
    with pytest.raises(InputError) as caught:
        feed(png, InputSpec("x", dtype, shape), recipe)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_colours_are_swapped_or_greyed_as_asked(png):
    bgr, _ = feed(png, InputSpec("x", "uint8", (1, 2, 2, 3)), "color=BGR,mean=1:2:3")
    np.testing.assert_array_equal(bgr.array[0], np.clip(PIXELS[..., ::-1].astype(int) - [1, 2, 3], 0, 255))
    grey, _ = feed(png, InputSpec("x", "uint8", (1, 2, 2, 1)))
    luma = PIXELS @ np.array([0.299, 0.587, 0.114])  # ITU-R BT.601, what Pillow documents for "L"
    np.testing.assert_allclose(grey.array[0, ..., 0], luma, atol=1)


def test_a_grey_picture_fills_three_channels(tmp_path):
    path = saved(tmp_path / "grey.png", Image.fromarray(PIXELS[..., 1]))
    got, _ = feed(path, InputSpec("x", "uint8", (1, 3, 2, 2)))
    assert (got.array[0] == PIXELS[..., 1]).all()


def test_resizing_is_that_of_pillow_with_the_filter_asked_for(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    path = saved(tmp_path / "noise.png", Image.fromarray(noise))
    for name in ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"):
        got, _ = feed(path, InputSpec("x", "uint8", (1, 16, 24, 3)), f"filter={name}")
        resampling = getattr(Image.Resampling, name.upper())
        np.testing.assert_array_equal(got.array[0], np.asarray(Image.fromarray(noise).resize((24, 16), resampling)))


def test_letterbox_keeps_the_aspect_and_pads_with_grey(tmp_path):
    path = saved(tmp_path / "wide.png", Image.new("RGB", (8, 4), (255, 0, 0)))
    got, _ = feed(path, InputSpec("x", "uint8", (1, 4, 4, 3)), "fit=letterbox")
    rows = got.array[0]
    assert (rows[0] == 114).all()
    assert (rows[3] == 114).all()
    assert (rows[1:3] == [255, 0, 0]).all()
    black, _ = feed(path, InputSpec("x", "uint8", (1, 5, 4, 3)), "fit=letterbox,pad=0")
    assert black.array[0, :, 0, 0].tolist() == [0, 255, 255, 0, 0]  # the odd row goes below


@pytest.mark.parametrize(
    ("recipe", "want"),
    [
        # 4 x 8, every column its own grey; sizes chosen so that nothing is interpolated
        ("fit=shorter,filter=nearest", [20, 30, 40, 50]),
        ("resize=4x8,crop=4x4,filter=nearest", [20, 30, 40, 50]),
        ("crop=4x4", [20, 30, 40, 50]),
        ("resize=4x4,fit=shorter,crop=4x4,filter=nearest", [20, 30, 40, 50]),
    ],
)
def test_crops_are_taken_from_the_centre(tmp_path, recipe, want):
    columns = np.tile(np.arange(8, dtype=np.uint8) * 10, (4, 1))
    path = saved(tmp_path / "columns.png", Image.fromarray(columns))
    got, _ = feed(path, InputSpec("x", "uint8", (1, 1, 4, 4)), recipe)
    assert got.array[0, 0, 0].tolist() == want


def test_shorter_then_crop_is_the_imagenet_pipeline(tmp_path):
    noise = np.random.default_rng(1).integers(0, 256, (375, 500, 3), dtype=np.uint8)
    path = saved(tmp_path / "photo.png", Image.fromarray(noise))
    got, _ = feed(path, InputSpec("x", "uint8", (1, 223, 224, 3)), "resize=256x256,fit=shorter,crop=223x224")
    # torchvision: Resize(256): int(256 * 500 / 375) = 341 wide; CenterCrop: left = round(58.5), top = round(16.5)
    resized = Image.fromarray(noise).resize((341, 256), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(got.array[0], np.asarray(resized)[16:239, 58:282])


def test_the_exif_turn_is_carried_out(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned 90 degrees clockwise
    path = saved(tmp_path / "turned.png", Image.fromarray(PIXELS), exif=exif)
    got, _ = feed(path, InputSpec("x", "uint8", (1, 2, 2, 3)))
    np.testing.assert_array_equal(got.array[0], np.rot90(PIXELS, -1))


ALPHA = np.dstack([PIXELS, np.array([[0, 255], [255, 255]], np.uint8)])
INK = Image.merge("CMYK", [*Image.fromarray(255 - PIXELS).split(), Image.new("L", (2, 2), 0)])  # no black: 255 - RGB
SIXTEEN = np.array([[0, 255], [256, 65535]], np.uint16)


@pytest.mark.parametrize(
    ("picture", "name", "want", "note"),
    [
        (Image.fromarray(ALPHA), "a.png", PIXELS, "alpha is dropped"),
        (Image.fromarray(np.dstack([PIXELS, np.full((2, 2), 255, np.uint8)])), "a.png", PIXELS, None),
        (Image.fromarray(PIXELS).convert("P", palette=Image.Palette.ADAPTIVE), "a.png", PIXELS, None),
        (Image.fromarray(SIXTEEN), "a.png", (SIXTEEN >> 8)[..., None].repeat(3, 2), "16-bit grey: the high byte"),
        (
            Image.fromarray(np.array([[True, False], [False, True]])),
            "a.png",
            np.eye(2)[..., None].repeat(3, 2) * 255,
            None,
        ),
        (Image.fromarray(PIXELS[..., 0]).convert("LA"), "a.png", PIXELS[..., :1].repeat(3, 2), None),
        (INK, "a.tif", PIXELS, "CMYK colours converted"),
        (Image.fromarray(SIXTEEN.astype(np.int32)), "a.tif", (SIXTEEN >> 8)[..., None].repeat(3, 2), "16-bit grey"),
    ],
    ids=["alpha", "opaque", "palette", "16 bits", "1 bit", "grey alpha", "CMYK", "32-bit ints"],
)
def test_every_kind_of_picture_becomes_eight_bits(tmp_path, picture, name, want, note):
    path = saved(tmp_path / name, picture)
    got, notes = feed(path, InputSpec("x", "uint8", (1, 2, 2, 3)), "")
    np.testing.assert_array_equal(got.array[0], want)
    about = [text for text in notes if text.startswith(path)]
    assert len(about) == (note is not None)
    assert note is None or note in about[0]


def test_the_first_of_several_frames_is_used(tmp_path):
    frames = [Image.new("L", (2, 2), level) for level in (10, 20)]
    path = saved(tmp_path / "two.gif", frames[0], save_all=True, append_images=frames[1:])
    got, notes = feed(path, InputSpec("x", "uint8", (1, 1, 2, 2)), "")
    assert (got.array == 10).all()
    assert notes == [
        f"{path}: several frames: the first is used",
        f"{path}: input x is constant (all 10): it tests little",
    ]


@pytest.mark.parametrize(
    ("picture", "words"),
    [
        (Image.fromarray(np.array([[0, 70000]], np.int32)), ["32-bit levels from 0 to 70000", "8 bits"]),
        (Image.fromarray(np.array([[0.5, 1]], np.float32)), ["float levels", "8 bits"]),
    ],
)
def test_levels_without_a_meaning_are_refused(tmp_path, picture, words):
    path = saved(tmp_path / "odd.tif", picture)
    with pytest.raises(InputError) as caught:
        feed(path, NCHW)
    assert all(word in str(caught.value) for word in words)


def test_a_broken_picture_and_a_file_that_is_none_are_one_line(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for name in ("noise.png", "noise.jpg"):
        path = tmp_path / name
        Image.fromarray(noise).save(path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(InputError, match=rf"picture .*{name} cannot be read: .*truncated.*; is the file whole\?"):
            feed(str(path), NCHW)
    (tmp_path / "labels.txt").write_text("cat")
    with pytest.raises(InputError, match=r"neither a picture that Pillow can open nor a .npy"):
        feed(str(tmp_path / "labels.txt"), NCHW)


def test_a_recipe_object_is_taken_as_it_is(png):
    got, _ = feed(png, NCHW, Recipe(scale=1 / 127.5, mean=(1.0,)))
    np.testing.assert_array_equal(got.array, numpy_says(1 / 127.5, 1))
    with pytest.raises(RecipeError, match="crop"):
        feed(png, NCHW, Recipe(crop=(1, 1)))


@pytest.mark.parametrize(("recipe", "said"), [("scale=1/127.5,mean=1", True), ("scale=1", False), ("", False)])
def test_a_recipe_that_leaves_an_integer_input_next_to_nothing_is_told(tmp_path, recipe, said):
    path = saved(tmp_path / "many.png", Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)))
    _, notes = feed(path, InputSpec("x", "int8", (1, 8, 8, 3)), recipe)
    assert any("takes codes, not reals" in note for note in notes) == said
