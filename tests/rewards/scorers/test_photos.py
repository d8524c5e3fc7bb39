"""The photos reward: which changes lower preservation, and the distance of the colour."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from retouch.protocols import Reward
from retouch.rewards.scorers.pixels import PhotosReward
from retouch.types import Sample, Task
from retouch_worlds.testing import check_reward

RED = (200, 60, 40)


def from_array(values):
    return Image.fromarray(np.asarray(values).clip(0, 255).round().astype(np.uint8))


def photo(seed, height=48, width=48):
    """Grey shapes and noise with a slight tint: the channels are correlated, as in photographs."""
    random = np.random.default_rng(seed)
    shapes = Image.fromarray(random.integers(0, 255, (6, 6), dtype=np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    grey = np.asarray(shapes).astype(float) + random.normal(0, 8, (height, width))
    return from_array(grey[..., None] * [1.0, 0.9, 0.8])


def score(source, image, **options):
    reward = PhotosReward(**{"colour": RED, **options})
    return {name: column.item() for name, column in reward([Sample(Task("t", "", (source,)), image)]).items()}


def test_photos_reward_passes_the_contract_checks():
    sources = [photo(0), photo(1, 40, 56), Image.new("RGB", (16, 16), (9, 9, 9))]
    images = [photo(0), photo(2, 48, 40), photo(3, 16, 16)]
    samples = [Sample(Task(str(k), "", (source,)), image) for k, (source, image) in enumerate(zip(sources, images, strict=True))]
    reward = PhotosReward(colour=RED, preserve=2.0)
    assert isinstance(reward, Reward)
    check_reward(reward, samples)


def test_colour_changes_lower_preservation_little_and_lost_structure_much():
    source = np.asarray(photo(0)).astype(float)
    noise = np.random.default_rng(5).normal(size=source.shape)
    kept = {
        name: score(from_array(source), from_array(image))["preservation"]
        for name, image in {
            "redder": source * [0.9, 0.4, 0.3] + [20, 0, 0],
            "dark": source * 0.4,
            "little noise": source + 5 * noise,
            "much noise": source + 60 * noise,
            "flat": np.full_like(source, RED),
            "unrelated": np.asarray(photo(1)),
            "negative": 255 - source,
        }.items()
    }
    assert kept["redder"] > 0.85
    assert kept["dark"] > 0.85
    assert kept["redder"] > kept["little noise"] > kept["much noise"] > kept["flat"]
    assert kept["flat"] < 0.2
    assert kept["unrelated"] < 0.2
    assert kept["negative"] < 0.1


@given(colour=st.tuples(*[st.integers(0, 255)] * 3), shown=st.tuples(*[st.integers(0, 255)] * 3))
@settings(max_examples=40, derandomize=True)
def test_colour_is_one_minus_the_distance_relative_to_the_largest_distance(colour, shown):
    image = Image.new("RGB", (8, 8), shown)
    farthest = max(math.dist(colour, corner) for corner in [(r, g, b) for r in (0, 255) for g in (0, 255) for b in (0, 255)])
    expected = 1 - math.dist(colour, shown) / farthest
    assert score(image, image, colour=colour)["colour"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("preserve", [0.0, 1.0, 2.5])
def test_reward_is_preservation_to_a_power_times_colour(preserve):
    given = score(photo(0), photo(1), preserve=preserve)
    assert given["reward"] == pytest.approx(given["preservation"] ** preserve * given["colour"], rel=1e-6)


def test_a_source_of_another_size_is_resized():
    image = photo(0, 64, 64)
    small = image.resize((32, 32), Image.Resampling.LANCZOS)
    assert score(image, small)["preservation"] == 1.0
    assert score(image.resize((128, 96)), image)["preservation"] > 0.8


def test_a_small_side_compares_the_layout_and_not_the_detail():
    source = photo(0)
    coarse = source.resize((8, 8), Image.Resampling.BOX).resize((48, 48), Image.Resampling.BICUBIC)
    assert score(source, coarse, side=8)["preservation"] > 0.8 > 0.7 > score(source, coarse)["preservation"]
    assert score(source, photo(1), side=8)["preservation"] < 0.3
    for side in (48, 100):
        assert score(source, coarse, side=side) == score(source, coarse)
    assert score(photo(0, 40, 56), photo(0, 40, 56), side=6)["preservation"] == 1.0


def test_samples_without_a_source_and_invalid_settings_raise():
    with pytest.raises(ValueError, match="'t' has no source image"):
        PhotosReward(colour=RED)([Sample(Task("t", ""), photo(0))])
    for colour in [(1, 2), (0, 0, 256)]:
        with pytest.raises(ValueError, match="colour"):
            PhotosReward(colour=colour)
    for preserve in [-1.0, math.nan, math.inf]:
        with pytest.raises(ValueError, match="preserve"):
            PhotosReward(colour=RED, preserve=preserve)
