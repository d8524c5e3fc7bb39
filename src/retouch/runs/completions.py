"""What is told of completions: their text beside the pictures, and metrics of a step."""

from collections.abc import Sequence

import torch

from retouch.loop import Metrics
from retouch.policies.autoregressive import AutoregressiveTrajectory
from retouch.runs.ranks import Ranks
from retouch.types import Trajectory


def texts(trajectory: Trajectory) -> Sequence[str | None]:
    """What was written for each row; None where nothing is written."""
    if not isinstance(trajectory, AutoregressiveTrajectory):
        return [None] * len(trajectory)
    return [written.text for written in trajectory.outputs]


def describe(trajectory: Trajectory, *, ranks: Ranks) -> Metrics:
    """Mean tokens of a completion, with the one that ended it, and the share that was cut off, over all ranks."""
    if not isinstance(trajectory, AutoregressiveTrajectory):
        return {}
    cut_off = sum(written.cut_off for written in trajectory.outputs)
    found = torch.tensor([float(trajectory.lengths.sum()), float(cut_off), float(len(trajectory))])
    tokens, cut, rows = ranks.sum(found).tolist()
    return {"completion/length": tokens / rows, "completion/cut_off_fraction": cut / rows}
