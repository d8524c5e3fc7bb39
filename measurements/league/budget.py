"""The cost of a training step in network evaluations, computed from the recipe alone.

One evaluation is one sample that goes once through the trained network: an image at one denoising step, or a whole completion,
of which each token is computed once. A forward pass with a backward pass counts 3. The denoising steps of the image model that
renders a writer's completions count too. Text encoders, autoencoders, value heads, the preflight and held-out evaluations do not
count.
"""

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from retouch.objectives.base import Objective
from retouch.recipe.recipe import Recipe

TRAINED = 3
"""Evaluations of a forward pass with its backward pass."""
REFILLED = 1 / 3
"""The cost of a round of ``rollout.refill``, as a share of the evaluations of a step's rollout. The number of groups that a round
replaces is not known before the run; in the editor's first steps, a sixth of the groups have equal rewards."""


def _policy_gradient(objective: Any, actions: int, group: int) -> float:
    return actions * (TRAINED + (objective.kl_kind is not None))


def _nft(objective: Any, actions: int, group: int) -> float:
    return objective.samples * (TRAINED + 1 + objective.compares_reference)


def _awm(objective: Any, actions: int, group: int) -> float:
    return objective.samples * (TRAINED + objective.compares_reference)


def _dpo(objective: Any, actions: int, group: int) -> float:
    """One pair per group. A group with equal rewards costs half as much, but this is not known in advance."""
    return objective.samples * (TRAINED + 1) * 2 / group


def _whole_groups(objective: Any, actions: int, group: int) -> float:
    """A group fits into a microbatch; otherwise its images are evaluated once more, without gradient."""
    return objective.samples * (TRAINED + 1 + getattr(objective, "compares_reference", False))


def _draft(objective: Any, actions: int, group: int) -> float:
    """The last ``objective.steps`` steps of the chain are computed again. The passes of the autoencoder do not count."""
    return objective.steps * TRAINED


def _imitation(objective: Any, actions: int, group: int) -> float:
    return TRAINED


UPDATE: Mapping[str, Callable[[Objective, int, int], float]] = {
    "policy_gradient": _policy_gradient,
    "nft": _nft,
    "awm": _awm,
    "dpo": _dpo,
    "dgpo": _whole_groups,
    "crd": _whole_groups,
    "draft": _draft,
    "refl": _imitation,
    "supervised": _imitation,
    "sft": _imitation,
}
"""For each kind of objective: a function of the objective, the number of trained actions and the group size, which returns the
evaluations per sample of one pass over the samples of a step."""


def evaluations(recipe: Recipe, step: int) -> int:
    """Network evaluations of training step ``step``, counted from 0. Raises ValueError if `UPDATE` lacks the kind of objective.

    Costs that depend on the rewards are estimated: every group has a best sample, and rounds of refill cost `REFILLED`.
    """
    (phase,) = recipe.resolved_phases()
    kind = phase.objective.label
    if kind not in UPDATE:
        raise ValueError(f"measurements/league/budget.py: add to UPDATE what an update of {kind!r} costs")
    acted, actions = _rollout(recipe, step)
    if phase.rollout.refill is not None:
        acted += phase.rollout.refill.rounds * round(REFILLED * acted)
    kept = getattr(recipe.advantage, "keep", phase.group_size) / phase.group_size
    update = recipe.epochs * phase.rows * kept * UPDATE[kind](phase.objective, actions, phase.group_size)
    return round((0 if phase.imitates else acted) + update)


def _rollout(recipe: Recipe, step: int) -> tuple[int, int]:
    """The evaluations of a step's rollout, and the number of trained actions per sample."""
    (phase,) = recipe.resolved_phases()
    rollout: Any = phase.rollout
    if rollout.is_autoregressive:
        renderer: Any = recipe.renderer
        images = getattr(renderer, "num_steps", 0) * (1 + (getattr(renderer, "guidance_scale", 1.0) > 1))
        return phase.rows * (1 + images), 1
    guided = 1 + (rollout.guidance_scale > 1)
    actions = rollout.window.actions(num_steps=rollout.num_steps, seed=recipe.seed, step=step)
    if not rollout.transition.stochastic:
        return guided * phase.rows * rollout.num_steps, 1
    shared = actions.start if rollout.window.branches else 0
    return guided * (phase.tasks_per_step * shared + phase.rows * (rollout.num_steps - shared)), guided * len(actions)


def spent(recipe: Recipe, steps: int) -> int:
    """Network evaluations of the first ``steps`` steps."""
    return sum(evaluations(recipe, step) for step in range(steps))


def steps_within(recipe: Recipe, budget: int) -> int:
    """The largest number of steps within ``budget`` network evaluations. Raises ValueError if one step exceeds the budget."""
    total = 0
    for step in count():
        total += evaluations(recipe, step)
        if total > budget:
            if step == 0:
                raise ValueError(f"{recipe.name}: a step takes {total} network evaluations, more than the budget of {budget}")
            return step
    raise AssertionError("a step costs something")
