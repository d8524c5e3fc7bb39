"""JPEG compressibility: its bounds, and what it prefers."""

import io

import numpy as np
import pytest
from PIL import Image

from retouch.rewards.scorers.pixels import CompressibilityReward
from retouch.types import Sample, Task
from retouch_worlds.testing import check_reward


def noise(seed, size=64):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8))


def scores(*images, quality=95):
    return CompressibilityReward(quality=quality)([Sample(Task("t", ""), image) for image in images])["compressibility"].tolist()


def test_compressibility_reward_passes_the_contract_checks():
    check_reward(CompressibilityReward(), [Sample(Task(str(seed), ""), noise(seed)) for seed in range(3)])


def test_the_score_is_the_share_of_bytes_saved_by_jpeg():
    image = noise(2)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=30)
    assert scores(image, quality=30) == [pytest.approx(1 - len(buffer.getvalue()) / (3 * 64 * 64))]


def test_an_image_smaller_than_its_jpeg_header_scores_0():
    assert scores(Image.new("RGB", (2, 2))) == [0]


@pytest.mark.parametrize("quality", [0, 96])
def test_jpeg_quality_out_of_range_raises(quality):
    with pytest.raises(ValueError, match=r"equal to (1|95)"):
        CompressibilityReward(quality=quality)
