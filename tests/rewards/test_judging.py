"""The scorer: scores, faults and missing scores of samples, errors in what a reward returns, and the stream of a GPU."""

import math
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import closing, contextmanager
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from retouch.rewards.judging import RewardScorer, ScoredBatch
from retouch.rewards.scoring import scores_of
from retouch.rewards.worker import SideStream, WorkerThread
from retouch.types import Column, Sample, Task
from tiny_models import image

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
    judge = RewardScorer(ScoresFromMeta(), {"a": 0.1, "b": 2.0})
    yield judge
    judge.close()


def test_a_fault_gets_the_worst_values_and_a_nan_column_makes_the_reward_missing(judge):
    judged = judge([sample("value", 5.0, 0.5), sample("fault", 5.0, 0.5, image=None), sample("missing", NAN, 0.5)])
    torch.testing.assert_close(judged.scores["a"], torch.tensor([5.0, 0.0, NAN]).double(), equal_nan=True)
    torch.testing.assert_close(judged.scores["b"], torch.tensor([0.5, -1.0, 0.5]).double())
    torch.testing.assert_close(judged.rewards, torch.tensor([1.5, -2.0, NAN]).double(), equal_nan=True)
    assert judged.faults == 1


def test_a_diagnostic_never_makes_a_sample_missing(judge):
    judged = judge([sample("x", 10.0, 1.0, note=NAN)])
    assert judged.scores["note"].isnan().all()
    assert judged.rewards.item() == 3.0
    with pytest.raises(ValueError, match="'note', which is a diagnostic"):
        RewardScorer(ScoresFromMeta(), {"a": 1.0, "note": 0.5})


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


@pytest.mark.parametrize("wrong", [10.001, -0.5, math.inf, -math.inf])
def test_a_score_outside_the_declared_range_raises(judge, wrong):
    with pytest.raises(ValueError, match=r"'a' is .*outside its declared range 0.0 to 10.0"):
        judge([sample("x", 1.0, 0.0), sample("y", wrong, 0.0)])


def test_a_column_that_is_absent_or_has_a_wrong_shape_raises():
    class Short(ScoresFromMeta):
        def __call__(self, samples):
            return {"a": torch.zeros(len(samples))}

    class Long(ScoresFromMeta):
        def __call__(self, samples):
            return {name: torch.zeros(len(samples) + 1) for name in self.columns}

    with pytest.raises(ValueError, match="declares the column 'b' but did not return it; it returned a"):
        RewardScorer(Short(), {"a": 1.0})([sample("x", 1, 1)])
    with pytest.raises(ValueError, match=r"shape \(3,\) for 2 samples"):
        RewardScorer(Long(), {"a": 1.0})([sample("x", 1, 1)] * 2)


@pytest.mark.parametrize(
    ("combine", "says"), [({"c": 1.0}, "'c', but the reward has no such column; it has a, b, note"), ({}, "no column")]
)
def test_invalid_combine_raises_when_the_scorer_is_created(combine, says):
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

    def __init__(self, columns=COLUMNS):
        super().__init__(columns)
        self.posted = []

    def submit(self, samples):
        self.posted.append((samples, Future()))
        return self.posted[-1][1]

    def wait_until_posted(self, count):
        for _ in range(6000):
            if len(self.posted) == count:
                return
            time.sleep(0.01)
        raise AssertionError(f"{len(self.posted)} batches were posted, and not {count}")

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


def test_an_async_reward_is_not_called_for_a_batch_without_images():
    with closing(RewardScorer(AnswersOnCall(), {"a": 0.1})) as judge:
        assert judge.submit([sample("x", 1.0, 1.0, image=None)]).result().rewards.tolist() == [0.0]
        assert judge.reward.posted == []


GPU = torch.device("cuda:1")


class Recorded:
    """Replaces CUDA's streams and records the calls."""

    def __init__(self, monkeypatch):
        self.events: list[str] = []
        self.inside = threading.local()
        recorded = self

        class Stream:
            def __init__(self, device):
                recorded.events.append(f"new on {device}")

            def wait_stream(self, other):
                recorded.events.append(f"waits for {other}")

            def synchronize(self):
                recorded.events.append("complete")

        @contextmanager
        def stream(made):
            self.inside.stream = made
            yield
            self.inside.stream = None

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda device: f"the default of {device}")

    @property
    def current(self):
        return getattr(self.inside, "stream", None)


@pytest.fixture
def recorded(monkeypatch):
    return Recorded(monkeypatch)


def test_the_side_stream_waits_for_the_default_stream_and_synchronizes_after_each_job(recorded):
    worker = WorkerThread("w", device=GPU)
    try:
        streams = [worker.submit(lambda: recorded.current).result(10) for _ in range(2)]
    finally:
        assert worker.close(seconds=10)
    assert streams[0] is streams[1] is not None
    assert recorded.events == ["new on cuda:1", "waits for the default of cuda:1", "complete", "complete"]
    assert recorded.current is None


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu"), "mps"])
def test_devices_other_than_cuda_get_no_side_stream(device, recorded):
    with SideStream(device)():
        assert recorded.current is None
    assert recorded.events == []


class RecordsStream:
    """A reward that notes the stream it is computed on."""

    columns: Mapping[str, Column] = {"x": Column(0.0, 1.0)}

    def __init__(self, recorded):
        self.recorded = recorded
        self.streams: list[Any] = []

    def __call__(self, samples):
        self.streams.append(self.recorded.current)
        return {"x": torch.zeros(len(samples))}


@pytest.mark.parametrize("device", [GPU, torch.device("cpu")])
def test_the_scorer_computes_rewards_on_a_side_stream_only_on_cuda(device, recorded):
    reward = RecordsStream(recorded)
    scorer = RewardScorer(reward, {"x": 1.0}, device=device)
    samples = [Sample(Task("a", "blue"), image(0))]
    try:
        futures = [scorer.submit(samples) for _ in range(2)]
        assert [future.result(20).rewards.tolist() for future in futures] == [[0.0], [0.0]]
    finally:
        scorer.close()
    assert [stream is not None for stream in reward.streams] == [device == GPU] * 2


@pytest.mark.parametrize("wrong", [math.inf, 1e39])
def test_an_infinite_score_raises_even_if_the_declared_range_is_infinite(wrong):
    class Endless:
        columns: ClassVar = {"a": Column(-math.inf, math.inf)}

        def __call__(self, samples):
            return {"a": torch.tensor([wrong] * len(samples))}

    with pytest.raises(ValueError, match="return a finite score"):
        scores_of(Endless(), [sample("x", 0.0, 0.0)])
