"""The scorer: scores, faults and missing scores of samples, errors in what a reward returns, and the stream of a GPU."""

import math
import time
from concurrent.futures import Future
from contextlib import closing, contextmanager
from contextvars import ContextVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from retouch.rewards.judging import RewardScorer, ScoredBatch
from retouch.rewards.scoring import scores_of
from retouch.rewards.worker import SideStream
from retouch.types import Column, Sample, Task

COLUMNS = {"a": Column(0.0, 10.0), "b": Column(-1.0, 1.0), "note": Column(0.0, 1.0, diagnostic=True)}
PICTURE = Image.new("RGB", (2, 2))
NAN = math.nan


class ScoresFromMeta:
    """A reward that returns the scores in each task's meta."""

    def __init__(self, columns=COLUMNS):
        self.columns = columns
        self.seen = []

    def __call__(self, samples):
        self.seen += [sample.task.id for sample in samples]
        return {name: torch.tensor([float(sample.task.meta[name]) for sample in samples]) for name in self.columns}


def sample(name, a, b, note=0.0, image=PICTURE):
    return Sample(Task(name, "", meta={"a": a, "b": b, "note": note}), image)


@pytest.fixture
def judge():
    with closing(RewardScorer(ScoresFromMeta(), {"a": 0.1, "b": 2.0})) as judge:
        yield judge


def test_a_fault_gets_the_worst_values_and_a_nan_column_makes_the_reward_missing(judge):
    judged = judge([sample("value", 5.0, 0.5, NAN), sample("fault", 5.0, 0.5, image=None), sample("missing", NAN, 0.5)])
    torch.testing.assert_close(judged.scores["a"], torch.tensor([5.0, 0.0, NAN]).double(), equal_nan=True)
    torch.testing.assert_close(judged.scores["b"], torch.tensor([0.5, -1.0, 0.5]).double())
    assert judged.scores["note"].isnan().tolist() == [True, True, False]  # a diagnostic makes no reward missing
    torch.testing.assert_close(judged.rewards, torch.tensor([1.5, -2.0, NAN]).double(), equal_nan=True)
    assert judged.faults == 1


@given(st.lists(st.tuples(*[st.sampled_from([0.0, 0.25, 1.0, NAN])] * 2, st.booleans()), min_size=1, max_size=6))
def test_a_reward_is_missing_exactly_where_a_combined_column_is_missing(rows):
    judge = RewardScorer(ScoresFromMeta(), {"a": 1.0, "b": 1.0})
    judged = judge([sample(str(k), a, b, image=PICTURE if drawn else None) for k, (a, b, drawn) in enumerate(rows)])
    judge.close()
    expected = [(a + b) if drawn else -1.0 for a, b, drawn in rows]
    torch.testing.assert_close(judged.rewards, torch.tensor(expected).double(), equal_nan=True)
    for k, (a, b, drawn) in enumerate(rows):  # NaN stays in its own column
        assert judged.scores["a"][k].isnan() == (drawn and math.isnan(a))
        assert judged.scores["b"][k].isnan() == (drawn and math.isnan(b))


def test_an_invalid_combination_and_invalid_scores_raise():
    class Returns(ScoresFromMeta):
        def __init__(self, made, **columns):
            super().__init__({**COLUMNS, **columns})
            self.made = made

        def __call__(self, samples):
            return {name: torch.tensor(values) for name, values in self.made.items()}

    outside = r"'a' is .*outside its declared range 0.0 to 10.0"
    for made, says in (
        *(({"a": [1.0, wrong], "b": [0.0, 0], "note": [0.0, 0]}, outside) for wrong in (10.001, -0.5, math.inf, -math.inf)),
        ({"a": [0.0, 0]}, "declares the column 'b' but did not return it; it returned a"),
        (dict.fromkeys(COLUMNS, [0.0] * 3), r"shape \(3,\) for 2 samples"),
    ):
        with pytest.raises(ValueError, match=says):
            RewardScorer(Returns(made), {"a": 1.0})([sample("x", 1, 1)] * 2)
    for wrong in (math.inf, 1e39):  # also if the declared range is infinite
        with pytest.raises(ValueError, match="return a finite score"):
            scores_of(Returns({name: [wrong] for name in COLUMNS}, a=Column(-math.inf, math.inf)), [sample("x", 0.0, 0.0)])
    for combine, says in (
        ({"c": 1.0}, "'c', but the reward has no such column; it has a, b, note"),
        ({}, "no column"),
        ({"a": 1.0, "note": 0.5}, "'note', which is a diagnostic"),
    ):
        with pytest.raises(ValueError, match=says):
            RewardScorer(ScoresFromMeta(), combine)


def test_submitted_batches_return_in_order_and_futures_raise_their_errors(judge):
    futures = [judge.submit([sample(str(k), float(k), 0.0)]) for k in range(5)]
    parts = [future.result() for future in futures]
    together = ScoredBatch.concat(parts)
    torch.testing.assert_close(together.rewards, torch.arange(5).double() * 0.1)
    assert judge.reward.seen == list("01234")
    with pytest.raises(ValueError, match="outside its declared range"):
        judge.submit([sample("x", 11.0, 0.0)]).result()


class AnswersOnCall(ScoresFromMeta):
    """Scores a submitted batch only when ``answer`` is called; ``posted`` are the submitted batches with their futures."""

    def __init__(self):
        super().__init__()
        self.posted = []

    def submit(self, samples):
        self.posted.append((samples, Future()))
        return self.posted[-1][1]

    def wait_until_posted(self, count):
        ends = time.monotonic() + 60
        while len(self.posted) < count:
            assert time.monotonic() < ends
            time.sleep(0.01)

    def answer(self, number):
        samples, future = self.posted[number]
        future.set_result(self(samples))


def test_an_async_reward_receives_all_batches_at_once_and_results_keep_their_order():
    with closing(RewardScorer(AnswersOnCall(), {"a": 0.1})) as judge:
        futures = [judge.submit([sample(str(k), float(k), 0.0), sample("fault", 9.0, 0.0, image=None)]) for k in range(4)]
        judge.reward.wait_until_posted(4)
        assert [[each.task.id for each in samples] for samples, _ in judge.reward.posted] == [["0"], ["1"], ["2"], ["3"]]
        for number in (3, 1, 2):  # the last first
            judge.reward.answer(number)
        assert not any(future.done() for future in futures)
        judge.reward.answer(0)
        judged = ScoredBatch.concat([future.result() for future in futures])
    torch.testing.assert_close(judged.rewards, torch.tensor([0.0, 0.0, 0.1, 0.0, 0.2, 0.0, 0.3, 0.0], dtype=torch.float64))
    assert judged.faults == 4


def test_errors_and_invalid_scores_of_an_async_reward_are_raised_by_the_future():
    with closing(RewardScorer(AnswersOnCall(), {"a": 0.1})) as judge:
        assert judge.submit([sample("x", 1.0, 1.0, image=None)]).result().rewards.tolist() == [0.0]
        assert judge.reward.posted == []  # it is not called for a batch without images
        futures = [judge.submit([sample("x", value, 0.0)]) for value in (11.0, 5.0, 6.0)]
        judge.reward.wait_until_posted(3)
        judge.reward.posted[1][1].set_exception(ValueError("gone"))
        judge.reward.answer(2)
        judge.reward.answer(0)
        with pytest.raises(ValueError, match="outside its declared range"):
            futures[0].result()
        with pytest.raises(ValueError, match="gone"):
            futures[1].result()
        assert futures[2].result().scores["a"].tolist() == [6.0]


@pytest.mark.parametrize("device", [torch.device("cuda:1"), torch.device("cpu"), None, "mps"])
def test_the_scorer_computes_rewards_on_a_side_stream_only_on_cuda(device, monkeypatch):
    """The stream waits for the default stream once, and synchronizes after each job."""
    events, current = [], ContextVar("current", default=None)

    class Stream:
        def __init__(self, device):
            events.append(f"new on {device}")

        def wait_stream(self, other):
            events.append(f"waits for {other}")

        def synchronize(self):
            events.append("complete")

    @contextmanager
    def stream(made):
        token = current.set(made)
        yield
        current.reset(token)

    class RecordsStream(ScoresFromMeta):
        def __call__(self, samples):
            self.seen.append(current.get())
            return {name: torch.zeros(len(samples)) for name in self.columns}

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: f"the default of {device}")
    reward = RecordsStream()
    with closing(RewardScorer(reward, {"a": 1.0}, device=device)) as scorer:
        futures = [scorer.submit([sample("x", 0, 0)]) for _ in range(2)]
        assert [future.result(20).rewards.tolist() for future in futures] == [[0.0], [0.0]]
    on_gpu = device == torch.device("cuda:1")
    assert [stream is not None for stream in reward.seen] == [on_gpu] * 2
    assert reward.seen[0] is reward.seen[1]
    assert current.get() is None
    if not on_gpu:
        with SideStream(device)():
            assert current.get() is None
    assert events == (["new on cuda:1", "waits for the default of cuda:1", "complete", "complete"] if on_gpu else [])
