"""What a recipe's ``watch`` and its reward mean together, each with what to do about it."""

from collections.abc import Iterator

from retouch.recipe.reward import Reward
from retouch.recipe.reward_classes import columns_of, parts_of
from retouch.recipe.watch import Watch
from retouch.rewards.combine.combination import combination


def watch_problems(watch: Watch, reward: Reward) -> Iterator[str]:
    """A line for everything in ``watch`` that cannot stand together, or beside the reward that trains."""
    if watch.canaries is not None and watch.canaries.count > watch.tasks:
        yield f"watch.canaries.count: {watch.canaries.count} of a look's {watch.tasks} pictures; take {watch.tasks} or fewer"
    if watch.judge is None:
        return
    heldout = watch.judge.reward
    if (columns := columns_of(heldout)) is not None:
        try:
            combination(heldout.combine, columns)
        except ValueError as error:
            yield f"watch.judge.reward.combine: {str(error).removeprefix('combine ')}"
            return
    if shared := _used(heldout) & _used(reward):
        names = ", ".join(sorted({name for _, name in shared}))
        yield (
            f"watch.judge.reward: the run is trained on its {names}, so it is not held out; take another judge, or columns that do "
            "not train"
        )


def _used(reward: Reward) -> set[tuple[str, str]]:
    """Which columns the combination is made of, each with what gives it; of a reward whose columns only it can say, their names as
    they are written."""
    columns = columns_of(reward)
    if columns is None:
        names = tuple(reward.combine) if isinstance(reward.combine, dict) else (reward.combine,)
    else:
        try:
            names = combination(reward.combine, columns).columns
        except ValueError:  # said of the reward itself
            names = ()
    judges = [(prefix, part.model_dump_json(exclude={"combine", "max_missing"})) for _, prefix, part in parts_of(reward)]
    return {(judge, name.removeprefix(prefix)) for prefix, judge in judges for name in names if name.startswith(prefix)}
