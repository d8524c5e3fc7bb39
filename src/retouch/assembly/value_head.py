"""The recipe's value head, built with the width of its inputs."""

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
"""Number of tasks from which the normalisation of a head's inputs is computed."""


@torch.no_grad()
def build_head(
    section: ValueHead, model: DenoisingModel | AutoregressiveModel, *, tasks: Sequence[Task], seed: int
) -> LatentValues | TokenValues:
    """A value head for the model's states. ``tasks``: training tasks, of which the first are encoded; the same on every rank."""
    device = compute_device(model.module)
    if not isinstance(model, DenoisingModel):
        states, _ = model.prefill(model.module, model.encode([tasks[0]]))
        return TokenValues(states.shape[1], width=section.width, seed=seed, coefficient=section.coefficient).to(device)
    conditioning = [model.encode([tasks[index]]) for index in range(min(SAMPLED, len(tasks)))]
    x = model.initial_noise(conditioning[0], [generator(seed, "size of a state")])
    sampled = torch.cat([summary(each) for each in conditioning])
    return LatentValues(channels_of(x), sampled, width=section.width, seed=seed).to(device)


def with_head(plan: MemoryPlan, recipe: Recipe, features: int) -> MemoryPlan:
    """The plan with a row for the value head, where the recipe has one: its weights, gradients and AdamW's moments, all in fp32.

    ``features``: numbers that the head reads of a state.
    """
    if recipe.advantage.value_head is None:
        return plan
    width = recipe.advantage.value_head.width
    count = width * (features + 2) + 1
    return MemoryPlan((*plan.rows, MemoryRow(HEAD_ROW, 4 * count * torch.float32.itemsize)), plan.phases)


def saved_of_head(plan: MemoryPlan) -> int:
    """Bytes of a checkpoint that are the head's: all but its gradients."""
    return sum(row.bytes for row in plan.rows if row.name == HEAD_ROW) * 3 // 4
