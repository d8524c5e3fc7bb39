"""A phase of a run, from what the recipe says of it."""

from collections.abc import Sequence

import torch

from retouch.data.sampler import assign, global_rows, tasks_for_step
from retouch.data.tasks import Subset
from retouch.distributed.ranks import Ranks
from retouch.recipe.phases import ResolvedPhase
from retouch.recipe.policy import AutoregressivePolicyKeys
from retouch.recipe.recipe import Recipe
from retouch.training.loop import Phase
from retouch.types import Batch, Task


def build_phase(
    recipe: Recipe,
    phase: ResolvedPhase,
    *,
    steps: range,
    tasks: Sequence[Task],
    ranks: Ranks,
    reward_range: tuple[float, float],
) -> Phase:
    """The phase over ``tasks``, taking ``steps`` of the run. ``reward_range``: smallest and largest possible reward."""
    order = [
        row
        for rank in range(ranks.world)
        for row in global_rows(rows=phase.rows, minibatches=recipe.minibatches, rank=rank, world=ranks.world)
    ]

    def batch(step: int) -> Batch:
        rows = tasks_for_step(seed=recipe.seed, step=step - steps.start, count=phase.tasks_per_step, size=len(tasks))
        return assign(
            seed=recipe.seed,
            step=step,
            tasks=Subset(tasks, rows),
            group_size=phase.group_size,
            minibatches=recipe.minibatches,
            rank=ranks.rank,
            world=ranks.world,
        )

    objective = phase.objective
    entropy = isinstance(recipe.policy, AutoregressivePolicyKeys) and recipe.policy.entropy
    return Phase(
        name=phase.name,
        steps=steps,
        objective=objective.build(entropy=entropy, value_head=None if phase.imitates else recipe.advantage.value_head),
        batch=batch,
        order=torch.tensor(order),
        group=torch.arange(phase.rows) // phase.group_size,
        advantage=None if phase.imitates else recipe.advantage,
        reward_range=reward_range,
        normalise=objective.loss_weights,
        max_length=phase.rollout.longest if objective.loss_weights == "dr_grpo" else None,
        epochs=recipe.epochs,
        minibatches=recipe.minibatches,
        learning_rate=recipe.optimizer.learning_rate(peak=phase.learning_rate, steps=steps),
        trained_kinds=lambda step: objective.trained_kinds(step - steps.start),
    )


def copies_needed(recipe: Recipe) -> set[str]:
    """Weights to keep besides the current ones, over all phases."""
    needed = {"average"} if recipe.policy.ema is not None else set()
    if recipe.renderer is not None:
        needed |= recipe.renderer.weight_copies
    for phase in recipe.resolved_phases():
        needed |= phase.objective.weight_copies
    return needed
