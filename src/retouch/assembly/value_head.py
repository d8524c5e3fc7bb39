"""Builds the recipe's value head for the states of a model, and plans its memory."""

from collections.abc import Sequence

import torch

from retouch.core.random import generator
from retouch.memory.plan import MemoryPlan, MemoryRow
from retouch.models.common.parts import compute_device
from retouch.objectives.base import ValueHead
from retouch.policies.value_heads import LatentValues, TokenValues, channels_of, summary
from retouch.protocols import AutoregressiveModel, DenoisingModel
from retouch.recipe.recipe import Recipe
from retouch.types import Task

HEAD_ROW = "value head"
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


def with_head(plan: MemoryPlan, recipe: Recipe, features: int) -> MemoryPlan:
    """Add a row for the value head to the plan, if the recipe has one: weights, gradients and AdamW's moments, all in fp32.

    ``features``: the number of values that the head reads from a state.
    """
    if recipe.advantage.value_head is None:
        return plan
    width = recipe.advantage.value_head.width
    count = width * (features + 2) + 1
    return MemoryPlan((*plan.rows, MemoryRow(HEAD_ROW, 4 * count * torch.float32.itemsize)), plan.phases)


def saved_of_head(plan: MemoryPlan) -> int:
    """Return the bytes of the value head in a checkpoint: its row in the plan without the gradients."""
    return sum(row.bytes for row in plan.rows if row.name == HEAD_ROW) * 3 // 4
