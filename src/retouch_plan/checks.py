"""The checks of a recipe: batch sizes, sharding, trackers, run folder, data, disk space, engines, reward, and a trial step."""

import os
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from math import gcd
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors import SafetensorError

from retouch.config import keys
from retouch.config.imports import is_user_error
from retouch.config.packaged import available, short_name
from retouch.data.base import DataSets, DataSource
from retouch.data.tasks import NothingLeftError, UnindexedTasks, examples
from retouch.distributed.ranks import Ranks, check_sharding, find_device, resolve_device
from retouch.inference.exporting import why_not_pushable
from retouch.models.offloading import FOLDER_VARIABLE, LIMIT_VARIABLE, EmbeddingStore
from retouch.models.train import FullWeights
from retouch.policies.rollout import DenoisingRollout, Diagnosis, TokenRollout
from retouch.recipe.derived_facts import differences
from retouch.recipe.keys import Devices, Watch
from retouch.recipe.policy import AutoregressivePolicyKeys, DenoisingPolicyKeys
from retouch.recipe.recipe import Recipe, check_ranks, load, parse, rank_count_warning, rewards_of
from retouch.records.folder import RunFolder, split_label
from retouch.records.libraries import require_trackers
from retouch.rewards.base import NoReward
from retouch.rewards.function import range_text
from retouch.rewards.judging import RewardScorer, ScoredBatch
from retouch.run import checkpoint
from retouch.run.build import Assembly, assemble, build_sets
from retouch.run.evaluation import headline_tasks
from retouch.run.watch import build_measures
from retouch.types import Batch, Sample
from retouch_judge.calls import Calls, judge_calls
from retouch_judge.models import without_waiting
from retouch_plan.findings import Finding, failed, gigabytes, note, ok
from retouch_rewards.weights import MissingWeights

_LISTED_PROBLEMS = 5


def check_batch(recipe: Recipe, *, world: int) -> Iterator[Finding]:
    """Check whether ``world`` ranks can divide the rows of each phase's steps; report the rows per rank and optimizer step."""
    try:
        check_ranks(recipe, world)
    except ValueError as error:
        yield failed("batch", str(error), fix="set one of the numbers above in the recipe or with --set")
        return
    for phase in recipe.resolved_phases():
        share = phase.rows // world
        ranks = f"; {share} on each of {world} ranks" if world > 1 else ""
        parts = f", {share // recipe.minibatches} for each optimizer step" if recipe.minibatches > 1 else ""
        text = f"{phase.tasks_per_step} tasks x {phase.group_size} samples = {phase.rows} a step{ranks}{parts}"
        yield ok("batch", text if recipe.phases is None else f"phase {phase.name}: {text}")
    if recipe.ranks not in (None, world):
        yield note("batch", rank_count_warning(recipe.ranks, world))
    yield from (note("batch", text) for text in dict.fromkeys(_forward_shapes(recipe, world)))


def _forward_shapes(recipe: Recipe, world: int) -> Iterator[str]:
    """Describe what makes forward passes of rollout and update equal, or unequal, in phases whose ratios need equal ones. In 16
    bits, a forward pass with other rows rounds differently. Denoising policies repeat rows (``rollout.equal_shapes``). Policies
    that generate tokens need chunks, and minibatches of a rank, of whole microbatches."""
    microbatch = recipe.microbatch
    if getattr(recipe.policy.model, "dtype", None) not in ("bfloat16", "float16"):
        return
    for phase in recipe.resolved_phases():
        rollout = phase.rollout
        if phase.imitates or not phase.objective.has_ratio:
            continue
        if not isinstance(rollout, DenoisingRollout):
            if rollout.chunk % microbatch:
                yield (
                    f"rollout.chunk {rollout.chunk} is not a multiple of microbatch {microbatch}, so in 16 bits the ratios before "
                    f"the first update differ from 1 by rounding; use {-(-rollout.chunk // microbatch) * microbatch}"
                )
            minibatch = phase.rows // world // recipe.minibatches
            if recipe.minibatches > 1 and minibatch % microbatch:
                fitting = gcd(minibatch, microbatch)
                yield (
                    f"a minibatch has {minibatch} rows on each rank, which is not a multiple of microbatch {microbatch}, so in 16 "
                    f"bits the ratios before the first update differ from 1 by rounding; use microbatch {fitting}"
                )
            continue
        if not rollout.equal_shapes:
            continue
        actions = rollout.longest
        if microbatch < actions and (rest := actions % microbatch):
            padded = (microbatch - rest) / (actions + microbatch - rest)
            fewer = max(each for each in range(1, microbatch) if actions % each == 0)
            yield (
                f"{padded:.0%} of the rows of the update's forward passes are repeated, because a microbatch of {microbatch} does "
                f"not divide the {actions} steps that are trained of an image; {fewer} does; {actions} does too, but needs more "
                "memory"
            )


def check_sharding_settings(recipe: Recipe, *, world: int) -> Iterator[Finding]:
    """Check whether the recipe's ``sharding`` is installed, and agrees with the configuration of the launcher."""
    try:
        check_sharding(recipe, {**os.environ, "WORLD_SIZE": str(world)})
    except ValueError as error:
        fix = "change the launcher's configuration"
        if "pip install" in str(error):
            fix = "pip install 'retouch[deepspeed]'"
        elif str(error).startswith("devices.weights"):
            fix = "--set devices.weights=null"
        yield failed("sharding", str(error), fix=fix)
        return
    if recipe.sharding is not None:
        yield ok("sharding", f"{recipe.sharding}, over {world} ranks" if world > 1 else "a single rank shards nothing")


def check_trackers(recipe: Recipe) -> Finding:
    """Check whether the recipe's trackers are installed."""
    try:
        require_trackers(recipe.trackers)
    except ValueError as error:
        return failed("trackers", str(error), fix="pip install 'retouch[track]'")
    return ok("trackers", ", ".join(recipe.trackers) or "none")


def check_push(recipe: Recipe) -> Iterator[Finding]:
    """Check whether the recipe's uploads are possible. Sends no request to the Hub."""
    if recipe.push is None:
        return
    if (reason := why_not_pushable()) is not None:
        yield note("push", f"nothing will be pushed to {recipe.push.repo}: {reason}")
        return
    interval = f"every {recipe.push.every} steps and " if recipe.push.every else ""
    yield ok("push", f"to {recipe.push.repo}, {interval}at the end")


def check_folder(recipe: Recipe) -> Finding:
    """Check whether the run's folder is unused, or contains a run that this recipe can resume."""
    folder = RunFolder(recipe.folder)
    if not folder.recipe.exists():
        return ok("run folder", f"{folder.root}, a new run")
    try:
        changed = differences(parse(folder.read_recipe()["recipe"]), recipe)
    except ValueError as error:
        return failed("run folder", f"{folder.root} contains a run that cannot be read: {error}", fix="--set name=ANOTHER")
    if changed and not folder.has_steps():
        return ok("run folder", f"{folder.root}, where a run of another recipe ended before its first step; it will be replaced")
    if changed:
        listed = "\n".join(f"  {line}" for line in changed)
        return failed("run folder", f"{folder.root} contains a run of another recipe:\n{listed}", fix="--set name=ANOTHER")
    found = checkpoint.latest(folder.checkpoints)
    start = "from its start, because it has no checkpoint" if found is None else f"from {found}"
    return note("run folder", f"{folder.root} contains this run already; it will be resumed {start}")


def _data_of(recipe: Recipe) -> list[DataSource]:
    found: list[DataSource] = []
    for phase in recipe.resolved_phases():
        if phase.data not in found:
            found.append(phase.data)
    return found


def check_data(recipe: Recipe) -> Iterator[tuple[Finding, DataSets | None]]:
    """Read each data set of the recipe as in training; the data sets are None if this failed."""
    size = recipe.image_size
    yield from (_read_data(recipe, data, size) for data in _data_of(recipe))


def _read_data(recipe: Recipe, data: DataSource, size: tuple[int, int] | None) -> tuple[Finding, DataSets | None]:
    missing = [path for path in data.paths() if not Path(path).exists()]
    path = next(iter(missing or data.paths()), "the playground" if data.label.startswith("playground") else data.label)
    if data.on_hub and missing:
        try:
            data.refuse_test_sets()
        except ValueError as error:
            fix = "choose another data set, or set data.allow_test_sets to train on a benchmark"
            return failed("data", str(error), fix=fix), None
        return note("data", f"{path} is not a local folder: it will be read from the Hugging Face Hub when training starts"), None
    try:
        sets = build_sets(recipe, data, size=size)
    except NothingLeftError as error:
        return failed("data", str(error), fix="--set data.held_out=1"), None
    except ValueError as error:
        place = f"FILE{Path(path).suffix}" if Path(path).suffix else "DIR"
        fix = f"retouch data check {'RECIPE' if 'lists' in data.path_keys else path}"
        if missing:
            key = next(key for key in data.path_keys if path in data.paths(key))
            fix = f"--set data.{key}=[DIR, ...]" if key.endswith("lists") else f"--set data.{key}={place}"
        return failed("data", str(error), fix=fix), None
    heldout = "held out" if split_label(recipe.eval.split) == "held-out" else "of them also for evaluation, none held out"
    train = "a stream of" if isinstance(sets.train, UnindexedTasks) else len(sets.train)
    text = f"{path}: {train} tasks for training, {len(sets.heldout)} {heldout}"
    if recipe.eval.headline:
        try:
            headline_tasks([sets.heldout[index] for index in range(len(sets.heldout))], recipe.eval.headline)
        except ValueError as error:
            return failed("data", str(error), fix="--set eval.headline=null"), sets
    if not sets.problems:
        return ok("data", text), sets
    lines = [f"{text}; problems in the data:", *(f"  {problem}" for problem in sets.problems[:_LISTED_PROBLEMS])]
    if len(sets.problems) > _LISTED_PROBLEMS:
        lines.append(f"  and {len(sets.problems) - _LISTED_PROBLEMS} more: retouch data check {path}")
    return note("data", "\n".join(lines)), sets


def phase_steps(recipe: Recipe, read: Sequence[DataSets | None]) -> list[int] | None:
    """The steps of each phase; None if a phase is as long as some passes over data that could not be read. ``read``: the data sets
    that ``check_data`` returned, in the same order."""
    steps, pairs = [], list(zip(_data_of(recipe), read, strict=True))
    for phase in recipe.resolved_phases():
        sets = next(sets for data, sets in pairs if data == phase.data)
        if phase.steps is None and sets is None:
            return None
        steps.append(phase.total_steps(0 if sets is None else len(examples(sets.train))))
    return steps


def check_disk(recipe: Recipe, bytes_each: int, *, steps: Sequence[int] | None) -> Finding:
    """Check whether the disk has room for the checkpoints that are kept, and for one more while it is written. ``bytes_each``: size
    of a checkpoint. ``steps``: the result of ``phase_steps``."""
    folder = recipe.folder.absolute()
    parent = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(parent).free
    every = recipe.checkpoints.keep_every
    kept = recipe.checkpoints.keep + (0 if every is None or steps is None else sum(steps) // every)
    needed = (kept + 1) * bytes_each
    each = gigabytes(bytes_each) if bytes_each >= 10**7 else f"{bytes_each / 1e6:.2f} MB"
    text = f"{kept} checkpoints of {each}, and one being written; {gigabytes(free)} are free under {parent}"
    if needed > free:
        return failed("disk", text, fix="--set out=FOLDER_ON_A_LARGER_DISK")
    if every is not None and steps is None:
        return note("disk", f"{text}; and another one for every {every} steps, whose number is not known before the data are read")
    return ok("disk", text)


def check_prompt_embeddings(recipe: Recipe) -> Iterator[Finding]:
    """The size of the stored prompt embeddings, if the recipe stores them, and whether the disk has room up to their limit."""
    if not isinstance(recipe.policy, DenoisingPolicyKeys) or recipe.policy.prompt_embeddings == "live":
        return
    try:
        store = EmbeddingStore.of_user()
    except ValueError as error:
        yield failed("prompts", str(error), fix=f"export {LIMIT_VARIABLE}=100")
        return
    count, size = store.usage()
    text = f"{count} stored prompt embeddings, {gigabytes(size)} of at most {gigabytes(store.limit)}, in {store.folder}"
    free = shutil.disk_usage(next(parent for parent in (store.folder, *store.folder.parents) if parent.exists())).free
    if free < store.limit - size:
        room = f"{gigabytes(free)} are free there, less than the embeddings may take; set {FOLDER_VARIABLE} or {LIMIT_VARIABLE}"
        yield note("prompts", f"{text}\n{room}")
        return
    yield ok("prompts", text)


def check_engines(recipe: Recipe) -> Iterator[Finding]:
    """The diagnosis of the engines of all phases, once per engine; a server is queried over HTTP."""
    policy = recipe.policy
    full_weights = isinstance(policy.train, FullWeights)
    found: dict[Any, Iterator[Diagnosis]] = {}
    for phase in recipe.resolved_phases():
        rollout = phase.rollout
        if rollout.engine is None or rollout.engine in found:
            continue
        if isinstance(policy, AutoregressivePolicyKeys):
            assert isinstance(rollout, TokenRollout), "the recipe's checks ensure it"
            found[rollout.engine] = rollout.engine.diagnose(
                rollout, base_model=policy.model.base_model, full_weights=full_weights, image_grammar=policy.model.image_grammar
            )
        else:
            assert isinstance(rollout, DenoisingRollout), "the recipe's checks ensure it"
            base = getattr(policy.model, "path", None)
            found[rollout.engine] = rollout.engine.diagnose(base_model=base, full_weights=full_weights)
    for diagnosis in found.values():
        yield from (Finding(status, "engine", text, fix) for status, text, fix in diagnosis)


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
            image = task.images[0] if task.images else Image.new("RGB", (64, 64), "gray")
            judged = judge([Sample(task, image, completion=task.instruction)])
            value = judged.rewards.item()
            missing = [name for name in judge.combination.columns if judged.scores[name].isnan().any()]
        finally:
            judge.close()
    except MissingWeights as error:
        keys = [f"{path}.path" for path, _, part in recipe.reward.parts() if getattr(part, "path", None) == error.path]
        then = "" if error.folder is None else " ".join(f"--set {key}={error.folder}" for key in keys)
        return failed("reward", str(error), fix=error.command, then=then)
    except ValueError as error:
        download = re.search("`(hf download [^`]+)`", str(error))
        return failed("reward", str(error), fix=download[1] if download else fix)
    of_groups = tuple(prefix for _, prefix, part in recipe.reward.parts() if part.compares_groups)
    if value != value and all(name.startswith(of_groups) for name in missing):  # these cannot score a single image
        return ok("reward", f"{text}; not tested, because it compares the images of a group")
    if value != value:
        problem = f"could not score an image of {task.id}: {', '.join(missing)} missing"
        return failed("reward", f"{recipe.reward.name} {problem}", fix=fix)
    scored = "an unedited source image" if task.images else "a gray image"
    return ok("reward", f"{text}: {value:.3f} for {scored}")


def check_watch(watch: Watch, device: torch.device) -> Finding:
    """Check whether the rewards of the watch can be built. They score no image here."""
    try:
        with without_waiting():
            judge, _ = build_measures(watch, device=device)
    except ValueError as error:
        return failed("watch", str(error), fix="fix the recipe's watch section")
    heldout = "no held-out reward" if judge is None else f"held-out reward: {judge.combination}"
    if judge is not None:
        judge.close()
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


EXPORT = "exported"
"""The folder that ``retouch export RUN --to RUN/exported`` writes, as the recipes name it."""


def future_weights(path: str, *, base: str | None = None, absent: bool = False) -> tuple[str | None, str, str]:
    """Describe the weights of ``policy.model.path``, which do not exist yet, often because a run was not exported.

    Returns the folder or Hugging Face id of a model of the same size (None if it is not known), what is missing, and the command
    that makes the weights, or an option of ``retouch doctor`` (empty if they can be downloaded).
    ``absent``: the path has the form of a Hugging Face id; unless it is in the folder of a run, the weights exist elsewhere.

    The base is ``base`` if it is given; else, if ``path`` is in the folder of a run, the model that the run starts from; else, if
    ``path`` has the form RUN/exported, the model that the packaged recipe with the name of the run starts from.
    """
    place = Path(path)
    run = next((folder for folder in place.parents if RunFolder(folder).recipe.exists()), None)
    if run is None:  # a run that will be exported there
        run = next((each.parent for each in (place, *place.parents) if each.name == EXPORT), None)
    if run is None and absent:
        reason, start, fix = "", None, ""
    elif run is None:
        reason, start, fix = "", None, "--base MODEL" if base is None else "train the model that this recipe starts from"
    elif RunFolder(run).recipe.exists():
        reason, start = f": the run {run} has not been exported", _start(RunFolder(run).read_recipe()["recipe"])
        fix = shlex.join(["retouch", "export", str(run), "--to", str(run / EXPORT)])
    else:
        reason, start, fix = f": there is no run {run}", None, "train and export that run, or give --base MODEL for its size"
        name = next((each for each in map(short_name, available()) if each.rpartition("/")[2] == run.name), None)
        with suppress(ValueError):  # an environment variable that the recipe reads is not set
            if name is not None:
                recipe = load(name)
                start, ranks = _start(recipe.document()), recipe.ranks or 1
                fix = shlex.join(["retouch", "launch", "--nproc", str(ranks), name] if ranks > 1 else ["retouch", "train", name])
    found = base or start
    made_with = "" if found is None else f". The dry run uses a model of its size, {found}"
    elsewhere = f"the weights of {path} are not on this machine: they will be downloaded when training starts"
    return found, f"{f'{path} does not exist yet{reason}' if fix else elsewhere}{made_with}", fix


def _start(document: Any) -> str | None:
    """Folder or Hugging Face id of the model that a recipe starts from. The recipe is not parsed: it may name classes to import."""
    path = document["policy"]["model"].get("path")
    return path if isinstance(path, str) else None


def check_trial(recipe: Recipe, ranks: Ranks, *, steps: Sequence[int] | None, check_space: bool) -> Iterator[Finding]:
    """Load the model, try one step of each phase as a run does at its start, and report the peak memory. No reward is computed and
    nothing is saved. Collective: every rank must call it.

    ``check_space``: also check whether the disk has room for the checkpoints of ``steps`` steps per phase (``phase_steps``).
    """
    smaller = "--set microbatch=1" if recipe.microbatch > 1 else "--set policy.gradient_checkpointing=true"
    try:
        parts = assemble(recipe, ranks)
    except (ValueError, OSError, SafetensorError) as error:
        key = re.match(r"[a-z_]+(\.[a-z_]+)+(?=: )", str(error))
        yield failed("model", str(error), fix=f"correct {key[0] if key else 'policy.model'}")
        return
    except torch.OutOfMemoryError as error:
        yield failed("model", f"{ranks.device} is full before the first step: {error}", fix="use a device with more memory")
        return
    try:
        weights = list(parts.model.module.parameters())
        trained = sum(weight.numel() for weight in weights if weight.requires_grad) / 1e6
        total = sum(weight.numel() for weight in weights) / 1e6
        yield ok("model", f"loaded on {parts.ranks.device}: {trained:.2f} M of {total:.2f} M parameters are trained")
        if check_space:
            yield check_disk(recipe, _checkpoint_bytes(parts), steps=steps)
        for check in parts.trial_steps(stepper=parts.stepper(), judge=_no_scores, done=0):
            fix = "" if check.ok else _suggested_fix(recipe, check.name)
            yield ok("trial step", check.text) if check.ok else failed("trial step", check.text, fix=fix)
    except ValueError as error:
        if not is_user_error(error):
            raise
        yield failed("trial step", str(error), fix="correct the recipe as the message says")
    except torch.OutOfMemoryError as error:
        yield failed("trial step", f"{ranks.device} is full: {error}", fix=smaller)
    finally:
        parts.judge.close()
    if ranks.device.type == "cuda":
        yield ok("measured", f"at most {gigabytes(torch.cuda.max_memory_allocated(ranks.device))} in use on {ranks.device}")


def _checkpoint_bytes(parts: Assembly) -> int:
    """The bytes of a checkpoint: trained weights, their copies, fp32 master weights of weights in 16 bits, and AdamW's two moments.
    Moments in 8 bits are counted as fp32."""
    trained = parts.copies.parameters.values()
    copies = [weight for copy in parts.copies.copies.values() for weight in copy.values()]
    size = sum(weight.numel() * weight.element_size() for weight in (*trained, *copies))
    return size + sum(weight.numel() * (8 if weight.element_size() == 4 else 12) for weight in trained)


def _suggested_fix(recipe: Recipe, check: str) -> str:
    """What to do about a failed check of the trial step: overrides that can be typed where the recipe can be the cause."""
    lora = recipe.policy.train.lora
    key = "policy.train.targets" if lora is recipe.policy.train else "policy.train.lora.targets"
    targets = [] if lora is None or lora.targets is None else [f"--set {key}=null"]
    match check:
        case "ratio_before":  # without rounding to 16 bits
            return "--set policy.model.dtype=float32"
        case "moved" | "ratio_after":
            phases = enumerate(recipe.resolved_phases())
            rates = {recipe.phase_key(index, "learning_rate"): phase.learning_rate for index, phase in phases}
            return " ".join([*targets, *(f"--set {key}={10 * rate:g}" for key, rate in rates.items())])
        case "frozen_gradient":
            return "load the model without this quantisation"
        case "frozen":
            return "correct the model: its forward pass writes to weights that are not trained"
        case _:  # a gradient of 0
            return " ".join(targets) or "correct the model: its outputs do not depend on the trained weights"


def _no_scores(batch: Batch, samples: Sequence[Sample]) -> Future[ScoredBatch]:
    raise AssertionError("a trial step computes no reward")
