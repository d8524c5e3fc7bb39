"""What a step records besides its samples: the times of its stages, the texts of completions, and metrics of completions and
engines."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from retouch.distributed.ranks import Ranks
from retouch.policies.decoding import AutoregressiveTrajectory, log_prob_difference
from retouch.types import Kind, Trajectory


@dataclass
class Clock:
    """Sums the seconds of each stage until ``take`` is called.

    A GPU computes later than the host queues its kernels, so the host's clock would count the end of a rollout as part of the
    rendering, which waits for the rollout. ``event``: creates the points in the GPU's queue at which a stage starts and ends; None:
    use the host's clock. The clock never waits for the GPU: a stage that the GPU has not finished when ``take`` is called counts in
    the next step.

    ``stage``: the stage that is running, or the stage that ended with an exception.
    """

    event: Callable[[], torch.cuda.Event] | None = None
    stage: str | None = None
    _spent: dict[str, float] = field(default_factory=dict)
    _pending: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self.stage, events = stage, None
        if self.event is None:
            started = time.perf_counter()
        else:
            events = self.event(), self.event()
            events[0].record()
        try:
            yield
        finally:
            if events is None:
                self._spent[stage] = self._spent.get(stage, 0.0) + (time.perf_counter() - started)
            else:
                events[1].record()
                self._pending.append((stage, *events))
        self.stage = None

    def take(self) -> dict[str, float]:
        """Return the seconds of each stage since the last call, with keys ``time/<stage>``."""
        # A GPU finishes stages in the order in which they were queued.
        while self._pending and self._pending[0][2].query():
            stage, start, end = self._pending.pop(0)
            self._spent[stage] = self._spent.get(stage, 0.0) + start.elapsed_time(end) / 1000
        spent, self._spent = self._spent, {}
        return {f"time/{stage}": seconds for stage, seconds in spent.items()}


def completion_texts(trajectory: Trajectory) -> Sequence[str | None]:
    """Return the text of each row, or None if the policy writes no text (it may generate an image token by token)."""
    if not isinstance(trajectory, AutoregressiveTrajectory):
        return [None] * len(trajectory)
    if not (trajectory.kind == Kind.TEXT_TOKEN).any():  # image tokens only
        return [None] * len(trajectory)
    return [completion.text for completion in trajectory.outputs]


def completion_metrics(trajectory: Trajectory, *, ranks: Ranks) -> dict[str, float]:
    """Return the mean number of tokens per completion, including the end token, and the fraction of truncated completions.

    Metrics are over all ranks. If an engine sampled the actions and returned its own log-probabilities, they are compared with the
    policy's, in nats per action: ``engine/mismatch`` and ``engine/mismatch_max`` are the mean and the largest
    |log policy - log engine|; ``engine/kl`` is the mean of log engine - log policy, which estimates the KL divergence of the two.
    Denoising trajectories also get ``engine/deviation``: the root mean square distance between the engine's and the policy's step
    means, in standard deviations of a step.

    Source: the completion metrics of TRL's GRPOTrainer.
    """
    found: dict[str, float] = {}
    if isinstance(trajectory, AutoregressiveTrajectory):
        cut_off = sum(completion.truncated for completion in trajectory.outputs)
        sums = torch.tensor([float(trajectory.lengths.sum()), float(cut_off), float(len(trajectory))])
        tokens, cut_off, rows = ranks.sum(sums).tolist()
        found |= {"completion/length": tokens / rows, "completion/cut_off_fraction": cut_off / rows}
    if trajectory.behaviour_log_probs is None:
        return found
    error = log_prob_difference(trajectory.log_probs, trajectory.behaviour_log_probs, trajectory.mask).cpu().double()
    total, kl, count = ranks.sum(torch.stack([error.abs().sum(), -error.sum(), torch.ones_like(error).sum()])).tolist()
    largest = ranks.max(error.abs().max() if len(error) else error.sum()).item()
    count = max(count, 1.0)
    found |= {"engine/mismatch": total / count, "engine/mismatch_max": largest, "engine/kl": kl / count}
    deviations: torch.Tensor | None = getattr(trajectory, "deviations", None)
    if deviations is not None:
        squares = ranks.sum(torch.tensor(deviations.cpu().double().sum().item())).item()
        found["engine/deviation"] = (squares / count) ** 0.5
    return found
