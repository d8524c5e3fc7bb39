"""The checks of a recipe that load no model: batch sizes, sharding, trackers, run folder, data, disk space and engines."""

import os
import shutil
from collections.abc import Iterator, Sequence
from math import gcd
from pathlib import Path
from typing import Any

from retouch.data.base import DataSets, DataSource
from retouch.data.sampler import UnindexedTasks, examples
from retouch.distributed.placement import check_sharding
from retouch.inference.publishing import why_not_pushable
from retouch.models.train import FullWeights
from retouch.policies.autoregressive.rollout import TokenRollout
from retouch.policies.denoising.rollout import DenoisingRollout
from retouch.policies.engine import Diagnosis
from retouch.recipe.checks import check_ranks, rank_count_warning
from retouch.recipe.derived_facts import differences
from retouch.recipe.policy import AutoregressivePolicyKeys, DenoisingPolicyKeys
from retouch.recipe.recipe import Recipe, parse
from retouch.records.folder import RunFolder
from retouch.records.libraries import require_trackers
from retouch.records.summary import split_label
from retouch.run import checkpoint
from retouch.run.build import build_sets
from retouch.run.evaluation import headline_tasks
from retouch_plan.doctor.findings import Finding, failed, gigabytes, note, ok

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
    if (warning := rank_count_warning(recipe, world)) is not None:
        yield note("batch", warning)
    yield from (note("batch", text) for text in dict.fromkeys(_forward_shapes(recipe, world)))


def _forward_shapes(recipe: Recipe, world: int) -> Iterator[str]:
    """Describe what makes forward passes of rollout and update equal, or unequal, in phases whose ratios need equal ones.

    In 16 bits, a forward pass with other rows rounds differently. Denoising policies repeat rows (``rollout.equal_shapes``).
    Policies that generate tokens need chunks, and minibatches of a rank, of whole microbatches.
    """
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


def check_data(recipe: Recipe) -> Iterator[tuple[Finding, DataSets | None]]:
    """Read each data set of the recipe as in training; the data sets are None if this failed."""
    size = recipe.image_size
    yield from (_read_data(recipe, data, size) for data in _data_of(recipe))


def _data_of(recipe: Recipe) -> list[DataSource]:
    """The different data of all phases, in the order of the phases."""
    found: list[DataSource] = []
    for phase in recipe.resolved_phases():
        if phase.data not in found:
            found.append(phase.data)
    return found


def _read_data(recipe: Recipe, data: DataSource, size: tuple[int, int] | None) -> tuple[Finding, DataSets | None]:
    missing = [path for path in data.paths() if not Path(path).exists()]
    path = next(iter(missing or data.paths()), "the playground" if data.label.startswith("playground") else data.label)
    if data.on_hub and missing:
        try:
            data.refuse_test_sets()
        except ValueError as error:
            return failed(
                "data", str(error), fix="choose another data set, or set data.allow_test_sets to train on a benchmark"
            ), None
        return note("data", f"{path} is not a local folder: it will be read from the Hugging Face Hub when training starts"), None
    try:
        sets = build_sets(recipe, data, size=size)
    except ValueError as error:
        place = f"FILE{Path(path).suffix}" if Path(path).suffix else "DIR"
        other_path = "--set data.lists=[DIR, ...]" if "lists" in data.path_keys else f"--set data.path={place}"
        return failed("data", str(error), fix=other_path if missing else f"retouch data check {path}"), None
    return _data_finding(recipe, path, sets), sets


def _data_finding(recipe: Recipe, path: str, sets: DataSets) -> Finding:
    heldout = "held out" if split_label(recipe.eval.split) == "held-out" else "of them also for evaluation, none held out"
    train = "a stream of" if isinstance(sets.train, UnindexedTasks) else len(sets.train)
    text = f"{path}: {train} tasks for training, {len(sets.heldout)} {heldout}"
    if recipe.eval.headline:
        try:
            headline_tasks([sets.heldout[index] for index in range(len(sets.heldout))], recipe.eval.headline)
        except ValueError as error:
            return failed("data", str(error), fix="--set eval.headline=null")
    if not sets.problems:
        return ok("data", text)
    lines = [f"{text}; problems in the data:", *(f"  {problem}" for problem in sets.problems[:_LISTED_PROBLEMS])]
    if len(sets.problems) > _LISTED_PROBLEMS:
        lines.append(f"  and {len(sets.problems) - _LISTED_PROBLEMS} more: retouch data check {path}")
    return note("data", "\n".join(lines))


def phase_steps(recipe: Recipe, read: Sequence[DataSets | None]) -> list[int] | None:
    """The steps of each phase; None if a phase is as long as some passes over data that could not be read.

    ``read``: the data sets that ``check_data`` returned, in the same order.
    """
    steps, pairs = [], list(zip(_data_of(recipe), read, strict=True))
    for phase in recipe.resolved_phases():
        sets = next(sets for data, sets in pairs if data == phase.data)
        if phase.steps is None and sets is None:
            return None
        steps.append(phase.total_steps(0 if sets is None else len(examples(sets.train))))
    return steps


def check_disk(recipe: Recipe, bytes_each: int, *, steps: Sequence[int] | None) -> Finding:
    """Check whether the disk has room for the checkpoints that are kept, and for one more while it is written.

    ``bytes_each``: size of a checkpoint. ``steps``: the result of ``phase_steps``.
    """
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
    from retouch.models.offloading.store import FOLDER_VARIABLE, LIMIT_VARIABLE, EmbeddingStore

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
    policy, rollouts = recipe.policy, [phase.rollout for phase in recipe.resolved_phases()]
    full_weights = isinstance(policy.train, FullWeights)
    found: dict[Any, Iterator[Diagnosis]] = {}
    for rollout in rollouts:
        if rollout.engine is None or rollout.engine in found:
            continue
        if isinstance(policy, AutoregressivePolicyKeys):
            assert isinstance(rollout, TokenRollout), "the recipe's checks ensure it"
            found[rollout.engine] = rollout.engine.diagnose(
                rollout,
                base_model=policy.model.base_model,
                full_weights=full_weights,
                image_grammar=policy.model.image_grammar,
            )
        else:
            assert isinstance(rollout, DenoisingRollout), "the recipe's checks ensure it"
            base = getattr(policy.model, "path", None)
            found[rollout.engine] = rollout.engine.diagnose(base_model=base, full_weights=full_weights)
    for diagnosis in found.values():
        yield from (Finding(status, "engine", text, fix) for status, text, fix in diagnosis)
