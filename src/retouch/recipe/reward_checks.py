"""Checks that a recipe's rewards and ``watch`` fit the data and the rest of the recipe. Checks that need only the section of a
reward are in ``rewards/base.py``."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from retouch.config.imports import did_you_mean
from retouch.recipe.watch import Watch
from retouch.rewards.base import NoReward, RewardSection
from retouch.rewards.combine.combination import Combination, Combine, combination
from retouch.rewards.combine.formula_parser import read_formula
from retouch.rewards.facts import PhaseFacts, RunFacts, TaskFacts
from retouch.types import Column

if TYPE_CHECKING:
    from retouch.recipe.keys import RecipeKeys


def rewards_of(recipe: "RecipeKeys", phase: int | None = None) -> Iterator[tuple[str, RewardSection]]:
    """Yield each reward of a run, and the rewards nested in it, with their paths: the reward that is trained on, the held-out judge
    of ``watch``, and the rewards that objectives differentiate. ``phase``: as for `differentiated_rewards`."""
    sections = [("reward", recipe.reward)]
    if recipe.watch is not None and recipe.watch.judge is not None:
        sections.append(("watch.judge.reward", recipe.watch.judge.reward))
    for path, section in [*sections, *differentiated_rewards(recipe, phase)]:
        for inner, _, part in section.parts(path):
            yield inner, part


def differentiated_rewards(recipe: "RecipeKeys", phase: int | None = None) -> Iterator[tuple[str, RewardSection]]:
    """Yield each reward that an objective differentiates, with its path. ``phase``: index of the only phase to include; None
    includes all."""
    for index, each in enumerate(recipe.resolved_phases()):
        if each.objective.differentiates_reward and phase in (None, index):
            for key, section in each.objective.rewards.items():
                if isinstance(section, RewardSection):
                    yield f"{recipe.phase_key(index, 'objective')}.{key}", section


def reward_problems(recipe: "RecipeKeys") -> Iterator[str]:
    """Check the reward, and the column that the evaluation reports."""
    if isinstance(recipe.reward, NoReward):
        yield from _problems_without_reward(recipe)
        return
    combined, columns = None, recipe.reward.known_columns()
    try:
        combined = _combined(recipe.reward.combine, columns)
    except ValueError as error:
        yield f"reward.combine: {str(error).removeprefix('combine ').removeprefix('combine: ')}"
    column = recipe.eval.column
    if columns is not None and column is not None and column not in columns and column not in evaluated_columns(recipe, ()):
        instead = did_you_mean(column, columns) or f"; it gives {', '.join(columns)}"
        yield f"eval.column: the reward gives no {column!r}{instead}"
    run = RunFacts(
        writes_text=recipe.policy.is_autoregressive,
        trained_columns=None if combined is None else combined.columns,
        eval_column=recipe.eval.column,
        phases=tuple(
            PhaseFacts(rows=phase.rows, group_size=phase.group_size, chunk=phase.rollout.chunk)
            for phase in recipe.resolved_phases()
        ),
    )
    yield from recipe.reward.problems("reward", "", run)


def _problems_without_reward(recipe: "RecipeKeys") -> Iterator[str]:
    """Check that a run without a reward uses nothing that needs one."""
    give = "give a reward (reward_funcs of a Trainer)"
    sampling = [phase for phase in recipe.resolved_phases() if not phase.imitates]
    if sampling:
        why = f"there is none, and {sampling[0].objective.label} learns from the rewards of its samples"
        yield f"reward: {why}; {give}, or learn from pairs of the data with objective.kind dpo and objective.pairs data"
        return
    if recipe.heldout_objective is None:
        yield f"reward: there is none, and this run can only be evaluated by a reward; {give}"
        return
    columns = evaluated_columns(recipe, ())
    if recipe.eval.column is not None and recipe.eval.column not in columns:
        yield f"eval.column: without a reward, evaluation gives only {' and '.join(columns)}; name one of them, or {give}"
    need = {"reward.combine": recipe.reward.combine, "eval.best_of_k": recipe.eval.best_of_k, "watch": recipe.watch}
    for key, given in need.items():
        if given:
            yield f"{key}: it needs a reward, and there is none; remove it, or {give}"


def evaluated_columns(recipe: "RecipeKeys", columns: Iterable[str]) -> list[str]:
    """The columns of an evaluation: ``columns`` of the reward, and the columns that an objective measures."""
    objective = recipe.heldout_objective
    return [*columns, *(() if objective is None else objective.heldout_columns)]


def reward_data_problems(recipe: "RecipeKeys", phase: int) -> Iterator[str]:
    """Check that the tasks of the phase with this index have what the rewards need."""
    data = recipe.resolved_phases()[phase].data
    contents = data.contents()
    tasks = TaskFacts(
        path=recipe.phase_key(phase, "data"),
        kind=data.label,
        has_source=contents.images is not False,
        has_target=contents.target is not False,
    )
    for path, part in rewards_of(recipe, phase):
        yield from part.task_problems(path, tasks)


def _combined(combine: Combine, columns: Mapping[str, Column] | None) -> Combination | None:
    """The combination of the columns; None if they are not known yet, and then only the syntax is checked."""
    if not combine:
        raise ValueError('empty; name at least one column and its weight, for example {"overall": 1.0}')
    if columns is not None:
        return combination(combine, columns)
    if isinstance(combine, str):
        read_formula(combine)
    elif not any(combine.values()):
        raise ValueError("all weights are 0, so nothing would be learned; set a weight for one column")
    return None


def watch_problems(watch: Watch, rewards: Iterable[RewardSection]) -> Iterator[str]:
    """Yield a line for each contradiction within ``watch``, and between ``watch`` and the ``rewards`` that are trained on."""
    if watch.canaries is not None and watch.canaries.count > watch.tasks:
        yield f"watch.canaries.count: {watch.canaries.count} exceeds watch.tasks ({watch.tasks}); use {watch.tasks} or fewer"
    if watch.judge is None:
        return
    heldout = watch.judge.reward
    if (columns := heldout.known_columns()) is not None:
        try:
            combination(heldout.combine, columns)
        except ValueError as error:
            yield f"watch.judge.reward.combine: {str(error).removeprefix('combine ')}"
            return
    if shared := _trained(heldout) & set().union(*map(_trained, rewards)):
        names = ", ".join(sorted({name for _, name in shared}))
        yield (
            f"watch.judge.reward: the run is trained on its columns {names}, so it is not held out; use another judge, or columns "
            "that are not trained on"
        )


def _trained(reward: RewardSection) -> set[tuple[str, str]]:
    """The columns that ``combine`` uses (all columns if it is empty, as in a reward that is differentiated), each with the JSON of
    the reward that computes it. If the columns are not known yet: the names in ``combine``."""
    columns = reward.known_columns()
    if columns is not None and not reward.combine:
        names = tuple(columns)
    elif columns is None:
        names = tuple(reward.combine) if isinstance(reward.combine, dict) else (reward.combine,)
    else:
        try:
            names = combination(reward.combine, columns).columns
        except ValueError:  # a problem of the reward itself
            names = ()
    rewards = [(prefix, part.model_dump_json(exclude={"combine", "max_missing"})) for _, prefix, part in reward.parts()]
    return {(own, name.removeprefix(prefix)) for prefix, own in rewards for name in names if name.startswith(prefix)}
