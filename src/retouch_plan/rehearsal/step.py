"""Runs a recipe's step on the fake accelerator with a run's code: preflight, rollout, rendering, update, evaluation, checkpoint.

By default, the step is rehearsed twice with few blocks of the models, and the numbers of the whole models are extrapolated.
"""

import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from retouch.distributed.placement import plan_placement
from retouch.distributed.ranks import Ranks
from retouch.distributed.stepper import Stepper
from retouch.policies.autoregressive.decoding import CachedDecoding
from retouch.policies.autoregressive.policy import AutoregressivePolicy
from retouch.protocols import DenoisingModel
from retouch.recipe.recipe import Recipe
from retouch.run.build import Assembly, connect
from retouch.run.preflight import ROWS, preflight
from retouch.run.state import capture
from retouch.run.step import Phase, Run, collect, update
from retouch.types import Batch, Task
from retouch_plan.rehearsal.collectives import fake_ranks
from retouch_plan.rehearsal.counting.machines import Machine
from retouch_plan.rehearsal.counting.meter import Meter
from retouch_plan.rehearsal.counting.stages import Stage, Work
from retouch_plan.rehearsal.depth import Counts, choose_depths, extrapolated, extrapolated_work, stacks_of
from retouch_plan.rehearsal.fake.accelerator import Accelerator, register
from retouch_plan.rehearsal.fake.attention import fused_attention
from retouch_plan.rehearsal.fake.tensors import DEVICE, active
from retouch_plan.rehearsal.inputs import fake_devices, made_up_judge, made_up_sets, scores
from retouch_plan.rehearsal.labels import Labels
from retouch_plan.rehearsal.loading import fake_parameters, without_paths, without_weights
from retouch_plan.rehearsal.parallel import both, each_in_turn
from retouch_plan.rehearsal.repeats import FewTokens, Pace, Repeats
from retouch_plan.rehearsal.rewards import reward_weights
from retouch_plan.rehearsal.zero import fake_deepspeed


@dataclass(frozen=True, kw_only=True)
class RehearsedPhase:
    """A rehearsed phase. ``steps``: the number of its steps. ``rows``: the rows of a step on this rank. ``preflight``: the name of
    its preflight stage. ``stages``: the names of its other stages, in order."""

    name: str
    steps: int
    rows: int
    preflight: str
    stages: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """The result of a rehearsal.

    ``world``: the number of ranks. ``evaluations``: the number of evaluations in the whole run. ``checkpoint``: the bytes of the
    tensors of a checkpoint. ``host_peak``: the peak bytes of large tensors in host memory. ``units``: the work of one "denoising
    step" or one "token" of the rollout, by name. ``rewards``: bytes of the weights of reward models by device, which no stage
    contains.
    """

    stages: Mapping[str, Stage]
    world: int
    phases: tuple[RehearsedPhase, ...]
    evaluations: int
    checkpoint: int
    host_peak: int
    units: Mapping[str, Work]
    rewards: Mapping[int, Counter[str]] = field(default_factory=dict)


def rehearse(
    recipe: Recipe, machine: Machine, *, world: int | None = None, full_depth: bool = False, processes: int = 1
) -> Rehearsed:
    """Rehearse a recipe's step as rank 0 of ``world`` ranks. None: the recipe's number of ranks.

    ``full_depth``: run all blocks of the models once, instead of two rehearsals with few blocks. ``processes``: with 2 or more,
    these two rehearsals run at the same time, the second one in a process of its own. Raises the errors that the run would raise.
    """
    register()
    rewards = reward_weights(recipe)
    with tempfile.TemporaryDirectory() as folder:
        compiled = recipe.policy.compile is not None
        recipe = fake_devices(without_paths(recipe, Path(folder)))
        depths = None if full_depth else choose_depths(stacks_of(recipe))
        if depths is None:
            return replace(_rehearse(recipe, machine, world, {}, compiled=compiled), rewards=rewards)
        rehearsal = partial(_rehearse, recipe, machine, world, compiled=compiled)
        run = both if processes > 1 else each_in_turn
        first, second = run(rehearsal, depths.first, depths.second)
        times = depths.times
        return replace(
            first,
            stages=extrapolated(first.stages, second.stages, times),
            checkpoint=first.checkpoint + (second.checkpoint - first.checkpoint) * times,
            host_peak=first.host_peak + (second.host_peak - first.host_peak) * times,
            units={name: extrapolated_work(work, second.units[name], times) for name, work in first.units.items()},
            rewards=rewards,
        )


def _rehearse(recipe: Recipe, machine: Machine, world: int | None, blocks: Counts, *, compiled: bool) -> Rehearsed:
    register()  # a second process has no fake device yet
    meter = Meter(machine)
    repeats = Repeats(meter)
    labels = Labels(meter, repeats)
    count = world or recipe.ranks or 1
    ranks = Ranks(rank=0, world=count, device=torch.device(DEVICE, 0))
    with ExitStack() as stack:
        stack.enter_context(Accelerator(observe=meter.observe, on_read=meter.wait, is_weight=meter.is_weight))
        stack.enter_context(fused_attention())
        stack.enter_context(fake_ranks(count, meter))
        stack.enter_context(fake_deepspeed(meter))
        stack.enter_context(without_weights(ranks.device, blocks=blocks, on_module=labels.module))
        return _Rehearsal(recipe, meter, ranks, repeats, labels, compiled=compiled).run()


class _Rehearsal:
    def __init__(self, recipe: Recipe, meter: Meter, ranks: Ranks, repeats: Repeats, labels: Labels, *, compiled: bool) -> None:
        self.recipe = recipe
        self.compiled = compiled
        self.meter = meter
        self.ranks = ranks
        self.repeats = repeats
        self.labels = labels
        self.pace = Pace(meter)
        self.token: Work | None = None

    def run(self) -> Rehearsed:
        recipe, meter = self.recipe, self.meter
        with meter.stage("build"), fake_parameters(self.ranks.device), active().moving_weights():
            placement = plan_placement(recipe, self.ranks)
            parts = connect(recipe, self.ranks, placement=placement, judge=made_up_judge(), sets=made_up_sets(recipe))
            self.labels.weights(parts)
            if self.compiled:
                meter.compiled.watch(parts.model.module)
            stepper = parts.stepper()
            self.labels.master_weights(stepper)
            self._take_first_step(stepper)
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
            self._preflight(run, phase, name)
            before = list(meter.stages)
            self._step(run, phase, name)
            phases.append(
                RehearsedPhase(
                    name=resolved.name,
                    steps=len(steps),
                    rows=len(phase.batch(steps.start)),
                    preflight=f"{name}preflight",
                    stages=tuple(each for each in meter.stages if each not in before),
                )
            )
            del run, phase
        with meter.stage("evaluation"):
            policy = parts.policy(recipe.rollout)
            self._decode_few(policy)
            evaluator = parts.evaluator(scores)
            policy.sample = self.repeats.calls(policy.sample, len)  # type: ignore[method-assign]
            renderer = self.repeats.calls(evaluator.renderer, _rows)
            replace(evaluator, renderer=renderer)(policy)
        with meter.stage("checkpoint"), meter.labelled("checkpoint"):
            state = capture(parts, stepper, step=1)
            size = sum(each.numel() * each.element_size() for group in state.tensors.values() for each in group.values())
        every = recipe.eval.every
        total = sum(phase.steps for phase in phases)
        units = {"denoising step": self.pace.last, "token": self.token}
        return Rehearsed(
            stages=meter.stages,
            world=self.ranks.world,
            phases=tuple(phases),
            evaluations=1 + (math.ceil(total / every) if every else 1),  # always before the first step and after the last
            checkpoint=size,
            host_peak=meter.host_peak,
            units={name: work for name, work in units.items() if work is not None},
        )

    def _take_first_step(self, stepper: Stepper) -> None:
        """Take an optimizer step, so that AdamW's moments exist and every stage is measured with them, as in a resumed run."""
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
        self.labels.moments(stepper)

    def _count_repeats(self, parts: Assembly) -> None:
        """Run equal calls of a model without gradient only once, and count the rest. Tasks differ only in their text lengths."""
        models = {id(model): model for model in (_innermost(parts.model), _innermost(parts.image_model))}
        for model in models.values():
            for name in ("encode", "encode_negative"):
                if hasattr(model, name):
                    setattr(model, name, self.repeats.calls(getattr(model, name), _lengths, in_all_stages=True))
            if isinstance(model, DenoisingModel):
                self._count_velocities(model)

    def _count_velocities(self, model: Any) -> None:
        own = model.velocity
        repeated = self.repeats.calls(own, lambda module, x, sigma, conditioning: tuple(x.shape))

        def velocity(*args: Any, **kwargs: Any) -> Tensor:
            if self.meter.stage_name.endswith("rollout"):
                self.pace.tick()
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

    def _preflight(self, run: Run, phase: Phase, name: str) -> None:
        with self._few_parts(run.policy), self.meter.stage(f"{name}preflight"):
            preflight(run, phase, step=phase.steps.start, rows=min(ROWS, len(phase.batch(phase.steps.start))))

    def _step(self, run: Run, phase: Phase, name: str) -> None:
        meter = self.meter
        policy = run.policy
        rollout = policy.rollout

        def paced(batch: Batch) -> Any:
            try:
                return rollout(batch)
            finally:
                self.pace.stop()

        policy.rollout = self.repeats.calls(paced, len, lambda made: type(made).concat([made]))
        renderer = self.repeats.calls(run.renderer, _rows)
        run = replace(run, renderer=renderer, clock=lambda stage: meter.stage(f"{name}{stage}"))
        step = phase.steps.start
        with meter.stage(f"{name}advantages"):
            collected = collect(run, phase, step)
        with self._few_parts(policy):
            update(run, phase, step, collected)
        self.labels.moments(run.stepper)
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


def _innermost(model: Any) -> Any:
    """Return the model inside its wrappers."""
    while hasattr(model, "model"):
        model = model.model
    return model


def _lengths(tasks: Sequence[Task]) -> Any:
    return tuple((len(task.instruction), len(task.images), len(task.meta)) for task in tasks)


def _rows(tasks: Sequence[Task], trajectory: Any) -> int:
    return len(tasks)
