"""Several rewards as one: names of columns, concurrency, what each reward receives, and missing scores."""

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack, closing

import pytest
import torch
from PIL import Image

from retouch.protocols import Reward
from retouch.rewards.judging import CompositeReward, RewardScorer
from retouch.rewards.pixels import ShareReward
from retouch.types import Column, Sample, Task
from retouch_rewards.completions import PromptQualityReward, ThinkReward, prompt_quality
from retouch_worlds.testing import check_reward

NAN = float("nan")
RED = Image.new("RGB", (4, 4), (255, 0, 0))


class ValueFromMeta:
    """Returns a value of the task's meta as column ``x``."""

    columns: Mapping[str, Column] = {"x": Column(0.0, 1.0), "note": Column(0.0, 1.0, diagnostic=True)}

    def __init__(self, key="x"):
        self.key, self.seen, self.closed = key, [], False

    def __call__(self, samples):
        self.seen += samples
        values = torch.tensor([float(sample.task.meta[self.key]) for sample in samples])
        return {"x": values, "note": torch.full((len(samples),), NAN)}

    def close(self):
        self.closed = True


class AsyncReward(ValueFromMeta):
    """An asynchronous reward: it has ``submit``."""

    def submit(self, samples):
        future = Future()
        future.set_result(self(samples))
        return future


def sample(number, x, y, image=RED, written=None):
    return Sample(Task(str(number), "a cat", meta={"x": x, "y": y}), image, written)


@pytest.fixture
def make_reward():
    with ExitStack() as made:
        yield lambda **rewards: made.enter_context(closing(CompositeReward(rewards)))


def test_columns_are_prefixed_and_only_those_of_the_combination_make_a_sample_missing():
    one, other = ValueFromMeta("x"), AsyncReward("y")
    several = CompositeReward({"one": one, "other": other, "red": ShareReward(channel="red")})
    assert isinstance(several, Reward)
    assert list(several.columns) == ["one/x", "one/note", "other/x", "other/note", "red/share"]
    with closing(RewardScorer(several, "0.5 * one/x + 0.5 * one/x")) as judge:
        judged = judge([sample(1, 1.0, NAN), sample(2, NAN, 0.75), sample(3, 1.0, 1.0, image=None)])
    assert judged.rewards.isnan().tolist() == [False, True, False]
    assert judged.scores["other/x"].nan_to_num(-1).tolist() == [-1, 0.75, 0]
    assert judged.scores["red/share"].tolist() == [1.0, 1.0, 0.0]
    assert judged.scores["other/note"].isnan().all()
    assert one.closed
    assert other.closed
    blue = CompositeReward({"red": ShareReward(channel="red"), "blue": ShareReward(channel="blue")})
    with closing(blue):
        check_reward(blue, [sample(k, 0, 0) for k in range(3)])
    with pytest.raises(ValueError, match="rewards is empty"):
        CompositeReward({})


def test_a_policys_own_fault_gets_the_worst_columns_and_the_lowest_reward_even_with_a_negative_weight():
    class Distance(ValueFromMeta):
        columns: Mapping[str, Column] = {"x": Column(0.0, 2.0, higher_is_better=False), "note": Column(0.0, 1.0, diagnostic=True)}

    for reward, combine, rewards in ((Distance(), {"x": -1.0}, [-0.5, -2.0]), (ShareReward(), {"share": -1.0}, [-1.0, -1.0])):
        with closing(RewardScorer(reward, combine)) as judge:
            judged = judge([sample(1, 0.5, 0), sample(2, 0.5, 0, image=None)])
        assert judged.rewards.tolist() == rewards  # the share's worst is 0, which would be the best reward
        if "x" in judged.scores:
            assert judged.scores["x"].tolist() == [0.5, 2.0]
            assert judged.scores["note"].isnan().all()


def test_rewards_run_concurrently(make_reward):
    """Each waits until the other has started, so running one after the other would time out."""
    meeting = threading.Barrier(2, timeout=30)

    class Meets(ValueFromMeta):
        def __call__(self, samples):
            meeting.wait()
            return super().__call__(samples)

    several = make_reward(one=Meets(), other=Meets())
    assert several([sample(0, 0.5, 0.5)])["one/x"].item() == 0.5
    with closing(RewardScorer(several, "one/x")) as judge:
        futures = [judge.submit([sample(k, 0.5, 0.5)]) for k in range(3)]
        assert [future.result(timeout=60).scores["one/x"].item() for future in futures] == [0.5] * 3


def test_an_async_reward_does_not_wait_for_a_slow_reward(make_reward):
    """It receives all batches while the other reward still computes its first."""
    release, all_there = threading.Event(), threading.Barrier(2, timeout=30)

    class Slow(ValueFromMeta):
        def __call__(self, samples):
            assert release.wait(60)
            return super().__call__(samples)

    class Counts(AsyncReward):
        def submit(self, samples):
            if samples[0].task.id == "2":
                all_there.wait()
            return super().submit(samples)

    with closing(RewardScorer(make_reward(slow=Slow(), counts=Counts()), "slow/x")) as judge:
        futures = [judge.submit([sample(k, k / 4, 0)]) for k in range(3)]
        all_there.wait()
        assert not any(future.done() for future in futures)
        release.set()
        assert [future.result(timeout=60).rewards.item() for future in futures] == [0.0, 0.25, 0.5]


def test_an_error_of_one_reward_is_raised_and_the_next_batch_is_scored(make_reward):
    class Breaks(ValueFromMeta):
        def __call__(self, samples):
            if samples[0].task.id == "bad":
                raise ValueError("no source picture")
            return super().__call__(samples)

    several = make_reward(one=ValueFromMeta(), other=Breaks())
    with pytest.raises(ValueError, match="no source picture"):
        several([sample("bad", 0, 0)])
    with closing(RewardScorer(several, "other/x")) as judge:
        bad, good = judge.submit([sample("bad", 0, 0)]), judge.submit([sample("good", 1, 1)])
        with pytest.raises(ValueError, match="no source picture"):
            bad.result()
        assert good.result().scores["other/x"].item() == 1


def test_completions_are_passed_only_to_rewards_that_read_them(make_reward):
    told, later, think = ValueFromMeta(), AsyncReward(), ThinkReward()
    judge = RewardScorer(make_reward(told=told, later=later, think=think), "think/think_format + told/x")
    judged = judge([sample(1, 0.5, 0, written="<think>so</think>give me 10"), sample(2, 0.5, 0, written="10/10")])
    judge.close()
    assert judged.scores["think/think_format"].tolist() == [1.0, 0.0]
    assert [each.completion for each in told.seen + later.seen] == [None] * 4
    alone = ValueFromMeta()
    RewardScorer(alone, {"x": 1.0})([sample(1, 0.5, 0, written="10/10")])
    assert alone.seen[0].completion is None
    assert RewardScorer(think, {"think_format": 1.0})([sample(1, 0, 0, written="<think>a</think>b")]).rewards.tolist() == [1.0]


def test_prompt_quality_reward_returns_the_sub_scores_of_the_completion():
    reward = PromptQualityReward()
    written = ["<think>hm</think>a fluffy cat on a windowsill, highly detailed", "<think>hm</think>"]
    scores = reward([sample(k, 0, 0, written=text) for k, text in enumerate(written)])
    points = prompt_quality("a cat", "a fluffy cat on a windowsill, highly detailed")
    assert scores["total"].tolist() == pytest.approx([points.total, 0.0])
    assert scores["quality_words"].tolist() == pytest.approx([points.quality_words, 0.0])
    check_reward(PromptQualityReward(), [sample(k, 0, 0, written="a cat " * k) for k in range(4)])
    with pytest.raises(ValueError, match="has no completion"):
        reward([sample(1, 0, 0)])
