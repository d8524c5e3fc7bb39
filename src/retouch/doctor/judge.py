"""What can be checked of a recipe's reward before anything expensive: keys, the reward itself on one picture, calls and cost."""

import os
from collections.abc import Iterator

import torch
from PIL import Image

from retouch.data.base import DataSets
from retouch.doctor.findings import Finding, failed, note, ok
from retouch.recipe.judge_calls import judge_calls
from retouch.recipe.recipe import Recipe
from retouch.recipe.reward_checks import rewards_of
from retouch.recipe.watch import Watch
from retouch.rewards.judging import Judge
from retouch.types import Sample, Task
from retouch.watch.measures import build_measures


def check_reward(recipe: Recipe, sets: DataSets | None) -> Iterator[Finding]:
    """The keys that judges need; what they will be asked; and, where the keys are there, the reward on one picture."""
    absent = list(check_keys(recipe))
    yield from absent
    yield from check_calls(recipe, sets)
    if not absent:
        yield check_judge(recipe, sets)
        if recipe.watch is not None:
            yield check_watch(recipe.watch, _device(recipe))


def check_keys(recipe: Recipe) -> Iterator[Finding]:
    """A failure for each environment variable that a judge's key is to come from, and is not there."""
    told: set[str] = set()
    for path, part in rewards_of(recipe):
        for name, judge in part.variables():
            if name not in told and not (os.environ.get(name) or os.environ.get(f"{name}_FILE")):
                told.add(name)
                yield failed("key", f"{name} is not set, and {path} asks {judge}", mend=f"export {name}=...  (the judge's key)")


def check_calls(recipe: Recipe, sets: DataSets | None) -> Iterator[Finding]:
    """What the judges will be asked, where the length of the run is known."""
    phases = recipe.resolved_phases()
    if any(phase.steps is None for phase in phases) and sets is None:
        return
    steps = [phase.steps or phase.total_steps(len(sets.train) if sets else 0) for phase in phases]
    heldout = recipe.eval.tasks if sets is None else len(sets.heldout)
    for calls in judge_calls(recipe, steps=steps, heldout=heldout):
        yield note("judge calls", str(calls))


def check_judge(recipe: Recipe, sets: DataSets | None) -> Finding:
    """Whether the judge is built, has the columns that are combined, and judges an untouched source picture."""
    wrong = "mend the recipe's reward section"
    try:
        judge = Judge(recipe.reward.build(device=_device(recipe)), recipe.reward.combine)
        try:
            told = f"{recipe.reward.name}, {judge.combination} ({judge.combination.low:g} to {judge.combination.high:g})"
            if sets is None or not len(sets.train):
                return ok("judge", f"{told}; not tried, for want of a picture")
            task = sets.train[0]
            value, missing = _tried(judge, task)
        finally:
            judge.close()
    except ValueError as error:
        return failed("judge", str(error), mend=wrong)
    if value != value:
        what = f"could not judge a picture of {task.id}: {', '.join(missing)} missing"
        return failed("judge", f"{recipe.reward.name} {what}", mend=wrong)
    what = "an untouched source picture" if task.images else "a grey picture"
    return ok("judge", f"{told}: {value:.3f} for {what}")


def check_watch(watch: Watch, device: torch.device) -> Finding:
    """Whether what watches is built; it is tried on no picture."""
    try:
        measures = build_measures(watch, device=device)
    except ValueError as error:
        return failed("watch", str(error), mend="mend the recipe's watch section")
    heldout = "no held-out judge" if measures.heldout is None else f"held out: {measures.heldout.combination}"
    measures.close()
    return ok("watch", f"{watch.tasks} pictures every {watch.every} steps; {heldout}")


def _device(recipe: Recipe) -> torch.device:
    return torch.device(recipe.device if recipe.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


def _tried(judge: Judge, task: Task) -> tuple[float, list[str]]:
    """The reward of the task's own source, and the combined columns that are missing."""
    image = task.images[0] if task.images else Image.new("RGB", (64, 64), "gray")
    judged = judge([Sample(task, image, completion=task.instruction)])
    missing = [name for name in judge.combination.columns if judged.scores[name].isnan().any()]
    return judged.rewards.item(), missing
