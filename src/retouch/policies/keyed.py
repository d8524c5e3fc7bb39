"""Completions that know which row of which step they are, so that a renderer can key the noise it draws for them."""

from dataclasses import replace

from retouch.policies.autoregressive import AutoregressiveTrajectory
from retouch.types import Batch


def keyed(trajectory: AutoregressiveTrajectory, batch: Batch) -> AutoregressiveTrajectory:
    """The trajectory of ``batch``, with each output's ``key`` set to its row's (seed, step, group, slot)."""
    rows = zip(trajectory.outputs, batch.group, batch.slot, strict=True)
    outputs = tuple(replace(each, key=(batch.seed, batch.step, batch.group_ids[k], slot)) for each, k, slot in rows)
    return replace(trajectory, outputs=outputs)
