"""Crops, flips, colours and normalization give the numbers that numpy gives, and the same on any number of ranks."""

import io
import random

import numpy as np
import pytest
import torch
from PIL import Image

from echelon.base.errors import DataError, UsageError
from echelon.data import Loader
from echelon.zoo.datasets.images.arrays import ArrayImages
from echelon.zoo.entry import Request
from echelon.zoo.preprocessing import PREPROCESSINGS, ArrayPicture, EncodedPicture, Recipe, preprocessing_of
from echelon.zoo.preprocessing.boxes import center, random_area, random_scale
from echelon.zoo.preprocessing.recipes import coloured


def noise(*shape, seed=0):
    return np.random.RandomState(seed).randint(0, 256, shape).astype(np.uint8)


def smooth(height, width):
    """Colours that change slowly, so that a JPEG keeps them and scales hardly differ."""
    down, across = np.mgrid[0:height, 0:width]
    planes = [128 + 100 * np.sin(down / height * 3), 128 + 100 * np.cos(across / width * 4), 60 + across * 120 / width]
    return np.stack(planes, -1).round().astype(np.uint8)


def encoded(pixels, kind="PNG", **options):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def request(**values):
    return Request({"model_name": "resnet_v1_50", "image_size": 224, **values}, "classify_images")


def test_a_png_of_the_right_size_comes_through_unchanged():
    pixels = noise(16, 16, 3)
    assert np.array_equal(PREPROCESSINGS["none"].train(EncodedPicture(encoded(pixels), 3, "x"), 16), pixels)


def test_whole_pixel_crop_equals_numpy_slice_in_both_kinds():
    """A crop of whole pixels is NumPy's slice in both kinds of pictures."""
    pixels = noise(20, 30, 3)
    box = (5, 2, 17, 14)
    for picture in (ArrayPicture(pixels), EncodedPicture(encoded(pixels), 3, "x")):
        assert np.array_equal(picture.part(box, 12), pixels[2:14, 5:17])


def test_center_equals_resize_to_256_and_crop_to_224():
    """The middle is the part that resizing to 256 and cutting 224 leaves."""
    assert center(256, 256) == (16, 16, 240, 240)
    assert center(500, 300, 1.0) == (100, 0, 400, 300)


def test_padding_and_cropping_moves_the_picture_under_zeros():
    pixels, seen = noise(8, 8, 3) | 1, set()
    wide = np.zeros((10, 10, 3), np.uint8)
    wide[1:9, 1:9] = pixels
    windows = {(y, x): wide[y : y + 8, x : x + 8].tobytes() for y in range(3) for x in range(3)}
    for seed in range(60):
        random.seed(seed)
        made = Recipe(pad=1 / 8)(ArrayPicture(pixels), 8).tobytes()
        seen |= {where for where, window in windows.items() if window == made}
    assert seen == set(windows)


def test_every_other_picture_is_mirrored():
    pixels, flipped = noise(6, 6, 1), 0
    for seed in range(200):
        random.seed(seed)
        made = Recipe(flip=True)(ArrayPicture(pixels), 6)
        mirrored = np.array_equal(made, pixels[:, ::-1])
        assert mirrored or np.array_equal(made, pixels)
        flipped += mirrored
    assert 75 < flipped < 125


def test_random_boxes_lie_inside_and_cover_what_they_promise():
    random.seed(0)
    for _ in range(300):
        left, upper, right, lower = random_area(500, 375, least=0.1)
        assert 0 <= left < right <= 500
        assert 0 <= upper < lower <= 375
        assert 0.095 < (right - left) * (lower - upper) / (500 * 375) <= 1
        assert 0.74 < (right - left) / (lower - upper) < 1.35
        left, upper, right, lower = random_scale(500, 375)
        assert right - left == pytest.approx(lower - upper)
        assert 375 * 224 / 512 - 1e-6 <= right - left <= 375 * 224 / 256 + 1e-6
        assert 0 <= left < right <= 500
        assert 0 <= upper < lower <= 375


def test_colours_change_by_brightness_contrast_then_saturation():
    pixels = (60 + noise(9, 7, 3) / 3).astype(np.uint8)  # nothing is clipped on the way
    brightness, contrast, saturation = 0.9, 1.2, 0.7
    weights = np.array([0.299, 0.587, 0.114])
    step = pixels * brightness
    step = contrast * step + (1 - contrast) * (step @ weights).mean()
    step = saturation * step + (1 - saturation) * (step @ weights)[..., None]
    assert np.abs(coloured(pixels, brightness, contrast, saturation) - np.floor(step + 0.5)).max() <= 1
    assert np.array_equal(coloured(pixels, 1, 1, 1), pixels)


@pytest.mark.parametrize("name", sorted(PREPROCESSINGS))
@pytest.mark.parametrize("channels", [1, 3])
def test_bytes_are_normalized_as_numpy_does_it(name, channels):
    images = torch.from_numpy(noise(2, channels, 5, 5))
    mean, std = (np.array(numbers) for numbers in PREPROCESSINGS[name].spread)
    if channels == 1:
        mean, std = mean.mean(keepdims=True), std.mean(keepdims=True)
    expected = (images.numpy() / 255 - mean.reshape(1, -1, 1, 1)) / std.reshape(1, -1, 1, 1)
    normalize = PREPROCESSINGS[name].normalize(channels)
    made, other = normalize((images, "other"))
    assert made.dtype is torch.float32
    assert other == "other"
    np.testing.assert_allclose(made.numpy(), expected, atol=2e-6)
    assert normalize((made,))[0] is made


def test_a_jpeg_is_decoded_small_and_looks_the_same():
    pixels = smooth(400, 640)
    data = encoded(pixels, "JPEG", quality=95)
    whole = np.asarray(Image.fromarray(pixels).resize((50, 50), Image.Resampling.BILINEAR, box=(40, 40, 440, 360)))
    picture = EncodedPicture(data, 3, "x")
    assert np.abs(picture.part((40, 40, 440, 360), 50).astype(int) - whole).max() <= 6
    assert picture._image.size == (80 * 2, 50 * 2)  # a quarter: an eighth would leave 40 of 50 pixels


def test_gray_and_transparent_images_get_the_requested_channels():
    gray = noise(8, 8)
    assert np.array_equal(EncodedPicture(encoded(gray), 3, "x").part((0, 0, 8, 8), 8), np.stack([gray] * 3, -1))
    see_through = np.concatenate([noise(8, 8, 3), np.full((8, 8, 1), 9, np.uint8)], -1)
    assert np.array_equal(EncodedPicture(encoded(see_through), 3, "x").part((0, 0, 8, 8), 8), see_through[..., :3])
    assert EncodedPicture(encoded(noise(8, 8, 3)), 1, "x").part((0, 0, 8, 8), 4).shape == (4, 4, 1)


@pytest.mark.parametrize(("kind", "keep"), [("JPEG", 0.5), ("PNG", 0.5), ("JPEG", 0.0)])
def test_a_picture_that_is_cut_off_is_named_in_one_line(kind, keep):
    data = encoded(noise(64, 64, 3), kind)
    with pytest.raises(DataError, match=r"^cat\.jpg is .*; fetch it again$") as caught:
        EncodedPicture(data[: int(keep * len(data))], 3, "cat.jpg").part((0, 0, 64, 64), 32)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "size", "name"),
    [
        ("lenet", 28, "lenet"),
        ("vgg_16", 224, "vgg"),
        ("inception_resnet_v2", 299, "inception"),
        ("resnet_v1_50", 224, "resnet"),
        ("timm:convnext_tiny", 224, "resnet"),
        ("resnet_v1_50", 32, "cifarnet"),
    ],
)
def test_a_model_has_its_own_preprocessing(model, size, name):
    assert preprocessing_of(request(model_name=model, image_size=size)).name == name
    assert preprocessing_of(request(model_name=model, image_size=size, preprocessing_name="vgg")).name == "vgg"


def test_an_unknown_name_is_an_error_that_names_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'inception'"):
        preprocessing_of(request(preprocessing_name="incepton"))


def test_augmentation_is_equal_for_one_rank_two_and_workers():
    """Augmentation is the same on one rank, on two ranks and in workers."""
    images, labels = torch.from_numpy(noise(12, 3, 40, 40)), torch.arange(12)
    data = ArrayImages(images, labels, PREPROCESSINGS["inception"].train, 16)
    alone = [batch[0] for batch in Loader(data, batch_size=6, seed=3)]
    ranks = [
        [batch[0] for batch in Loader(data, batch_size=3, rank=rank, world_size=2, seed=3, workers=rank)]
        for rank in range(2)
    ]
    for whole, *halves in zip(alone, *ranks, strict=True):
        assert torch.equal(whole, torch.cat(halves))
