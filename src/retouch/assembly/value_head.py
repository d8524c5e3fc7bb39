"""Builds the recipe's value head for the states of a model."""

from collections.abc import Sequence

import torch

from retouch.core.random import generator
from retouch.models.common.parts import compute_device
from retouch.objectives.base import ValueHead
from retouch.policies.value_heads import LatentValues, TokenValues, channels_of, summary
from retouch.protocols import AutoregressiveModel, DenoisingModel
from retouch.types import Task

SAMPLED = 32
"""Number of tasks from which the normalisation of the head's inputs is computed."""


@torch.no_grad()
def build_head(
    section: ValueHead, model: DenoisingModel | AutoregressiveModel, *, tasks: Sequence[Task], seed: int
) -> LatentValues | TokenValues:
    """Build a value head for the model's states. ``tasks``: training tasks, the same on every rank; the first ones are encoded."""
    device = compute_device(model.module)
    if not isinstance(model, DenoisingModel):
        states, _ = model.prefill(model.module, model.encode([tasks[0]]))
        return TokenValues(states.shape[1], width=section.width, seed=seed, coefficient=section.coefficient).to(device)
    conditioning = [model.encode([tasks[index]]) for index in range(min(SAMPLED, len(tasks)))]
    x = model.initial_noise(conditioning[0], [generator(seed, "size of a state")])
    sampled = torch.cat([summary(each) for each in conditioning])
    return LatentValues(channels_of(x), sampled, width=section.width, seed=seed).to(device)
