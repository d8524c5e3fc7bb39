"""Rewards of an image's pixels (appearance, compressibility, grade, photos, share), against closed forms."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pictures import encoded, picture
from retouch.rewards.pixels import AppearanceReward, CompressibilityReward, GradeReward, PhotosReward, ShareReward
from retouch.types import Sample, Task
from retouch_worlds.testing import check_reward

RED = (200, 60, 40)


def photograph(width=24, height=16):
    ramp = np.linspace(0, 255, width * height * 3).reshape(height, width, 3)
    return Image.fromarray((ramp * [1.0, 0.6, 0.3]).astype(np.uint8))


def photo(seed, height=48, width=48):
    """Grey shapes and noise with a slight tint: the channels are correlated, as in photographs."""
    random = np.random.default_rng(seed)
    shapes = Image.fromarray(random.integers(0, 255, (6, 6), dtype=np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    grey = np.asarray(shapes).astype(float) + random.normal(0, 8, (height, width))
    return Image.fromarray((grey[..., None] * [1.0, 0.9, 0.8]).clip(0, 255).round().astype(np.uint8))


REWARDS = [AppearanceReward(), CompressibilityReward(), GradeReward(), PhotosReward(colour=RED, preserve=2.0), ShareReward()]


@pytest.mark.parametrize("reward", REWARDS, ids=lambda reward: type(reward).__name__)
def test_rewards_of_pixels_pass_the_contract_checks(reward):
    mask = Image.new("L", (24, 20))
    mask.paste(255, (0, 0, 12, 20))
    images = [picture(0, (24, 20)), photo(1, 40, 56), Image.new("RGB", (16, 16), (9, 9, 9)), picture(3, (24, 20))]
    images[0].paste(0, (0, 0, 1, 1))
    check_reward(reward, [Sample(Task(str(k), "", (picture(9, (24, 20)),), mask), image) for k, image in enumerate(images)])


@pytest.mark.parametrize(
    ("reward", "keys", "says"),
    [
        (CompressibilityReward, {"quality": 0}, "equal to 1"),
        (CompressibilityReward, {"quality": 96}, "equal to 95"),
        (GradeReward, {"saturation": -1}, "saturation"),
        (GradeReward, {"strength": 1.5}, "strength"),
        (GradeReward, {"colour": [0, 0, 256]}, "colour"),
        (GradeReward, {}, "source"),
        (PhotosReward, {"colour": (1, 2)}, "colour"),
        (PhotosReward, {"colour": RED, "preserve": -1.0}, "preserve"),
        (PhotosReward, {"colour": RED, "preserve": math.nan}, "preserve"),
        (PhotosReward, {"colour": RED, "preserve": math.inf}, "preserve"),
        (PhotosReward, {"colour": RED}, "'t' has no source image"),
        (ShareReward, {"channel": "yellow"}, "'red', 'green' or 'blue'"),
    ],
)
def test_keys_out_of_range_and_samples_without_a_source_raise(reward, keys, says):
    with pytest.raises(ValueError, match=says):
        reward(**keys)([Sample(Task("t", ""), photo(0))])


def appearance(image, task=None):
    given = AppearanceReward()([Sample(task or Task("t", ""), image)])
    return {name: column[0].item() for name, column in given.items()}


def test_scores_of_flat_colours_match_closed_forms():
    orange = appearance(Image.new("RGB", (8, 8), (255, 102, 0)))
    assert orange["brightness"] == pytest.approx(0.299 + 0.587 * 0.4)
    assert orange["saturation"] == 1
    assert orange["detail"] == pytest.approx(0, abs=1e-7)
    assert math.isnan(orange["preservation"])
    assert appearance(Image.new("RGB", (8, 8), (200, 100, 100)))["saturation"] == pytest.approx(0.5)
    assert appearance(Image.new("RGB", (8, 8)))["saturation"] == 0
    assert appearance(None) == {"brightness": 0, "saturation": 0, "detail": 0, "preservation": 0}


def test_detail_is_the_rms_amplitude_of_high_frequencies():
    across = np.arange(32)

    def wave(frequency, amplitude=40):
        row = 128 + amplitude * np.cos(2 * np.pi * frequency * across / 32)
        return Image.fromarray(np.repeat(np.repeat(row[None, :, None], 24, axis=0), 3, axis=2).round().astype(np.uint8))

    assert appearance(wave(12))["detail"] == pytest.approx(40 / 255 / math.sqrt(2), rel=0.01)
    assert appearance(wave(12, amplitude=80))["detail"] == pytest.approx(2 * appearance(wave(12))["detail"], rel=0.01)
    assert appearance(wave(12).rotate(90, expand=True))["detail"] == pytest.approx(appearance(wave(12))["detail"], rel=1e-5)
    assert appearance(wave(4))["detail"] < 0.003  # rounding to 8 bits alone
    # Three quarters of the frequencies of white noise are high: above half of the maximum along at least one axis.
    grey = np.random.default_rng(0).normal(128, 20, (256, 256)).round().clip(0, 255).astype(np.uint8)
    assert appearance(Image.fromarray(grey).convert("RGB"))["detail"] == pytest.approx(math.sqrt(0.75) * 20 / 255, rel=0.02)


def test_preservation_compares_only_pixels_outside_the_mask():
    source = Image.new("RGB", (20, 10), (100, 100, 100))
    edited = source.copy()
    edited.paste((100, 151, 100), (0, 0, 10, 10))
    left = Image.new("L", (20, 10))
    left.paste(255, (0, 0, 10, 10))
    right = Image.eval(left, lambda value: 255 - value)

    def kept(mask):
        return appearance(edited, Task("t", "", images=(source,), mask=mask))["preservation"]

    assert kept(left) == 1
    assert kept(right) == pytest.approx(1 - 51 / 255 / 3)
    assert kept(Image.new("L", (20, 10))) == pytest.approx(1 - 51 / 255 / 6)
    assert math.isnan(kept(Image.new("L", (20, 10), 255)))
    assert math.isnan(kept(None))


def compressibility(*images, quality=95):
    return CompressibilityReward(quality=quality)([Sample(Task("t", ""), image) for image in images])["compressibility"].tolist()


def test_the_score_is_the_share_of_bytes_saved_by_jpeg():
    image = picture(2, (64, 64))
    saved = encoded(image, "JPEG", quality=30)
    assert compressibility(image, quality=30) == [pytest.approx(1 - len(saved) / (3 * 64 * 64))]
    assert compressibility(Image.new("RGB", (2, 2))) == [0]  # smaller than the header of a JPEG


def graded_task(source):
    return Task(id="one", instruction="grade it", images=(source,))


def closeness(reward, image, source):
    return float(reward([Sample(graded_task(source), image)])["closeness"])


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, lambda pixels, grey: pixels),
        ({"saturation": 0.25}, lambda pixels, grey: grey + 0.25 * (pixels - grey)),
        ({"saturation": 3}, lambda pixels, grey: np.clip(grey + 3 * (pixels - grey), 0, 1)),
        ({"saturation": 0, "colour": [0, 0, 255], "strength": 0.25}, lambda p, grey: 0.75 * grey + 0.25 * np.array([0, 0, 1.0])),
    ],
)
def test_closeness_equals_the_distance_to_a_grade_by_hand(keys, expected):
    source, image = photograph(), Image.new("RGB", (24, 16), (90, 120, 30))
    pixels = np.asarray(source) / 255
    grey = (pixels @ [0.299, 0.587, 0.114])[..., None]
    by_hand = 1 - np.sqrt(np.mean((np.asarray(image) / 255 - expected(pixels, grey)) ** 2))
    assert closeness(GradeReward(**keys), image, source) == pytest.approx(by_hand, abs=1e-6)
    black, white = Image.new("RGB", (8, 8)), Image.new("RGB", (8, 8), (255, 255, 255))
    assert closeness(GradeReward(), white, black) == closeness(GradeReward(), None, black) == 0
    large = photograph(48, 32)  # is resized to the image
    assert closeness(GradeReward(), large.resize((24, 16), Image.Resampling.LANCZOS), large) == 1


def test_scores_of_tensors_equal_the_column_and_their_gradient_points_to_the_graded_source():
    reward, source = GradeReward(saturation=0), photograph()
    images = torch.rand(2, 3, 16, 24, generator=torch.Generator().manual_seed(0)).mul(255).round().div(255).requires_grad_()
    pictures = [Image.fromarray(each.mul(255).round().byte().movedim(0, -1).numpy()) for each in images.detach()]
    column = reward([Sample(graded_task(source), each) for each in pictures])["closeness"]
    scores = reward.score_tensors(images, [graded_task(source)] * 2)
    torch.testing.assert_close(scores, column, atol=1e-6, rtol=0)
    (gradient,) = torch.autograd.grad(scores.sum(), images)
    target = reward._graded(graded_task(source), (24, 16)).float()
    torch.testing.assert_close(gradient.sign(), (target - images).detach().sign())
    same = target[None].clone().requires_grad_()
    (flat,) = torch.autograd.grad(reward.score_tensors(same, [graded_task(source)]).sum(), same)
    assert torch.isfinite(flat).all()


def photo_score(source, image, **options):
    reward = PhotosReward(**{"colour": RED, **options})
    return {name: column.item() for name, column in reward([Sample(Task("t", "", (source,)), image)]).items()}


def test_colour_changes_lower_preservation_little_and_lost_structure_much():
    source = np.asarray(photo(0)).astype(float)
    noise = np.random.default_rng(5).normal(size=source.shape)
    changed = {
        "redder": source * [0.9, 0.4, 0.3] + [20, 0, 0],
        "dark": source * 0.4,
        "little noise": source + 5 * noise,
        "much noise": source + 60 * noise,
        "flat": np.full_like(source, RED),
        "unrelated": np.asarray(photo(1)),
        "negative": 255 - source,
    }
    images = {name: Image.fromarray(values.clip(0, 255).round().astype(np.uint8)) for name, values in changed.items()}
    kept = {name: photo_score(photo(0), image)["preservation"] for name, image in images.items()}
    assert kept["redder"] > 0.85
    assert kept["dark"] > 0.85
    assert kept["redder"] > kept["little noise"] > kept["much noise"] > kept["flat"]
    assert max(kept["flat"], kept["unrelated"]) < 0.2
    assert kept["negative"] < 0.1


@given(colour=st.tuples(*[st.integers(0, 255)] * 3), shown=st.tuples(*[st.integers(0, 255)] * 3))
@settings(max_examples=40, derandomize=True)
def test_colour_is_one_minus_the_distance_relative_to_the_largest_distance(colour, shown):
    image = Image.new("RGB", (8, 8), shown)
    farthest = max(math.dist(colour, corner) for corner in itertools.product((0, 255), repeat=3))
    expected = 1 - math.dist(colour, shown) / farthest
    assert photo_score(image, image, colour=colour)["colour"] == pytest.approx(expected, abs=1e-6)
    for preserve in (0.0, 1.0, 2.5):
        found = photo_score(photo(0), photo(1), preserve=preserve)
        assert found["reward"] == pytest.approx(found["preservation"] ** preserve * found["colour"], rel=1e-6)


def test_a_source_of_another_size_is_resized():
    image = photo(0, 64, 64)
    small = image.resize((32, 32), Image.Resampling.LANCZOS)
    assert photo_score(image, small)["preservation"] == 1.0
    assert photo_score(image.resize((128, 96)), image)["preservation"] > 0.8


def test_a_small_side_compares_the_layout_and_not_the_detail():
    source = photo(0)
    coarse = source.resize((8, 8), Image.Resampling.BOX).resize((48, 48), Image.Resampling.BICUBIC)
    assert photo_score(source, coarse, side=8)["preservation"] > 0.8 > 0.7 > photo_score(source, coarse)["preservation"]
    assert photo_score(source, photo(1), side=8)["preservation"] < 0.3
    for side in (48, 100):
        assert photo_score(source, coarse, side=side) == photo_score(source, coarse)
    assert photo_score(photo(0, 40, 56), photo(0, 40, 56), side=6)["preservation"] == 1.0
