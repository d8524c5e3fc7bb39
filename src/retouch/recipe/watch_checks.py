"""What is wrong between a recipe's ``watch`` and its reward, each with what to do about it."""

from collections.abc import Iterator

from retouch.recipe.watch import Watch
from retouch.rewards.base import RewardSection
from retouch.rewards.combine.combination import combination


def watch_problems(watch: Watch, reward: RewardSection) -> Iterator[str]:
    """A line for everything in ``watch`` that does not go together, or with the reward that trains."""
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
    if shared := _trained(heldout) & _trained(reward):
        names = ", ".join(sorted({name for _, name in shared}))
        yield (
            f"watch.judge.reward: the run is trained on its {names}, so it is not held out; use another judge, or columns that do "
            "not train"
        )


def _trained(reward: RewardSection) -> set[tuple[str, str]]:
    """The columns that ``combine`` uses, each with the reward that gives it; of a reward whose columns are not known yet, the
    names in ``combine``."""
    columns = reward.known_columns()
    if columns is None:
        names = tuple(reward.combine) if isinstance(reward.combine, dict) else (reward.combine,)
    else:
        try:
            names = combination(reward.combine, columns).columns
        except ValueError:  # a problem of the reward itself
            names = ()
    rewards = [(prefix, part.model_dump_json(exclude={"combine", "max_missing"})) for _, prefix, part in reward.parts()]
    return {(own, name.removeprefix(prefix)) for prefix, own in rewards for name in names if name.startswith(prefix)}
