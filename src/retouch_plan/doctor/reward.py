"""Checks of the recipe's reward: API keys of judges, number and cost of their calls, and the score of one image."""

import os
import re
from collections.abc import Iterator, Sequence

import torch
from PIL import Image

from retouch.config import keys
from retouch.data.base import DataSets
from retouch.data.sampler import examples
from retouch.distributed.placement import resolve_device
from retouch.distributed.ranks import find_device
from retouch.recipe.checks import rewards_of
from retouch.recipe.derived_facts import Calls, judge_calls
from retouch.recipe.keys import Devices
from retouch.recipe.recipe import Recipe
from retouch.recipe.watch import Watch
from retouch.rewards.base import NoReward
from retouch.rewards.function import range_text
from retouch.rewards.judging import RewardScorer
from retouch.rewards.vlm.endpoint_settings import without_waiting
from retouch.rewards.weights import MissingWeights
from retouch.run.watch import build_measures
from retouch.types import Sample, Task
from retouch_plan.doctor.findings import Finding, failed, note, ok


def check_reward(recipe: Recipe, sets: DataSets | None, *, calls: Sequence[Calls]) -> Iterator[Finding]:
    """Run all checks of the reward. The reward and the watch are built only if all API keys of judges are set and may be sent."""
    found = [*check_keys(recipe), *check_key_addresses(recipe)]
    yield from found
    yield from (note("judge calls", str(each)) for each in calls)
    if all(finding.status == "ok" for finding in found):
        yield check_scoring(recipe, sets)
        if recipe.watch is not None:
            yield check_watch(recipe.watch, _device(recipe))


def check_keys(recipe: Recipe) -> Iterator[Finding]:
    """A failure for each environment variable with a judge's API key that is not set."""
    reported: set[str] = set()
    for path, part in rewards_of(recipe):
        for name, judge in part.variables():
            if name not in reported and not (os.environ.get(name) or os.environ.get(f"{name}_FILE")):
                reported.add(name)
                yield failed("key", f"{name} is not set; {path} needs it for {judge}", fix=f"export {name}=...  (the API key)")


def check_key_addresses(recipe: Recipe) -> Iterator[Finding]:
    """The address that each key is sent to; a failure for a key that may not be sent to the address that the recipe names."""
    sent = dict.fromkeys(pair for _, part in rewards_of(recipe) for pair in part.keys_sent())
    for variable, url in sent:
        try:
            keys.require_bound(variable, url)
        except ValueError as error:
            yield failed("key", str(error), fix=keys.binding_command(variable, url))
        else:
            yield ok("key", f"{variable} goes to {keys.address_of(url)}")


def calls_of(recipe: Recipe, *, steps: Sequence[int] | None, sets: DataSets | None) -> list[Calls]:
    """The calls to each judge; none if the length of the run is not known without its data. ``steps``: of ``phase_steps``."""
    if steps is None:
        return []
    return judge_calls(recipe, steps=steps, heldout=recipe.eval.tasks if sets is None else len(sets.heldout))


def check_scoring(recipe: Recipe, sets: DataSets | None) -> Finding:
    """Check whether the reward can be built, has the columns that are combined, and scores an unedited source image."""
    if isinstance(recipe.reward, NoReward):
        return ok("reward", "none: the run learns from pairs of the data and is evaluated on held-out pairs")
    fix = "fix the recipe's reward section"
    try:
        with without_waiting():
            judge = RewardScorer(recipe.reward.build(device=_device(recipe)), recipe.reward.combine)
        try:
            text = f"{recipe.reward.name}, {judge.combination} ({range_text(judge.combination.low, judge.combination.high)})"
            if sets is None or not len(examples(sets.train)):
                return ok("reward", f"{text}; not tested, because there is no task")
            task = examples(sets.train)[0]
            value, missing = _score_source(judge, task)
        finally:
            judge.close()
    except MissingWeights as error:
        keys = [f"{path}.path" for path, _, part in recipe.reward.parts() if getattr(part, "path", None) == error.path]
        then = "" if error.folder is None else " ".join(f"--set {key}={error.folder}" for key in keys)
        return failed("reward", str(error), fix=error.command, then=then)
    except ValueError as error:
        download = re.search("`(hf download [^`]+)`", str(error))
        return failed("reward", str(error), fix=download[1] if download else fix)
    if value != value and all(name.startswith(_prefixes_of_groups(recipe)) for name in missing):
        return ok("reward", f"{text}; not tested, because it compares the images of a group")
    if value != value:
        problem = f"could not score an image of {task.id}: {', '.join(missing)} missing"
        return failed("reward", f"{recipe.reward.name} {problem}", fix=fix)
    image = "an unedited source image" if task.images else "a gray image"
    return ok("reward", f"{text}: {value:.3f} for {image}")


def _prefixes_of_groups(recipe: Recipe) -> tuple[str, ...]:
    """The prefixes of the columns of rewards that compare the images of a group, and so cannot score a single image."""
    return tuple(prefix for _, prefix, part in recipe.reward.parts() if part.compares_groups)


def check_watch(watch: Watch, device: torch.device) -> Finding:
    """Check whether the rewards of the watch can be built. They score no image here."""
    try:
        with without_waiting():
            measures = build_measures(watch, device=device)
    except ValueError as error:
        return failed("watch", str(error), fix="fix the recipe's watch section")
    heldout = "no held-out reward" if measures.heldout is None else f"held-out reward: {measures.heldout.combination}"
    measures.close()
    return ok("watch", f"{watch.tasks} images every {watch.every} steps; {heldout}")


def _device(recipe: Recipe) -> torch.device:
    """The device of the reward in a run on this machine; if this machine lacks it, the device that ``auto`` chooses."""
    devices = recipe.devices or Devices()
    first = "cuda:0" if recipe.device == "auto" and torch.cuda.is_available() else recipe.device
    name = devices.reward or devices.policy or first
    if name.startswith("cuda"):
        name = str(resolve_device(name, devices, local_rank=int(os.environ.get("LOCAL_RANK", "0"))))
    try:
        return find_device(name)
    except ValueError:
        return find_device("auto")


def _score_source(judge: RewardScorer, task: Task) -> tuple[float, list[str]]:
    """The reward of the task's source image, and the combined columns whose score is missing."""
    image = task.images[0] if task.images else Image.new("RGB", (64, 64), "gray")
    judged = judge([Sample(task, image, completion=task.instruction)])
    missing = [name for name in judge.combination.columns if judged.scores[name].isnan().any()]
    return judged.rewards.item(), missing
