"""The share of a colour, compared with the one-file example."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from retouch.protocols import Reward
from retouch.rewards.scorers.pixels import ShareReward
from retouch.types import Sample, Task
from retouch_worlds.testing import check_reward

EXAMPLE = Path(__file__).parents[3] / "examples" / "one_file_flow_grpo.py"


def samples(pictures):
    return [Sample(Task(str(k), ""), Image.fromarray(picture)) for k, picture in enumerate(pictures)]


def pictures(seed, count=5):
    drawn = np.random.default_rng(seed).integers(0, 256, (count, 6, 9, 3), dtype=np.uint8)
    drawn[:, 0, 0] = 0
    return drawn


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("one_file_flow_grpo", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_share_reward_passes_the_contract_checks():
    assert isinstance(ShareReward(), Reward)
    check_reward(ShareReward(channel="blue"), samples(pictures(0)))


def test_share_matches_the_reward_of_the_one_file_example(example):
    given = pictures(1)
    theirs = example.share_of_red(torch.from_numpy(given).permute(0, 3, 1, 2))
    torch.testing.assert_close(ShareReward(channel="red")(samples(given))["share"], theirs, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("colour", "red", "blue"), [((255, 0, 0), 1, 0), ((9, 9, 9), 1 / 3, 1 / 3), ((0, 0, 0), 1 / 3, 1 / 3), ((0, 1, 3), 0, 0.75)]
)
def test_share_of_an_image_of_one_colour_matches_the_closed_form(colour, red, blue):
    plain = [Sample(Task("t", ""), Image.new("RGB", (3, 2), colour))]
    assert ShareReward(channel="red")(plain)["share"].item() == pytest.approx(red)
    assert ShareReward(channel="blue")(plain)["share"].item() == pytest.approx(blue)


def test_dark_and_bright_pixels_have_equal_weight():
    picture = np.array([[[250, 0, 0], [0, 1, 0]]], dtype=np.uint8)
    assert ShareReward(channel="red")(samples([picture]))["share"].item() == 0.5


def test_refuses_an_unknown_channel():
    with pytest.raises(ValueError, match="'red', 'green' or 'blue'"):
        ShareReward(channel="yellow")
