"""Rewards from Python, without a run: short names, and scores of lists of images."""

import math
from typing import Any, ClassVar

import pytest
from PIL import Image

import retouch
from retouch.rewards.loading import LoadedReward
from retouch.rewards.scorers.pixels import ShareReward

IMAGES = [Image.new("RGB", (8, 8), colour) for colour in ("red", "black")]


def test_a_loaded_reward_scores_lists_of_images() -> None:
    reward = retouch.rewards.load("share", channel="red")
    assert reward(IMAGES)["share"] == [1.0, pytest.approx(1 / 3, abs=0.4)]
    assert set(reward.columns) == {"share"}


def test_a_number_of_prompts_that_differs_from_the_images_raises() -> None:
    with pytest.raises(ValueError, match="prompts has length 1, but there are 2 images; give one per image"):
        retouch.rewards.load("share", channel="red")(IMAGES, prompts=["one"])


def test_an_unknown_reward_raises_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="there is no reward 'pikscore'; did you mean 'pickscore'"):
        retouch.rewards.load("pikscore")


@pytest.mark.parametrize("name", ["PickScore", "Clip", "Share", "VieScore", "Remote"])
def test_rewards_have_short_names(name: str) -> None:
    assert issubclass(getattr(retouch.rewards, name), retouch.rewards.base.RewardSection)


@pytest.mark.parametrize("name", ["SD3", "QwenImage", "QwenImageEdit", "Flux", "FluxKontext", "Flux2Klein", "ZImage", "Emu3"])
def test_models_have_short_names(name: str) -> None:
    section = getattr(retouch.models, name)(path="somewhere")
    assert section.path == "somewhere"


def test_hasattr_is_false_for_unknown_names() -> None:
    assert not hasattr(retouch.rewards, "Nothing")
    assert not hasattr(retouch.models, "Nothing")
    assert not hasattr(retouch, "Nothing")


def test_completions_of_none_do_not_make_scores_nan() -> None:
    completions = [None, None]
    scored = retouch.rewards.load("share", channel="red")(IMAGES, completions=completions)
    assert not any(math.isnan(value) for value in scored["share"])


class RangesAsPairs:
    columns: ClassVar[Any] = {"h": (0, 1)}

    def __call__(self, samples: Any) -> Any:
        return {"h": [0.5] * len(samples)}


class NamesOnly(RangesAsPairs):
    columns: ClassVar[Any] = ["h"]


@pytest.mark.parametrize("own", [RangesAsPairs, NamesOnly])
def test_a_class_whose_columns_are_no_columns_raises_with_its_name(own: type[RangesAsPairs]) -> None:
    with pytest.raises(ValueError, match=rf"test_loading:{own.__name__}: its columns are .*; give a dictionary of retouch"):
        retouch.rewards.load("import", **{"class": f"test_loading:{own.__name__}"})


def test_a_reward_decorator_without_a_range_raises() -> None:
    with pytest.raises(ValueError, match=r"give the range of the scores of half: @retouch.reward\(low=0, high=1\)"):

        @retouch.reward
        def half(images: Any) -> Any:
            return [0.5] * len(images)


def test_a_with_block_closes_the_reward() -> None:
    closed = []

    class Connected(ShareReward):
        def close(self) -> None:
            closed.append(self.channel)

    with LoadedReward(Connected(channel="red")) as reward:
        assert reward(IMAGES)["share"]
        assert closed == []
    assert closed == ["red"]
    with pytest.raises(KeyError), LoadedReward(Connected(channel="blue")) as reward:
        reward(IMAGES)["red"]
    assert closed == ["red", "blue"]
