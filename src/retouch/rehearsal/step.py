"""A recipe's step on the fake accelerator: preflight, rollout, rendering, update, evaluation and checkpoint, by the run's own code.

A call that repeats an earlier one with inputs of the same shapes (a denoising step, a chunk) is counted without being run again; of
the microbatches, two run.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from retouch.assembly.assembly import Assembly, connect
from retouch.assembly.state import capture
from retouch.distributed.head_stepper import HeadStepper
from retouch.distributed.ranks import Ranks
from retouch.distributed.stepper import ReplicatedStepper, Stepper
from retouch.memory.ip_adapter import vision_part
from retouch.memory.sizes import image_encoder
from retouch.models.base import DiffusersModel
from retouch.models.common.pretrained import find_encoder
from retouch.models.language import PretrainedLanguageModel
from retouch.protocols import DenoisingModel
from retouch.recipe.recipe import Recipe
from retouch.rehearsal.accelerator import Accelerator, register
from retouch.rehearsal.attention import fused_attention
from retouch.rehearsal.collectives import fake_ranks
from retouch.rehearsal.inputs import fake_placement, made_up_judge, made_up_sets, scores
from retouch.rehearsal.loading import fake_parameters, without_weights, write_folder, write_single
from retouch.rehearsal.machines import Machine
from retouch.rehearsal.meter import Meter, Rise, Work
from retouch.rehearsal.tensors import DEVICE, active
from retouch.rehearsal.zero import fake_deepspeed
from retouch.training.loop import Phase, Run, collect, update
from retouch.training.preflight import ROWS, preflight

PARTS = 2
"""Microbatches that really run: the second one with the gradients of the first."""
_LABELS = {"vae": "autoencoder", **dict.fromkeys(("text_encoder", "text_encoder_2", "text_encoder_3"), "text encoders")}


@dataclass
class Repeats:
    """Counts calls that repeat earlier ones without running them."""

    meter: Meter
    met: set[str] = field(default_factory=set)

    def calls(self, call: Callable[..., Any], key: Callable[..., Any], again: Callable[[Any], Any]) -> Callable[..., Any]:
        """``call``, run once in each stage for each ``key`` of its arguments, then answered by ``again(result)``."""
        seen: dict[Any, tuple[Work, Rise, Callable[[], Any]]] = {}

        def once(*args: Any, **kwargs: Any) -> Any:
            place = self.meter.stage_name, key(*args, **kwargs)
            if place in seen:
                work, rise, result = seen[place]
                self.meter.repeat(work, rise)
                with self.meter.paused():
                    return again(result())
            before = self.meter.work.copy()
            with self.meter.rise() as rise:
                made = call(*args, **kwargs)
            seen[place] = self.meter.work.since(before), rise, _remembered(made)
            return made

        return once

    def parts(self, call: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """The first ``PARTS`` parts that ``call`` yields; the work between two of them counts for each that is left out."""

        def few(*args: Any, **kwargs: Any) -> Iterator[Any]:
            every = list(call(*args, **kwargs))
            count = PARTS if self.meter.stage_name not in self.met else 1
            self.met.add(self.meter.stage_name)
            for part in islice(every, count):
                before = self.meter.work.copy()
                yield part
                last = self.meter.work.since(before)
            if len(every) > count:
                self.meter.work.add(last, len(every) - count)

        return few


def _remembered(made: Any) -> Callable[[], Any]:
    """The result, or for a tensor its shape alone, so that remembering it takes no memory."""
    if isinstance(made, Tensor):
        shape, dtype, device = made.shape, made.dtype, made.device
        return lambda: torch.empty(shape, dtype=dtype, device=device)
    return lambda: made


@dataclass(frozen=True, kw_only=True)
class RehearsedPhase:
    """``steps``: of the run. ``rows``: of a step on this rank. ``stages``: their names, in order, without the preflight."""

    name: str
    steps: int
    rows: int
    preflight: str
    stages: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """``world``: number of ranks. ``evaluations``: of the whole run. ``checkpoint``: bytes of its tensors. ``velocities``: calls of
    a denoiser in rollouts."""

    meter: Meter
    world: int
    phases: tuple[RehearsedPhase, ...]
    evaluations: int
    checkpoint: int
    velocities: int


def rehearse(recipe: Recipe, machine: Machine, *, world: int | None = None) -> Rehearsed:
    """Rehearse a recipe's step as rank 0 of ``world`` ranks, by default as many as the recipe names.

    Raises what the run would raise.
    """
    register()
    meter = Meter(machine)
    count = world or recipe.ranks or 1
    ranks = Ranks(rank=0, world=count, device=torch.device(DEVICE, 0))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(Accelerator(observe=meter.observe, on_read=meter.wait))
        stack.enter_context(fused_attention())
        stack.enter_context(fake_ranks(count, meter))
        stack.enter_context(fake_deepspeed())
        stack.enter_context(without_weights(ranks.device, on_module=lambda name, module: _labelled(meter, name, module)))
        recipe = without_paths(recipe, folder)
        rehearsal = _Rehearsal(recipe, meter, ranks)
        return rehearsal.run()


def _labelled(meter: Meter, name: str, module: nn.Module) -> None:
    label = _LABELS.get(name)
    meter.relabel(list(module.parameters()), f"weights: {name}")
    if label is not None:
        meter.label_module(module, f"activations: {label}")


def without_paths(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with folders of configurations in place of weights that are not on this machine.

    Raises ValueError if no configuration is known.
    """
    train, encoder = recipe.policy.train, getattr(recipe.policy.train, "encoder", None)
    if encoder is not None and find_encoder(encoder) is None:
        described = image_encoder(encoder)
        if described is None:
            raise ValueError(f"policy.train.encoder: the configuration of {encoder} is not known; download its configuration files")
        target = write_single(folder / "encoder" / Path(encoder).name, vision_part(described))
        train = train.model_copy(update={"encoder": str(target), "init_from": None})
    elif hasattr(train, "init_from"):
        train = train.model_copy(update={"init_from": None})
    model = _described(recipe.policy.model, folder, "policy.model")
    changed: dict[str, Any] = {"policy": recipe.policy.model_copy(update={"model": model, "train": train})}
    if recipe.renderer is not None and recipe.renderer.image_model is not None:
        behind = _described(recipe.renderer.image_model, folder, "renderer.model")
        changed["renderer"] = recipe.renderer.model_copy(update={"model": behind})
    return recipe.model_copy(update=changed)


def _described(model: Any, folder: Path, key: str) -> Any:
    if not isinstance(model, DiffusersModel | PretrainedLanguageModel) or model.find_weights()[0] is not None:
        return model
    described = model.published() if isinstance(model, DiffusersModel) else model.describe(None)
    if described is None:
        raise ValueError(f"{key}.path: the configuration of {model.source} is not known; download its configuration files")
    target = folder / key / Path(model.path).name
    if isinstance(model, DiffusersModel):
        write_folder(target, described)
    else:
        write_single(target, described["writer"])
    return model.model_copy(update={"path": str(target)})


class _Rehearsal:
    def __init__(self, recipe: Recipe, meter: Meter, ranks: Ranks) -> None:
        self.recipe = recipe
        self.meter = meter
        self.ranks = ranks
        self.repeats = Repeats(meter)
        self.velocities = 0

    def run(self) -> Rehearsed:
        recipe, meter = self.recipe, self.meter
        with meter.stage("build"), fake_parameters(self.ranks.device), active().moving_weights():
            parts = connect(
                recipe, self.ranks, placement=fake_placement(recipe, self.ranks), judge=made_up_judge(), sets=made_up_sets(recipe)
            )
            self._label_weights(parts)
            stepper = parts.stepper()
            self._label_master_weights(stepper)
            self._take_first_step(stepper)
        meter.label = "activations"
        self._count_velocities(parts)
        phases = []
        for index, (resolved, steps) in enumerate(parts.plan):
            if not steps:
                continue
            parts.begin(index)
            run, phase = parts.phase(index, stepper=stepper, judge=scores)
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
            evaluator = parts.evaluator(scores)
            policy.sample = self.repeats.calls(policy.sample, lambda batch: len(batch), _same)  # type: ignore[method-assign]
            renderer = self.repeats.calls(evaluator.renderer, lambda tasks, trajectory: len(tasks), _same)
            replace(evaluator, renderer=renderer)(policy)
        with meter.stage("checkpoint"), meter.labelled("checkpoint"):
            state = capture(parts, stepper, step=1)
            size = sum(each.numel() * each.element_size() for group in state.tensors.values() for each in group.values())
        every = recipe.eval.every
        total = sum(phase.steps for phase in phases)
        return Rehearsed(
            meter=meter,
            world=self.ranks.world,
            phases=tuple(phases),
            evaluations=1 + (total // every if every else 1),
            checkpoint=size,
            velocities=self.velocities,
        )

    def _take_first_step(self, stepper: Stepper) -> None:
        """Moments exist from the first optimizer step on, so that every stage is measured with them, as in a run that resumes."""
        trained = [each for each in stepper.module.parameters() if each.requires_grad]
        with self.meter.paused():
            stepper.backward(sum((each.float().flatten()[:1].sum() for each in trained), torch.zeros((), device=self.ranks.device)))
            stepper.step(1e-6)
        self._label_moments(stepper)

    def _label_weights(self, parts: Assembly) -> None:
        if isinstance(parts.model, DenoisingModel):  # it may have been moved since it was loaded
            self.meter.relabel(list(parts.model.module.parameters()), "weights: transformer")
        trained = list(parts.copies.parameters.values())
        self.meter.relabel(trained, "trained weights")
        for copy in parts.copies.copies.values():
            self.meter.relabel(list(copy.values()), "copies of the trained weights")
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(lambda each: self.meter.relabel([each.grad], "gradients"))

    def _label_master_weights(self, stepper: Stepper) -> None:
        """Weights in 16 bits have fp32 master weights, and the stepper adds up gradients of these, which no hook sees."""
        own = stepper.policy if isinstance(stepper, HeadStepper) else stepper
        if not isinstance(own, ReplicatedStepper):
            return
        masters = [weight for name, weight in own.weights.items() if weight is not own.parameters[name]]
        self.meter.relabel(masters, "master weights")
        backward = own.backward

        def labelled(loss: Tensor) -> None:
            backward(loss)
            self.meter.relabel([weight.grad for weight in masters], "gradients")

        own.backward = labelled  # type: ignore[method-assign]

    def _count_velocities(self, parts: Assembly) -> None:
        """Without gradient, equal calls of the model are equal work."""
        model = parts.image_model
        while hasattr(model, "model"):
            model = model.model
        if not isinstance(model, DenoisingModel):
            return
        own = model.velocity
        repeated = self.repeats.calls(own, lambda module, x, sigma, conditioning: tuple(x.shape), _same)

        def velocity(*args: Any, **kwargs: Any) -> Tensor:
            self.velocities += self.meter.stage_name.endswith("rollout")
            made: Tensor = (own if torch.is_grad_enabled() else repeated)(*args, **kwargs)
            return made

        model.velocity = velocity  # type: ignore[method-assign]

    def _preflight(self, run: Run, phase: Phase, name: str) -> None:
        with self._few_parts(run.policy), self.meter.stage(f"{name}preflight"):
            preflight(run, phase, step=phase.steps.start, rows=min(ROWS, len(phase.batch(phase.steps.start))))

    def _step(self, run: Run, phase: Phase, name: str) -> None:
        meter = self.meter
        policy = run.policy
        rollout = policy.rollout
        policy.rollout = self.repeats.calls(rollout, len, lambda made: type(made).concat([made]))
        renderer = self.repeats.calls(run.renderer, lambda tasks, trajectory: len(tasks), _same)
        run = replace(run, renderer=renderer, clock=lambda stage: meter.stage(f"{name}{stage}"))
        step = phase.steps.start
        with meter.stage(f"{name}advantages"):
            collected = collect(run, phase, step)
        with self._few_parts(policy):
            update(run, phase, step, collected)
        self._label_moments(run.stepper)
        del policy.rollout

    def _label_moments(self, stepper: Any) -> None:
        engine = getattr(stepper, "engine", stepper)
        optimizer = getattr(getattr(engine, "optimizer", None), "optimizer", getattr(engine, "optimizer", None))
        if optimizer is not None:
            for state in optimizer.state.values():
                self.meter.relabel([each for each in state.values() if isinstance(each, Tensor)], "AdamW's moments")

    @contextmanager
    def _few_parts(self, policy: Any) -> Iterator[None]:
        names = [name for name in ("microbatches", "row_slices") if hasattr(policy, name)]
        for name in names:
            setattr(policy, name, self.repeats.parts(getattr(policy, name)))
        try:
            yield
        finally:
            for name in names:
                delattr(policy, name)


def _same(made: Any) -> Any:
    return made
