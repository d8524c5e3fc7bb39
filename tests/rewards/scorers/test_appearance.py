"""Brightness, saturation, detail and what the mask protects, against closed forms."""

import math

import numpy as np
import pytest
from PIL import Image

from retouch.rewards.scorers.pixels import AppearanceReward
from retouch.types import Sample, Task
from retouch_worlds.testing import check_reward


def noise(seed, spread=255, size=(24, 20)):
    return Image.fromarray(np.random.default_rng(seed).integers(0, spread + 1, (size[1], size[0], 3), dtype=np.uint8))


def scores(image, task=None):
    given = AppearanceReward()([Sample(task or Task("t", ""), image)])
    return {name: column[0].item() for name, column in given.items()}


def test_appearance_reward_passes_the_contract_checks():
    mask = Image.new("L", (24, 20))
    mask.paste(255, (0, 0, 12, 20))
    check_reward(AppearanceReward(), [Sample(Task(str(k), "", images=(noise(9),), mask=mask), noise(k)) for k in range(4)])


def test_scores_of_flat_colours_match_closed_forms():
    orange = scores(Image.new("RGB", (8, 8), (255, 102, 0)))
    assert orange["brightness"] == pytest.approx(0.299 + 0.587 * 0.4)
    assert orange["saturation"] == 1
    assert orange["detail"] == pytest.approx(0, abs=1e-7)
    assert math.isnan(orange["preservation"])
    assert scores(Image.new("RGB", (8, 8), (200, 100, 100)))["saturation"] == pytest.approx(0.5)
    assert scores(Image.new("RGB", (8, 8)))["saturation"] == 0


def test_detail_is_the_rms_amplitude_of_high_frequencies():
    across = np.arange(32)

    def wave(frequency, amplitude=40):
        row = 128 + amplitude * np.cos(2 * np.pi * frequency * across / 32)
        return Image.fromarray(np.repeat(np.repeat(row[None, :, None], 24, axis=0), 3, axis=2).round().astype(np.uint8))

    assert scores(wave(12))["detail"] == pytest.approx(40 / 255 / math.sqrt(2), rel=0.01)
    assert scores(wave(12, amplitude=80))["detail"] == pytest.approx(2 * scores(wave(12))["detail"], rel=0.01)
    assert scores(wave(12).rotate(90, expand=True))["detail"] == pytest.approx(scores(wave(12))["detail"], rel=1e-5)
    assert scores(wave(4))["detail"] < 0.003  # rounding to 8 bits alone
    # Three quarters of the frequencies of white noise are high: above half of the maximum along at least one axis.
    grey = np.random.default_rng(0).normal(128, 20, (256, 256)).round().clip(0, 255).astype(np.uint8)
    assert scores(Image.fromarray(grey).convert("RGB"))["detail"] == pytest.approx(math.sqrt(0.75) * 20 / 255, rel=0.02)


def test_preservation_compares_only_pixels_outside_the_mask():
    source = Image.new("RGB", (20, 10), (100, 100, 100))
    edited = source.copy()
    edited.paste((100, 151, 100), (0, 0, 10, 10))
    left = Image.new("L", (20, 10))
    left.paste(255, (0, 0, 10, 10))
    right = Image.eval(left, lambda value: 255 - value)

    def kept(mask):
        return scores(edited, Task("t", "", images=(source,), mask=mask))["preservation"]

    assert kept(left) == 1
    assert kept(right) == pytest.approx(1 - 51 / 255 / 3)
    assert kept(Image.new("L", (20, 10))) == pytest.approx(1 - 51 / 255 / 6)
    assert math.isnan(kept(Image.new("L", (20, 10), 255)))
    assert math.isnan(kept(None))


def test_no_image_gets_the_lowest_scores():
    assert scores(None) == {"brightness": 0, "saturation": 0, "detail": 0, "preservation": 0}
