"""The times of a step's stages, measured with the host's clock and with events of a GPU."""

from dataclasses import dataclass, field

import pytest

from retouch.run.metrics import Clock


@dataclass
class Queue:
    """A GPU that starts work when the work before is finished. ``now``: the host's seconds. ``free``: when its work is finished."""

    now: float = 0.0
    free: float = 0.0

    def compute(self, seconds: float) -> None:
        self.free = max(self.now, self.free) + seconds

    def event(self) -> "Point":
        return Point(self)


@dataclass
class Point:
    queue: Queue
    at: float = field(default=-1.0)

    def record(self) -> None:
        self.at = max(self.queue.now, self.queue.free)

    def query(self) -> bool:
        return self.at <= self.queue.now

    def elapsed_time(self, end: "Point") -> float:
        assert end.query(), "the GPU has not reached it"
        return 1000 * (end.at - self.at)


def test_pending_gpu_work_of_a_rollout_is_not_counted_as_rendering_time() -> None:
    gpu = Queue()
    clock = Clock(event=gpu.event)
    with clock("rollout"):
        gpu.compute(5)
        gpu.now += 0.1  # the host is ahead
    with clock("render"):
        gpu.compute(1)
        gpu.now = gpu.free  # the images are read
    assert clock.take() == {"time/rollout": pytest.approx(5), "time/render": pytest.approx(1)}


def test_clock_does_not_wait_for_the_gpu_and_counts_every_second_once() -> None:
    gpu = Queue()
    clock = Clock(event=gpu.event)
    with clock("rollout"):
        gpu.compute(2)
    gpu.now = 3
    with clock("judge"):
        gpu.now += 4  # waits for another machine; the GPU is idle
    with clock("update"):
        gpu.compute(6)
    assert clock.take() == {"time/rollout": pytest.approx(2), "time/judge": pytest.approx(4)}
    assert gpu.now == 7
    with clock("update"):
        gpu.compute(1)
    gpu.now = 20
    assert clock.take() == {"time/update": pytest.approx(7)}
    assert clock.take() == {}


def test_clock_keeps_the_name_and_time_of_a_stage_that_raises() -> None:
    gpu = Queue()
    clock = Clock(event=gpu.event)
    with pytest.raises(ValueError, match="x"), clock("update"):
        raise ValueError("x")
    assert clock.stage == "update"
    assert clock.take() == {"time/update": 0.0}
