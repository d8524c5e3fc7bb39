"""What is told of completions: their text beside the pictures, and metrics of a step."""

from collections.abc import Sequence

import torch

from retouch.distributed.ranks import Ranks
from retouch.policies.autoregressive.mismatch import log_prob_difference
from retouch.policies.autoregressive.trajectory import AutoregressiveTrajectory
from retouch.training.loop import Metrics
from retouch.types import Kind, Trajectory


def texts(trajectory: Trajectory) -> Sequence[str | None]:
    """What was written for each row; None where no text is."""
    if not isinstance(trajectory, AutoregressiveTrajectory):
        return [None] * len(trajectory)
    if not (trajectory.kind == Kind.TEXT_TOKEN).any():  # a picture, token by token
        return [None] * len(trajectory)
    return [written.text for written in trajectory.outputs]


def describe(trajectory: Trajectory, *, ranks: Ranks) -> Metrics:
    """Mean tokens of a completion, with the one that ended it, and the share that was cut off, over all ranks.

    Of an engine with numbers of its own also how far these are from ours, in nats a token: |log ours - log theirs|, mean and
    largest, and the mean of log theirs - log ours, which estimates the KL between the two.
    """
    if not isinstance(trajectory, AutoregressiveTrajectory):
        return {}
    cut_off = sum(written.cut_off for written in trajectory.outputs)
    found = torch.tensor([float(trajectory.lengths.sum()), float(cut_off), float(len(trajectory))])
    tokens, cut, rows = ranks.sum(found).tolist()
    return {"completion/length": tokens / rows, "completion/cut_off_fraction": cut / rows, **_engine(trajectory, ranks)}


def _engine(trajectory: AutoregressiveTrajectory, ranks: Ranks) -> Metrics:
    if trajectory.behaviour_log_probs is None:
        return {}
    off = log_prob_difference(trajectory.log_probs, trajectory.behaviour_log_probs, trajectory.mask).cpu().double()
    total, surplus, count = ranks.sum(torch.stack([off.abs().sum(), -off.sum(), torch.ones_like(off).sum()])).tolist()
    worst = ranks.max(off.abs().max() if len(off) else off.sum()).item()
    count = max(count, 1.0)
    return {"engine/mismatch": total / count, "engine/mismatch_max": worst, "engine/kl": surplus / count}
