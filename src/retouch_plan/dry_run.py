"""A dry run: a recipe's step at full size on the fake accelerator, with the code of a run and without weights.

Preflight, rollout, rendering, update, evaluation and checkpoint run, with made-up tasks and a judge without a model. By default,
the step runs twice with few blocks of the models, and the numbers of the whole models are extrapolated.
"""

import logging
import math
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from PIL.Image import new as new_image
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from retouch.config.imports import spawning
from retouch.data.base import DataSets
from retouch.distributed.optimizer import JointStepper, ReplicatedStepper, Stepper
from retouch.distributed.ranks import Ranks, plan_placement
from retouch.models.base import MEGAPIXEL, PretrainedLanguageModel, TaskInputs, packaged_config, read_description
from retouch.models.offloading import SwappedBlocks
from retouch.models.parts import bits_hash
from retouch.models.pretrained import MODEL, find_weights
from retouch.policies.autoregressive import AutoregressivePolicy
from retouch.policies.decoding import CachedDecoding
from retouch.protocols import DenoisingModel
from retouch.recipe.keys import Devices
from retouch.recipe.recipe import Recipe, differentiated_rewards
from retouch.records.libraries import silence_libraries
from retouch.rewards.base import LoadedModel
from retouch.rewards.judging import ScoredBatch
from retouch.run.build import Assembly, connect, encode_prompts
from retouch.run.evaluation import build_evaluator
from retouch.run.preflight import ROWS, preflight
from retouch.run.step import Phase, Run, collect, update
from retouch.types import Batch, Codes, Column, Sample, Task
from retouch_plan import machines
from retouch_plan.accelerator import CPU, DEVICE, Accelerator, active, fused_attention, register
from retouch_plan.fake_ranks import fake_deepspeed, fake_ranks
from retouch_plan.machines import Machine
from retouch_plan.meter import PLAN, Meter, Stage, Work
from retouch_plan.models import (
    Counts,
    choose_depths,
    extrapolated,
    extrapolated_work,
    fake_parameters,
    stacks_of,
    stored_count,
    without_live,
    without_paths,
    without_weights,
)
from retouch_plan.repeats import FewTokens, Repeats

_log = logging.getLogger(__name__)
WORDS = 48
"""Number of words in an instruction."""
EDITS = 3
"""Number of instructions that a teacher follows one after the other."""
_STRUCTURE = 64
"""Largest number of tokens of a completion besides image codes and thought."""
_ACTIVATIONS = {"vae": "autoencoder", **dict.fromkeys(("text_encoder", "text_encoder_2", "text_encoder_3"), "text encoders")}

A = TypeVar("A")
R = TypeVar("R")


# Made-up inputs


def made_up_task(recipe: Recipe) -> Task:
    """Return a task with everything that the model and the objective need."""
    takes: TaskInputs | None = getattr(recipe.image_model, "takes", None)
    phases = recipe.resolved_phases()
    images = any(phase.data.contents().images is not False for phase in phases)
    count = 0 if takes is None else max(takes.images[0], min(1, takes.images[1]) * images)
    size: tuple[int, int] = recipe.image_size or getattr(recipe.image_model, "planned_size", None) or MEGAPIXEL
    image = new_image("RGB", size[::-1], (120, 90, 60))
    imitates = any(phase.imitates for phase in phases)
    compared = any(part.needs_target for path, section in differentiated_rewards(recipe) for *_, part in section.parts(path))
    words = " ".join(["word"] * WORDS)
    meta: dict[str, Any] = {"completion": words} if imitates else {}
    model = recipe.policy.model
    if recipe.data.contents().tokens and isinstance(model, PretrainedLanguageModel):
        described = model.describe(model.find_weights()[0])
        assert described is not None, "its configuration was written for the dry run"
        side = 2 ** (len(described["autoencoder"]["config"]["channel_multiplier"]) - 1)
        height, width = (edge // side for edge in model.planned_size)
        longest = max(getattr(phase.rollout, "longest", 0) for phase in phases)
        codes = [[0] * width] * height
        thought = " ".join(["word"] * (longest - height * (width + 1) - _STRUCTURE))
        meta |= {Codes.SOURCE: codes, Codes.TARGET: codes, Codes.THOUGHT: thought}
    # Its teacher is the one that calls the model most often.
    tags: dict[str, str] = {}
    for phase in phases:
        taught_by = phase.objective.taught_by
        cost = {name: (bool(each.model), bool(each.instructions), each.guidance_scale or 0) for name, each in taught_by.items()}
        if by := getattr(phase.objective, "by", None):
            tags[by] = max(cost, key=lambda name: cost[name]).removeprefix("teachers.")
        meta |= {each.instructions: [words] * EDITS for each in taught_by.values() if each.instructions}
    return Task(
        id="task-0",
        instruction=words,
        tags=tags,
        images=(image,) * count,
        mask=new_image("L", size[::-1], 255) if takes is not None and takes.mask else None,
        reference=image if recipe.policy.train.reads_reference else None,
        target=image if imitates or compared else None,
        text="word",
        meta=meta,
    )


class _Copies(Sequence[Task]):
    """A task many times, each time with another id."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __len__(self) -> int:
        return 100_000  # a fixed number, because the size of the data set is not known

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(len(self)))]
        return replace(self.task, id=f"task-{index % len(self)}")


def made_up_sets(recipe: Recipe) -> list[DataSets]:
    """Return made-up tasks for each phase."""
    tasks = _Copies(made_up_task(recipe))
    return [DataSets(train=tasks, heldout=tasks[: recipe.eval.tasks]) for _ in recipe.resolved_phases()]


def _encode_one(recipe: Recipe, plan: Any, sets: Sequence[DataSets], ranks: Ranks, model: DenoisingModel) -> None:
    """Encode one task in place of all: they differ only in their ids."""
    encode_prompts(recipe, [(plan[0][0], range(0))], [replace(sets[0], heldout=sets[0].heldout[:1])], ranks, model)


def made_up_judge() -> Any:
    """Return a judge without a model, with the members of ``RewardScorer`` that a run uses. Its scores differ between samples."""
    return SimpleNamespace(
        reward=SimpleNamespace(columns={"made up": Column(0.0, 1.0)}),
        combination=SimpleNamespace(low=0.0, high=1.0, columns=()),
        for_split=lambda *_: scores,
        close=lambda: None,
    )


def scores(batch: Batch, samples: Sequence[Sample]) -> "Future[ScoredBatch]":
    """Score samples immediately, like a judge: evenly spaced rewards from 0 to 1."""
    found: Future[ScoredBatch] = Future()
    found.set_result(ScoredBatch({}, torch.linspace(0, 1, len(samples)), 0))
    return found


# Reward models


def reward_weights(recipe: Recipe) -> dict[int, Counter[str]]:
    """Return the bytes of each reward model's weights, by the index of the accelerator that they are on.

    A dry run does not run the reward models of the training process, so it counts no activations of them. Models in CPU memory and
    models whose configuration is not known are not counted.
    """
    devices = recipe.devices or Devices()
    default = devices.reward or devices.policy or recipe.device
    found: dict[int, Counter[str]] = {}
    for model in _reward_models(recipe):
        device, described = model.device or default, _described(model.path)
        if device != "cpu" and described is not None:
            size = int(stored_count(described) * getattr(torch, model.dtype).itemsize * model.stored)
            found.setdefault(int(device.partition(":")[2] or 0), Counter())[f"weights: reward {model.path}"] = size
    return found


def uncounted_rewards(recipe: Recipe) -> list[str]:
    """Return the paths of the reward models whose configuration is not known."""
    return [model.path for model in _reward_models(recipe) if _described(model.path) is None]


def _reward_models(recipe: Recipe) -> list[LoadedModel]:
    return list(dict.fromkeys(model for _, _, part in recipe.reward.parts() for model in part.loaded_models()))


def _described(path: str) -> dict[str, Any] | None:
    try:
        folder = find_weights(path, MODEL) if "/" in path else None
        if folder is None:
            described = packaged_config("judges", path) or packaged_config("writers", path)
        else:
            described = read_description(folder)
        if described is not None:
            stored_count(described)
    except ValueError:
        return None
    return described


# The dry run


def each_in_turn(function: Callable[[A], R], first: A, second: A) -> tuple[R, R]:
    """``function`` of both arguments, one after the other."""
    return function(first), function(second)


def both(function: Callable[[A], R], first: A, second: A) -> tuple[R, R]:
    """``function`` of both arguments at the same time. ``function`` and its results must be picklable. An error of the first
    argument is raised. If the second process fails, its work is repeated in this process, so that an error has its traceback."""
    # A forked process would inherit locks that threads of torch hold.
    with spawning() as context, ProcessPoolExecutor(max_workers=1, mp_context=context, initializer=quiet) as pool:
        waiting = pool.submit(function, second)
        result = function(first)
        error = waiting.exception()
    if error is None:
        return result, waiting.result()
    _log.warning("the second process failed (%s); its work is repeated in this process", error)
    return result, function(second)


def in_own_process(function: Callable[..., R], recipe: Recipe, *args: Any) -> R:
    """``function(recipe, *args)`` in a process of its own: a dry run adds a fake device, and autograd knows only the devices that
    existed at the first backward pass of a process. A loaded pipeline is replaced by a folder with its configurations."""
    main = vars(sys.modules["__main__"])
    # Without these two, the new process does not run the user's script again, which may have no guard against that.
    hidden: dict[str, Any] = {name: main.pop(name) for name in ("__file__", "__spec__") if name in main}
    try:
        with tempfile.TemporaryDirectory() as folder, spawning() as context:
            described = without_live(recipe, Path(folder))
            main["__spec__"] = None
            with ProcessPoolExecutor(1, mp_context=context, initializer=quiet) as pool:
                return pool.submit(function, described, *args).result()
    finally:
        main.update(hidden)


def quiet() -> None:
    """Turn off the messages of the libraries during a dry run."""
    silence_libraries()
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)


@dataclass(frozen=True, kw_only=True)
class DryPhase:
    """A phase of a dry run. ``steps``: the number of its steps in the run. ``rows``: the rows of a step on this rank. ``stages``:
    the names of its stages without the preflight, in order."""

    name: str
    steps: int
    rows: int
    stages: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The result of a dry run.

    ``world``: the number of ranks. ``evaluations``: the number of evaluations in the whole run. ``checkpoint``: the bytes of the
    tensors of a checkpoint. ``host_peak``: the peak bytes of large tensors in host memory. ``units``: the work of one "denoising
    step" or one "token" of the rollout, by name. ``rewards``: bytes of the weights of reward models by device, which no stage
    contains.
    """

    stages: Mapping[str, Stage]
    world: int
    phases: tuple[DryPhase, ...]
    evaluations: int
    checkpoint: int
    host_peak: int
    units: Mapping[str, Work]
    rewards: Mapping[int, Counter[str]] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """The largest peak of all stages and devices, in bytes, without reward models."""
        return max((stage.peak for stage in self.stages.values()), default=0)


def dry_run(recipe: Recipe, machine: Machine, *, world: int | None = None, full_depth: bool = False, processes: int = 1) -> DryRun:
    """Run a recipe's step without data, as rank 0 of ``world`` ranks. None: the recipe's number of ranks.

    ``full_depth``: run all blocks of the models once, instead of two dry runs with few blocks. ``processes``: with 2 or more, these
    two run at the same time, the second one in a process of its own. Raises the errors that the run would raise.
    """
    register()
    rewards = reward_weights(recipe)
    with tempfile.TemporaryDirectory() as folder:
        compiled = recipe.policy.compile is not None
        recipe = without_paths(recipe, Path(folder))
        if recipe.devices is not None:  # fake devices of the same indices
            names = {part: name.replace("cuda", DEVICE) for part, name in recipe.devices.named.items()}
            recipe = recipe.model_copy(update={"devices": recipe.devices.model_copy(update=names)})
        swap_blocks = 0 if recipe.devices is None else recipe.devices.swap_blocks
        depths = None if full_depth else choose_depths(stacks_of(recipe), swap_blocks=swap_blocks)
        if depths is None:
            return replace(_run(recipe, machine, world, compiled, ({}, swap_blocks)), rewards=rewards)
        in_parts = partial(_run, recipe, machine, world, compiled)
        counts = zip((depths.first, depths.second), depths.swapped, strict=True)
        first, second = (both if processes > 1 else each_in_turn)(in_parts, *counts)
        times = depths.times
        return replace(
            first,
            stages=extrapolated(first.stages, second.stages, times),
            checkpoint=first.checkpoint + (second.checkpoint - first.checkpoint) * times,
            host_peak=first.host_peak + (second.host_peak - first.host_peak) * times,
            units={name: extrapolated_work(work, second.units[name], times) for name, work in first.units.items()},
            rewards=rewards,
        )


def _run(recipe: Recipe, machine: Machine, world: int | None, compiled: bool, depth: tuple[Counts, int]) -> DryRun:
    register()  # a second process has no fake device yet
    blocks, swap_blocks = depth
    if recipe.devices is not None:
        recipe = recipe.model_copy(update={"devices": recipe.devices.model_copy(update={"swap_blocks": swap_blocks})})
    count = world or recipe.ranks or 1
    ranks = Ranks(rank=0, world=count, device=torch.device(DEVICE, 0))
    step = _Step(recipe, Meter(machine), ranks)
    meter = step.meter
    with ExitStack() as stack:
        stack.enter_context(Accelerator(observe=meter.observe, on_read=meter.wait, is_weight=meter.is_weight))
        stack.enter_context(fused_attention())
        stack.enter_context(fake_ranks(count, meter))
        stack.enter_context(fake_deepspeed(meter))
        stack.enter_context(patch.object(SwappedBlocks, "fetch", meter.on_other_stream(SwappedBlocks.fetch)))
        stack.enter_context(patch.object(SwappedBlocks, "wait", lambda blocks: meter.wait_for_other_stream()))
        # The device never holds weights that are quantised while they are moved to it, or blocks that wait.
        loads = ranks.device if recipe.policy.base is None and not swap_blocks else CPU
        stack.enter_context(without_weights(loads, blocks=blocks, on_module=step.label_module))
        return step.run(compiled=compiled)


class _Step:
    """A step of a recipe. Labels its tensors for ``meter``: weights by part, gradients, copies, master weights, moments, and
    activations of frozen parts."""

    def __init__(self, recipe: Recipe, meter: Meter, ranks: Ranks) -> None:
        self.recipe = recipe
        self.meter = meter
        self.ranks = ranks
        self.repeats = Repeats(meter)
        self.denoising: Work | None = None
        """The work of the last denoising step: between two calls of the model in a rollout."""
        self.token: Work | None = None
        self._at_call: Work | None = None
        self._labelled: set[nn.Module] = set()

    def run(self, *, compiled: bool) -> DryRun:
        recipe, meter = self.recipe, self.meter
        # Offloaded weights are never read, so their copies on the host have no data.
        first_prompt = patch("retouch.run.build.encode_prompts", _encode_one)
        with first_prompt, meter.stage("build"), fake_parameters(self.ranks.device), patch.object(active(), "large_on_host", 2**20):
            placement = plan_placement(recipe, self.ranks)
            parts = connect(recipe, self.ranks, placement=placement, judge=made_up_judge(), sets=made_up_sets(recipe))
            self._label_weights(parts)
            if compiled:
                meter.compiled.watch(parts.model.module)
            stepper = parts.stepper()
            self._take_first_step(stepper)
            if parts.painted is not None and isinstance(stepper, JointStepper):
                self._take_first_step(stepper.second)
        meter.label = "activations"
        self._count_repeats(parts)
        phases = []
        for index, (resolved, steps) in enumerate(parts.plan):
            if not steps:
                continue
            parts.begin(index)
            run, phase = parts.phase(index, stepper=stepper, judge=scores)
            self._decode_few(run.policy)
            name = f"{resolved.name}: " if recipe.phases is not None else ""
            rows = len(phase.batch(steps.start))
            hashed = self.repeats.calls(bits_hash, lambda tensor: (type(tensor), tensor.shape, tensor.dtype, tensor.device))
            once = patch("retouch.run.preflight.bits_hash", hashed)
            tried = [(run, phase)] if run.painting is None else [(run, phase), (run.painting.run, run.painting.phase)]
            for each, own in tried:
                with self._few_parts(each.policy), once, meter.stage(f"{name}preflight"):
                    preflight(each, own, step=steps.start, rows=min(ROWS, rows))
            before = list(meter.stages)
            self._step(run, phase, name)
            stages = tuple(each for each in meter.stages if each not in before)
            phases.append(DryPhase(name=resolved.name, steps=len(steps), rows=rows, stages=stages))
            del run, phase
        with meter.stage("evaluation"):
            policy = parts.policy(recipe.rollout)
            self._decode_few(policy)
            evaluator = build_evaluator(parts, scores)
            policy.sample = self.repeats.calls(policy.sample, len)  # type: ignore[method-assign]
            renderer = self.repeats.calls(evaluator.renderer, _rows)
            replace(evaluator, renderer=renderer)(policy)
        with meter.stage("checkpoint"), patch.object(meter, "label", "checkpoint"):
            state = parts.capture(stepper, step=1)
            size = sum(each.numel() * each.element_size() for group in state.tensors.values() for each in group.values())
        every = recipe.eval.every
        total = sum(phase.steps for phase in phases)
        units = {"denoising step": self.denoising, "token": self.token}
        return DryRun(
            stages=meter.stages,
            world=self.ranks.world,
            phases=tuple(phases),
            evaluations=1 + (math.ceil(total / every) if every else 1),  # always before the first step and after the last
            checkpoint=size,
            host_peak=meter.host_peak,
            units={name: work for name, work in units.items() if work is not None},
        )

    # Labels

    def label_module(self, name: str, module: nn.Module) -> None:
        """Label the weights and activations of a part of a model, when it is loaded and again when its weights were moved."""
        self.meter.relabel(list(module.parameters()), f"weights: {name}")
        label = _ACTIVATIONS.get(name)
        if label is not None and module not in self._labelled:
            self._labelled.add(module)
            self.meter.label_module(module, f"activations: {label}")
            if label == "text encoders":
                self.repeats.layers(module)

    def _label_weights(self, parts: Assembly) -> None:
        """Label trained weights, their copies and their gradients, and the weights of a denoising model."""
        if isinstance(parts.model, DenoisingModel):  # its weights may have been moved after loading
            self.meter.relabel(list(parts.model.module.parameters()), "weights: transformer")
        for model in parts.copies.models.values():
            self.meter.relabel(list(model.module.parameters()), "weights: teacher")
        for copies in filter(None, (parts.copies, parts.painted)):
            trained = list(copies.parameters.values())
            self.meter.relabel(trained, "trained weights")
            for copy in copies.copies.values():
                self.meter.relabel(list(copy.values()), "copies of the trained weights")
            for parameter in trained:
                parameter.register_post_accumulate_grad_hook(lambda each: self.meter.relabel([each.grad], "gradients"))

    def _label_moments(self, stepper: Any) -> None:
        engine = getattr(stepper, "engine", stepper)
        optimizer = getattr(getattr(engine, "optimizer", None), "optimizer", getattr(engine, "optimizer", None))
        if optimizer is not None:
            for state in optimizer.state.values():
                self.meter.relabel([each for each in state.values() if isinstance(each, Tensor)], "AdamW's moments")

    def _take_first_step(self, stepper: Stepper) -> None:
        """Take an optimizer step, so that AdamW's moments exist and every stage is measured with them, as in a resumed run. Before
        it, label fp32 master weights of weights in 16 bits, and their gradients, which the stepper adds up without a hook."""
        own = stepper.policy if isinstance(stepper, JointStepper) else stepper
        if isinstance(own, ReplicatedStepper):
            masters = [weight for name, weight in own.weights.items() if weight is not own.parameters[name]]
            self.meter.relabel(masters, "master weights")
            backward = own.backward

            def labelled(loss: Tensor) -> None:
                backward(loss)
                self.meter.relabel([weight.grad for weight in masters], "gradients")

            own.backward = labelled  # type: ignore[method-assign]
        trained = [each for each in stepper.module.parameters() if each.requires_grad]
        waiting = [each for each in trained if each.device != self.ranks.device]
        # Use shards as plain tensors: in a sum with sharded tensors, a replicated weight would get a sharded gradient.
        shards = [each.to_local() if isinstance(each, DTensor) else each for each in trained if each.device == self.ranks.device]
        with self.meter.paused():
            for each in waiting:  # in CPU memory, where FSDP2 sets the gradient
                each.grad = torch.zeros_like(each)
            start = torch.zeros((), device=self.ranks.device, requires_grad=True)
            stepper.backward(sum((each.float().flatten()[:1].sum() for each in shards), start))
            stepper.step(1e-6)
        self._label_moments(stepper)

    # Repeated work

    def _count_repeats(self, parts: Assembly) -> None:
        """Run equal calls of a model without gradient only once, and count the rest. Tasks differ only in their text lengths."""
        models: dict[int, Any] = {}
        for model in (parts.model, parts.image_model):
            while hasattr(model, "model"):  # inside its wrappers
                model = model.model
            models[id(model)] = model
        for model in models.values():
            for name in ("encode", "encode_negative"):
                if hasattr(model, name):
                    encode = self.repeats.calls(
                        getattr(model, name),
                        lambda tasks: tuple((len(task.instruction), len(task.images), len(task.meta)) for task in tasks),
                        in_all_stages=True,
                    )
                    setattr(model, name, encode)
            if isinstance(model, DenoisingModel):
                self._count_velocities(model)

    def _count_velocities(self, model: Any) -> None:
        own = model.velocity
        repeated = self.repeats.calls(own, lambda module, x, sigma, conditioning: (id(module), tuple(x.shape)))

        def velocity(*args: Any, **kwargs: Any) -> Tensor:
            if self.meter.stage_name.endswith("rollout"):
                now = self.meter.work.copy()
                if self._at_call is not None:
                    self.denoising = now.since(self._at_call)
                self._at_call = now
            made: Tensor = (own if torch.is_grad_enabled() else repeated)(*args, **kwargs)
            return made

        model.velocity = velocity

    def _decode_few(self, policy: Any) -> None:
        """Let a policy that samples tokens decode only a few, and allow any mismatch, because its log-probabilities are made up."""
        for name in ("decoder", "engine"):
            own = getattr(policy, name, None)
            if isinstance(own, CachedDecoding):
                setattr(policy, name, FewTokens(own, self.meter))
        if isinstance(policy, AutoregressivePolicy):
            policy.limits = policy.limits.model_copy(update={"max_mismatch": math.inf})

    def _step(self, run: Run, phase: Phase, name: str) -> None:
        meter = self.meter
        policy = run.policy
        rollout = policy.rollout

        def paced(batch: Batch) -> Any:
            try:
                return rollout(batch)
            finally:
                self._at_call = None

        policy.rollout = self.repeats.calls(paced, len, lambda made: type(made).concat([made]))
        renderer, painting = self.repeats.calls(run.renderer, _rows), run.painting

        def clock(stage: str) -> Any:
            return meter.stage(f"{name}{stage}")

        if painting is not None:
            drawing = painting.run.policy
            drawing.rollout = self.repeats.calls(drawing.rollout, len, lambda made: type(made).concat([made]))
            decode = self.repeats.calls(painting.decode, _rows)
            painting = replace(painting, run=replace(painting.run, clock=clock), decode=decode)
        run = replace(run, renderer=renderer, painting=painting, clock=clock)
        step = phase.steps.start
        with meter.stage(f"{name}advantages"):
            collected = collect(run, phase, step)
        with self._few_parts(policy):
            update(run, phase, step, collected)
        if painting is not None:
            assert collected.painted is not None
            with self._few_parts(drawing):
                painting.train(step, collected.painted)
            del drawing.rollout
        self._label_moments(run.stepper)
        self.token = getattr(getattr(policy, "engine", None), "token", None)
        del policy.rollout

    @contextmanager
    def _few_parts(self, policy: Any) -> Iterator[None]:
        few = {name: self.repeats.parts(getattr(policy, name)) for name in ("microbatches", "row_slices") if hasattr(policy, name)}
        rollout = policy.rollout

        def whole(batch: Batch) -> Any:
            """Run all parts in a rollout, because it concatenates the results of its evaluations."""
            for name in few:
                delattr(policy, name)
            try:
                return rollout(batch)
            finally:
                vars(policy).update(few)

        with patch.object(policy, "rollout", whole):
            vars(policy).update(few)
            try:
                yield
            finally:
                for name in few:
                    delattr(policy, name)


def _rows(tasks: Sequence[Task], trajectory: Any) -> int:
    return len(tasks)


# What a dry run found

_HOLDERS = 8
_SHOWN = 5 * 10**6
"""Fewer bytes would be shown as 0.00 GB."""
ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
"""The errors that a step may raise because of wrong shapes, devices or dtypes."""


def fits(found: DryRun, machine: Machine) -> bool:
    """Return whether the step and the reward models leave enough of the machine's memory free."""
    return machines.fits(largest(found)[2], machine.memory)


def largest(found: DryRun, place: int | None = None) -> tuple[str, int, int]:
    """Return the stage and the device with the most bytes, with the weights of reward models, and these bytes. ``place``: look only
    at this device."""
    rewards = {each: weights.total() for each, weights in found.rewards.items()}
    held = [("rewards", each, size) for each, size in rewards.items()]
    for name, stage in found.stages.items():
        held += [(name, each, size + rewards.get(each, 0)) for each, (size, _) in stage.peaks.items()]
    return max((each for each in held if place in (None, each[1])), key=lambda each: each[2], default=("step", 0, 0))


def holders(found: DryRun, name: str, place: int) -> list[tuple[str, int]]:
    """Return what holds the most bytes on a device at the peak of a stage, the largest first, and the sum of the others. Holders
    with less than 0.005 GB are counted as others."""
    held = found.rewards.get(place, Counter()).copy()
    if name in found.stages:
        held.update(found.stages[name].peaks.get(place, (0, Counter()))[1])
    named = [each for each in held.most_common(_HOLDERS) if each[0] != "other" and each[1] >= _SHOWN]
    rest = held.total() - sum(size for _, size in named)
    return [*named, *([("other", rest)] if rest >= _SHOWN else [])]


def seconds(work: Work, machine: Machine) -> float:
    """Return the modelled seconds: the sum over the device's kernels, or the time of the host to launch them if that is longer."""
    return max(work.seconds.total(), host_seconds(work, machine))


def host_seconds(work: Work, machine: Machine) -> float:
    """Return the modelled seconds of the host: one launch for each kernel that is not part of a CUDA graph, and Python.

    On an H100 whose host launched a bare kernel in 10.5 µs, a writer with 7 B parameters took 37.7 ms per token with 1691 kernels,
    and 44.2 ms with 1836: 2.1 and 2.3 launches per kernel.
    """
    return 2.2 * (work.counts["kernels"] - work.counts["captured"]) * machine.launch


def step_work(found: DryRun, index: int) -> Work:
    """Return the work of one step of a phase, without preflight, evaluation and checkpoints."""
    total = Work()
    for name in found.phases[index].stages:
        total.add(found.stages[name].work)
    return total


def hours(found: DryRun, machine: Machine) -> float:
    """Return the modelled hours of the whole run, with evaluations, without rewards."""
    stages = found.stages
    steps = sum(phase.steps * sum(seconds(stages[name].work, machine) for name in phase.stages) for phase in found.phases)
    evaluation = seconds(stages["evaluation"].work, machine) if "evaluation" in stages else 0.0
    return (steps + found.evaluations * evaluation) / 3600


def error_line(error: BaseException) -> str:
    """Return the message of a dry run's error, and its location: the innermost line of Retouch or of the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    placed = [frame for frame in frames if frame.filename[0] == "/" and "/site-packages/" not in frame.filename]
    frame = ([frame for frame in placed if not frame.filename.startswith(PLAN)] or frames)[-1]
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}\n  at {frame.filename}:{frame.lineno}, in {frame.name}"
