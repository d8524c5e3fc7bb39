"""The share of a colour, compared with the one-file example."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
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


@pytest.mark.parametrize(
    ("colour", "red", "blue"), [((255, 0, 0), 1, 0), ((9, 9, 9), 1 / 3, 1 / 3), ((0, 0, 0), 1 / 3, 1 / 3), ((0, 1, 3), 0, 0.75)]
)
def test_share_of_an_image_of_one_colour_matches_the_closed_form(colour, red, blue):
    plain = [Sample(Task("t", ""), Image.new("RGB", (3, 2), colour))]
    assert ShareReward(channel="red")(plain)["share"].item() == pytest.approx(red)
    assert ShareReward(channel="blue")(plain)["share"].item() == pytest.approx(blue)


def test_refuses_an_unknown_channel():
    with pytest.raises(ValueError, match="'red', 'green' or 'blue'"):
        ShareReward(channel="yellow")
