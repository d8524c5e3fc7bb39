"""Demonstrations in which some tasks are shown no reference picture, so that guidance has something to go away from."""

from dataclasses import replace

import torch

from retouch.core.random import generator
from retouch.types import Batch, Conditioning


def unshown(conditioning: Conditioning, batch: Batch, *, share: float) -> Conditioning:
    """The conditioning of a batch's tasks, in which about ``share`` of them (0 to 1) have a reference of zeros.

    Drawn once a task, by (seed, step, group): the rows of a group have one conditioning.
    """
    if share == 0:
        return conditioning
    draws = [torch.rand((), generator=generator(batch.seed, "reference", batch.step, gid)) for gid in batch.group_ids]
    embeds = conditioning.tensors[Conditioning.REFERENCE]
    shown = (torch.stack(draws) >= share).to(embeds)
    return replace(conditioning, tensors={**conditioning.tensors, Conditioning.REFERENCE: embeds * shown[:, None]})
