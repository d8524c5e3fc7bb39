"""A reward on a GPU runs on a CUDA stream of its own, and its results are complete before they are read."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from retouch.rewards.judging import RewardScorer
from retouch.rewards.worker import SideStream, WorkerThread
from retouch.types import Column, Sample, Scores, Task
from tiny_models import image

GPU = torch.device("cuda:1")


class Recorded:
    """Replaces CUDA's streams and records the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.inside = threading.local()
        recorded = self

        class Stream:
            def __init__(self, device: Any) -> None:
                recorded.events.append(f"new on {device}")

            def wait_stream(self, other: str) -> None:
                recorded.events.append(f"waits for {other}")

            def synchronize(self) -> None:
                recorded.events.append("complete")

        @contextmanager
        def stream(made: Stream) -> Iterator[None]:
            self.inside.stream = made
            yield
            self.inside.stream = None

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda device: f"the default of {device}")

    @property
    def current(self) -> Any:
        return getattr(self.inside, "stream", None)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(monkeypatch)


def test_the_side_stream_waits_for_the_default_stream_and_synchronizes_after_each_job(recorded: Recorded) -> None:
    worker = WorkerThread("w", device=GPU)
    try:
        streams = [worker.submit(lambda: recorded.current).result(10) for _ in range(2)]
    finally:
        assert worker.close(seconds=10)
    assert streams[0] is streams[1] is not None
    assert recorded.events == ["new on cuda:1", "waits for the default of cuda:1", "complete", "complete"]
    assert recorded.current is None


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu"), "mps"])
def test_devices_other_than_cuda_get_no_side_stream(device: Any, recorded: Recorded) -> None:
    with SideStream(device)():
        assert recorded.current is None
    assert recorded.events == []


class RecordsStream:
    """A reward that notes the stream it is computed on."""

    columns: Mapping[str, Column] = {"x": Column(0.0, 1.0)}

    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded
        self.streams: list[Any] = []

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        self.streams.append(self.recorded.current)
        return {"x": torch.zeros(len(samples))}


@pytest.mark.parametrize("device", [GPU, torch.device("cpu")])
def test_the_scorer_computes_rewards_on_a_side_stream_only_on_cuda(device: torch.device, recorded: Recorded) -> None:
    reward = RecordsStream(recorded)
    scorer = RewardScorer(reward, {"x": 1.0}, device=device)
    samples = [Sample(Task("a", "blue"), image(0))]
    try:
        futures = [scorer.submit(samples) for _ in range(2)]
        assert [future.result(20).rewards.tolist() for future in futures] == [[0.0], [0.0]]
    finally:
        scorer.close()
    assert [stream is not None for stream in reward.streams] == [device == GPU] * 2
