"""Builds the parts of a run from its recipe: models, data, judge, phases and the value head."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from retouch.config.imports import import_class
from retouch.core.random import generator
from retouch.data.base import DataContext, DataSets, DataSource
from retouch.data.rows import RowRequirements
from retouch.data.tasks import (
    Drawable,
    Subset,
    UnindexedTasks,
    assign,
    draw,
    examples,
    further_tasks,
    global_rows,
    places_in_step,
    steps_for_passes,
)
from retouch.distributed.optimizer import HeadStepper, JointStepper, ReplicatedStepper, Stepper, gathered_state
from retouch.distributed.ranks import Placement, Ranks, plan_placement
from retouch.models.offloading import SwappedBlocks, load_teacher, on_device, page_lock, parts_of
from retouch.models.parts import compute_device, frozen_hashes
from retouch.models.pipeline import Guided
from retouch.models.pretrained import DENOISER, MODEL, fetch_weights
from retouch.models.quantized import is_quantized
from retouch.models.train import FullWeights
from retouch.objectives.base import ValueHead
from retouch.policies.denoising import DenoisingPolicy
from retouch.policies.rollout import (
    MOST_TURNS,
    CachedEngine,
    ChainEngineSection,
    DenoisingEngine,
    DenoisingRollout,
    Engine,
    EngineContext,
    EngineSection,
    FirstGradientStep,
    TokenRollout,
)
from retouch.policies.value_heads import LatentValues, TokenValues, channels_of, summary
from retouch.policies.weights import WeightCopies, stale_copies
from retouch.protocols import AutoregressiveModel, DenoisingModel, Renderer
from retouch.recipe.keys import ResolvedPhase, Rollout
from retouch.recipe.policy import AutoregressivePolicyKeys, DenoisingPolicyKeys
from retouch.recipe.recipe import Recipe, check_ranks, evaluated_columns, rewards_of
from retouch.records.folder import RunFolder
from retouch.renderers.base import LatentRenderer, RendererInContext
from retouch.rewards.base import unchanged
from retouch.rewards.judging import BatchScorer, RewardScorer
from retouch.run.checkpoint import (
    GROUPS,
    TEXT_TO_IMAGE,
    TrainState,
    all_generators,
    restore_copy,
    restore_weights,
    set_generators,
    with_image_model,
)
from retouch.run.collecting import collect_ahead, collect_refilled
from retouch.run.ledger import Ledger, require_same_data, require_same_weights
from retouch.run.metrics import Clock
from retouch.run.painting import Painting
from retouch.run.preflight import Check, trial_steps
from retouch.run.step import Phase, Run
from retouch.run.turns import begin_episodes, in_order, require_turns
from retouch.types import Batch, Json, Task

if TYPE_CHECKING:
    from retouch.policies.autoregressive import AutoregressivePolicy
    from retouch.renderers.prompts import PromptRenderer

SAMPLED = 32
"""Number of tasks from which the normalisation of the head's inputs is computed."""


@torch.no_grad()
def build_head(
    section: ValueHead, model: DenoisingModel | AutoregressiveModel, *, tasks: Sequence[Task], seed: int
) -> LatentValues | TokenValues:
    """Build a value head for the model's states. ``tasks``: training tasks, the same on every rank; the first ones are encoded."""
    device = compute_device(model.module)
    if not isinstance(model, DenoisingModel):
        states, _ = model.prefill(model.module, model.encode([tasks[0]]))
        return TokenValues(states.shape[1], width=section.width, seed=seed, coefficient=section.coefficient).to(device)
    conditioning = [model.encode([tasks[index]]) for index in range(min(SAMPLED, len(tasks)))]
    x = model.initial_noise(conditioning[0], [generator(seed, "size of a state")])
    sampled = torch.cat([summary(each) for each in conditioning])
    return LatentValues(channels_of(x), sampled, width=section.width, seed=seed).to(device)


def sets_of(
    recipe: Recipe, phases: Sequence[ResolvedPhase], *, size: tuple[int, int] | None, trains: bool = True
) -> list[DataSets]:
    """Return the tasks of each phase, built by ``build_sets``. Data that several phases share are read once."""
    read: list[tuple[DataSource, DataSets]] = []
    for phase in phases:
        if all(phase.data != data for data, _ in read):
            read.append((phase.data, build_sets(recipe, phase.data, size=size, trains=trains)))
    return [next(sets for data, sets in read if data == phase.data) for phase in phases]


def build_sets(recipe: Recipe, data: DataSource, *, size: tuple[int, int] | None, trains: bool = True) -> DataSets:
    """Build the training tasks of a data source and the held-out tasks of the run.

    ``size``: the (height, width) in px that the model works at, if fixed. ``trains``: False if the policy is only evaluated or
    used. Raises ValueError if rows are unusable, if no task is left, or if a known test set would be trained on.
    """
    given = recipe.eval
    return data.build(
        DataContext(
            seed=recipe.seed,
            size=size,
            eval_split=given.split,
            eval_tasks=given.tasks,
            eval_seed=given.seed,
            eval_source=recipe.eval_data(),
            required=required_rows(recipe, data),
            trains=trains,
        )
    )


def steps_of(phases: Sequence[ResolvedPhase], sets: Sequence[DataSets]) -> list[range]:
    """Return the range of the run's steps that each phase takes."""
    steps: list[range] = []
    for phase, data in zip(phases, sets, strict=True):
        length = phase.steps
        if length is None:
            assert phase.passes is not None
            if isinstance(data.train, UnindexedTasks):
                raise ValueError("passes: the number of rows of a stream is not known; give `steps` instead")
            length = steps_for_passes(phase.passes, size=max(1, len(data.train)), count=phase.tasks_per_step)
        start = steps[-1].stop if steps else 0
        steps.append(range(start, start + length))
    return steps


def required_rows(recipe: Recipe, data: DataSource) -> RowRequirements:
    """Return what the rows of ``data`` must contain: the images that the image model takes (any number if the renderer uses none),
    the text and the target image that the reward reads, and the pairs that an objective learns from."""
    model = recipe.image_model
    takes = model.takes if recipe.renderer is None or recipe.renderer.uses_sources else None
    played = [phase.most_turns for phase in recipe.resolved_phases() if phase.data == data and phase.most_turns > 1]
    turns = (1 if played or (recipe.eval.turns and data == recipe.data) else 0, min(played, default=sys.maxsize))
    return RowRequirements(
        images=(0, sys.maxsize) if takes is None else takes.images,
        mask=takes is not None and takes.mask,
        reference=recipe.policy.train.reads_reference,
        text=any(part.reads_text for _, part in rewards_of(recipe)),
        target=any(part.needs_target for _, part in rewards_of(recipe)),
        pairs=any(phase.objective.needs_pairs for phase in recipe.resolved_phases() if phase.data == data),
        turns=turns,
        model=model.kind,
        takes=str(takes),
    )


def build_phase(
    recipe: Recipe,
    phase: ResolvedPhase,
    *,
    steps: range,
    tasks: Drawable,
    ranks: Ranks,
    reward_range: tuple[float, float],
) -> Phase:
    """Build the phase that trains on ``tasks`` in ``steps`` of the run. ``reward_range``: the smallest and largest reward."""
    most, order = phase.most_turns, list[int]()
    for rank in range(ranks.world):
        mine = global_rows(rows=phase.rows, minibatches=recipe.minibatches, rank=rank, world=ranks.world)
        if most > 1:
            keys = [divmod(row, phase.group_size) for row in mine]
            turns = in_order(keys, most=most, minibatches=recipe.minibatches)
            mine = [(keys[row][0] * most + turn) * phase.group_size + keys[row][1] for row, turn in turns]
        order += mine

    count = phase.tasks_per_step
    share = {
        **{"group_size": phase.group_size, "minibatches": recipe.minibatches},
        **{"rank": ranks.rank, "world": ranks.world},
    }

    def batch(step: int) -> Batch:
        places = places_in_step(count=count, **share)
        drawn = draw(tasks, seed=recipe.seed, step=step - steps.start, count=count, places=places)
        return assign(seed=recipe.seed, step=step, tasks=drawn, **share)

    def further(step: int, turn: int) -> Sequence[Task]:
        assert not isinstance(tasks, UnindexedTasks), "refused below"
        drawn = further_tasks(seed=recipe.seed, step=step - steps.start, count=count, size=len(tasks), turn=turn)
        return Subset(tasks, drawn)

    source = None
    if phase.rollout.staleness and not phase.imitates:
        source = partial(collect_ahead, staleness=phase.rollout.staleness, truncate_at=phase.rollout.truncate_at)
    if phase.rollout.refill is not None and not phase.imitates:
        if isinstance(tasks, UnindexedTasks):
            raise ValueError("rollout.refill: a stream has no further tasks for a step; remove it, or stream no data")
        source = partial(collect_refilled, rounds=phase.rollout.refill.rounds, further=further)
    objective = phase.objective
    entropy = recipe.policy.entropy
    return Phase(
        name=phase.name,
        steps=steps,
        objective=objective.build(entropy=entropy, value_head=None if phase.imitates else recipe.advantage.value_head),
        batch=batch,
        order=torch.tensor(order),
        group=torch.arange(phase.rows * most) // phase.group_size,
        advantage=None if phase.imitates else recipe.advantage,
        reward_range=reward_range,
        max_length=phase.rollout.longest if objective.loss_weights == "dr_grpo" else None,
        epochs=recipe.epochs,
        minibatches=recipe.minibatches,
        learning_rate=recipe.optimizer.learning_rate(peak=phase.learning_rate, steps=steps),
        source=source,
    )


def copies_in_cpu_memory(recipe: Recipe) -> set[str]:
    """Return the names of the weight copies that are in CPU memory while they are not used.

    FSDP2 instead keeps all copies where the weights are.
    """
    reference = {"reference"} if recipe.devices is not None and recipe.devices.reference is not None else set()
    return _stale_copies(recipe) | reference | set(teachers(recipe, "run"))


def teachers(recipe: Recipe, kind: Literal["run", "model"]) -> dict[str, str]:
    """The folders of the runs, or the paths of the models, that teach, by their names in ``WeightCopies``."""
    found = [teacher for phase in recipe.resolved_phases() for teacher in phase.objective.taught_by.values()]
    return {teacher.weights: path for teacher in found if (path := getattr(teacher, kind)) is not None}


def _stale_copies(recipe: Recipe) -> set[str]:
    phases = recipe.resolved_phases()
    return {name for phase in phases if not phase.imitates for name in stale_copies(phase.rollout.staleness)}


def has_demonstration(model: DenoisingModel | AutoregressiveModel) -> Callable[[Task], bool]:
    """Return the function that says whether a task contains what the model imitates in supervised learning."""
    if not isinstance(model, DenoisingModel):
        from retouch.policies.autoregressive import COMPLETION, TokenizesTargets

        if not isinstance(model, TokenizesTargets):
            return lambda task: COMPLETION in task.meta
    return lambda task: task.target is not None


_CPU = torch.device("cpu")
_SHARDED_STEPPERS = {"zero2": "retouch.distributed.zero:ZeroStepper", "fsdp2": "retouch.distributed.fsdp:FsdpStepper"}


@dataclass(frozen=True, kw_only=True)
class PolicyParts:
    """The models of a run: they sample and make images.

    ``placement``: the devices of the parts. ``model``: the model that is trained. ``image_model``: the model that makes images; the
    same as ``model``, except for policies that write text. ``copies``: weight copies besides the current weights. ``head``: the
    value head that is trained with the policy, if there is one.
    """

    recipe: Recipe
    ranks: Ranks
    placement: Placement
    model: DenoisingModel | AutoregressiveModel
    image_model: DenoisingModel | AutoregressiveModel
    copies: WeightCopies
    head: LatentValues | TokenValues | None = None
    painted: WeightCopies | None = None
    """The weights of ``image_model`` that train with the writer (``text_to_image``), and their copies; None if it is frozen."""
    hashes: Mapping[str, str] | None = None
    """The result of ``base_hashes``, if it was computed before the weights were sharded."""

    def base_hashes(self) -> Mapping[str, str]:
        """A hash of the frozen weights of each part (``retouch.models.parts.frozen_hashes``)."""
        hashes = _base_hashes(self.model, self.image_model) if self.hashes is None else self.hashes
        return {**hashes, **frozen_hashes({name: model.module for name, model in self.copies.models.items()})}

    def stored(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """The trained weights and their copies, by their names in a checkpoint; those of an image model too."""
        weights, copies, painted = self.copies.parameters, self.copies.state(), self.painted
        if painted is None:
            return weights, copies
        return with_image_model(weights, painted.parameters), with_image_model(copies, painted.state())

    def policy(
        self,
        rollout: Rollout,
        *,
        acting: Literal["current", "old"] = "current",
        keep_means: bool = False,
        engine: Engine | DenoisingEngine | None = None,
        first_gradient_step: FirstGradientStep | None = None,
        keep_states: bool = False,
    ) -> "DenoisingPolicy | AutoregressivePolicy":
        """Build a policy that samples as ``rollout`` says. All policies of a run share their weights.

        ``acting``: the weights that sample in rollouts. ``engine``: samples the completions or the denoising chains of a rollout;
        None: the policy's own model. ``first_gradient_step``: from the objective, if its loss needs a state of the chain.
        ``keep_states``: its loss needs every state.
        """
        recipe, policy, model, head = self.recipe, self.recipe.policy, self.model, self.head
        if isinstance(model, DenoisingModel):
            assert isinstance(rollout, DenoisingRollout)
            assert not isinstance(head, TokenValues)
            assert engine is None or isinstance(engine, DenoisingEngine)
            return DenoisingPolicy(
                Guided(model, rollout.guidance_scale) if rollout.guidance_scale > 1 else model,
                sampling=rollout,
                acting=acting,
                eval_steps=recipe.eval.num_steps or rollout.num_steps,
                microbatch=recipe.microbatch,
                copies=self.copies,
                keep_means=keep_means,
                head=head,
                engine=engine,
                any_rank=self.ranks.any,
                reference_dropout=policy.train.reference_dropout,
                first_gradient_step=first_gradient_step,
                keep_states=keep_states,
            )
        from retouch.policies.autoregressive import AutoregressivePolicy

        assert isinstance(policy, AutoregressivePolicyKeys)
        assert isinstance(rollout, TokenRollout)
        assert not isinstance(head, LatentValues)
        assert not isinstance(engine, DenoisingEngine)
        return AutoregressivePolicy(
            model,
            sampling=rollout,
            microbatch=recipe.microbatch,
            copies=self.copies,
            logits_at_once=policy.logits_at_once,
            mask_truncated=policy.mask_truncated,
            engine=engine,
            any_rank=self.ranks.any,
            sharded=self._sharded,
            head=head,
        )

    @property
    def _sharded(self) -> bool:
        """Whether all ranks must call the trained model the same number of times."""
        return self.recipe.sharding == "fsdp2" and self.ranks.world > 1

    def renderer(self, *, num_steps: int | None = None) -> Renderer:
        """Build the renderer of trajectories. ``num_steps``: denoising steps for the image of a completion; None: the recipe's."""
        if isinstance(self.model, DenoisingModel):
            return LatentRenderer(self.model)
        assert self.recipe.renderer is not None, "the recipe's checks ensure it"
        published = partial(self.copies.using, "reference") if "reference" in self.copies.copies else None
        section = self.recipe.renderer.with_num_steps(num_steps)
        renderer = section.build(self.image_model, self.model, published=published, sharded=self._sharded)
        if not self.placement.offload:
            return renderer
        assert isinstance(self.image_model, DenoisingModel), "the recipe's checks ensure it"
        parts = [part for part in parts_of(self.image_model) if part is not self.model.module]
        page_lock(parts, self.placement.renderer)
        return RendererInContext(renderer, partial(on_device, self.placement.renderer, parts))

    def users_renderer(self) -> Renderer:
        """Build the renderer for the policy's ``sample``. It computes with the averages of trained weights, if there are any."""
        renderer, section = self.renderer(num_steps=self.recipe.eval.num_steps), self.recipe.renderer
        encoded = section is not None and section.policy_encodes
        for copies in (self.copies if encoded else None, self.painted):
            if copies is not None and "average" in copies.copies:
                renderer = RendererInContext(renderer, partial(copies.using, "average"))
        return renderer


@dataclass(frozen=True, kw_only=True)
class Assembly(PolicyParts):
    """The parts of a run. ``plan``: each phase with its range of the run's steps. ``engines``: the engines by recipe section."""

    judge: RewardScorer
    sets: Sequence[DataSets]
    plan: Sequence[tuple[ResolvedPhase, range]]
    clock: Clock = field(default_factory=Clock)
    engines: dict[EngineSection | ChainEngineSection, Engine | DenoisingEngine] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """The number of steps of the run."""
        return self.plan[-1][1].stop

    def stepper(self) -> Stepper:
        """Build a new stepper over the trained weights. A single rank never shards the weights."""
        options = self.recipe.optimizer.options
        sharding = self.recipe.sharding if self.ranks.world > 1 else None
        kind = ReplicatedStepper if sharding is None else import_class(_SHARDED_STEPPERS[sharding])
        stepper: Stepper = kind(self.model.module, self.ranks, **options)
        section = self.recipe.advantage.value_head
        if self.painted is not None:
            own = ReplicatedStepper(self.image_model.module, self.ranks, **options)
            return JointStepper(stepper, own, prefix=TEXT_TO_IMAGE, weights={})
        if self.head is None or section is None:
            return stepper
        return HeadStepper(
            stepper,
            ReplicatedStepper(self.head, self.ranks, **options),
            learning_rate=section.learning_rate,
            loss_scale=self.ranks.world if sharding == "zero2" else 1,
        )

    def phase(self, index: int, *, stepper: Stepper, judge: BatchScorer) -> tuple[Run, Phase]:
        """Return the arguments of the training loop for the phase with this index."""
        resolved, steps = self.plan[index]
        objective = resolved.objective
        keeps_state = bool(objective.rewards) or (objective.can_pair_noise and objective.needs_initial_noise)
        policy = self.policy(
            resolved.rollout,
            acting=objective.acts_with,
            keep_means=objective.needs_acting_means,
            engine=self._engine(resolved.rollout),
            first_gradient_step=objective.first_gradient_step if keeps_state else None,
            keep_states=objective.learns_from_teachers,
        )
        policy.module = stepper.module
        run = Run(
            policy=policy,
            renderer=self.renderer(),
            judge=judge,
            stepper=stepper,
            ranks=self.ranks,
            chunk=resolved.rollout.chunk,
            max_missing=self.recipe.reward.max_missing,
            average=partial(self._average, self.copies),
            clock=self.clock,
            counted=[name for name, column in self.judge.reward.columns.items() if not column.diagnostic],
        )
        bounds = self.judge.combination.low, self.judge.combination.high
        if (section := resolved.rollout.turns) is not None and not resolved.imitates:
            bounds = section.bounds(*bounds)
            run = replace(run, episodes=partial(begin_episodes, section=section, minibatches=self.recipe.minibatches))
        phase = build_phase(
            self.recipe,
            resolved,
            steps=steps,
            tasks=self.sets[index].train,
            ranks=self.ranks,
            reward_range=bounds,
        )
        together = self.recipe.text_to_image
        if together is not None and self.painted is not None and isinstance(stepper, JointStepper) and not resolved.imitates:
            run = replace(run, painting=self._painting(run, phase, stepper.second))
            phase = replace(phase, trains=lambda step: together.trains(step)[0])
        return run, phase

    def _painting(self, run: Run, phase: Phase, stepper: ReplicatedStepper) -> Painting:
        """Build the image model of a phase, which learns from the samples and advantages of its writer."""
        section, model = self.recipe.text_to_image, self.image_model
        renderer = cast("PromptRenderer", self.recipe.renderer)  # the recipe's checks ensure it
        assert section is not None
        assert self.painted is not None
        assert isinstance(model, DenoisingModel), "the recipe's checks ensure it"
        objective = section.objective.build()
        scale = section.rollout.guidance_scale
        policy = DenoisingPolicy(
            Guided(model, scale) if scale > 1 else model,
            sampling=section.rollout,
            acting=objective.acts_with,
            eval_steps=section.rollout.num_steps,
            microbatch=section.microbatch,
            copies=self.painted,
            keep_means=objective.needs_acting_means,
            any_rank=self.ranks.any,
        )
        return Painting(
            run=replace(run, policy=policy, stepper=stepper, average=partial(self._average, self.painted)),
            phase=replace(
                phase,
                objective=objective,
                learning_rate=self.recipe.optimizer.learning_rate(peak=section.learning_rate, steps=phase.steps),
                max_length=section.rollout.longest if objective.loss_weights == "dr_grpo" else None,
                trains=lambda step: section.trains(step)[1],
            ),
            read=partial(renderer.written_task, model),
            edits=renderer.uses_sources,
            decode=LatentRenderer(model),
        )

    def trial_steps(self, *, stepper: Stepper, judge: BatchScorer, done: int) -> Iterator[Check]:
        """Run the preflight of each phase that is not finished after ``done`` steps. It calls no judge and restores every bit."""
        build = partial(self.phase, stepper=stepper, judge=judge)
        return trial_steps([steps for _, steps in self.plan], build, done=done, named=self.recipe.phases is not None)

    def begin(self, index: int) -> None:
        """Reset weight copies at the first step of a phase.

        ``old`` (the old policy of DiffusionNFT) is set to the current weights. After a supervised warm-up phase, ``reference`` is
        set to the current weights too, because a KL to the weights before the warm-up would undo it. The weights of a frozen
        encoder stay those of the run's start.
        """
        if "old" in self.plan[index][0].objective.weight_copies:
            self.copies.snapshot("old")
        if self.painted is not None and "old" in self.painted.copies:
            self.painted.snapshot("old")
        earlier = [phase for phase, steps in self.plan[:index] if steps]
        warmed_up = bool(earlier) and earlier[-1].imitates
        fixed = self.recipe.renderer is not None and self.recipe.renderer.keeps_first_reference
        if warmed_up and "reference" in self.copies.copies and not fixed:
            self.copies.snapshot("reference")

    def _engine(self, rollout: Rollout) -> Engine | DenoisingEngine | None:
        """Return the engine of the rollout. Phases with the same engine section share one engine."""
        section = rollout.engine or (CachedEngine() if isinstance(rollout, TokenRollout) else None)
        if section is None:
            return None
        if section not in self.engines:
            model, full_weights = self.model, isinstance(self.recipe.policy.train, FullWeights)
            context = EngineContext(
                weights=self.copies.parameters,
                save=partial(_save_trained, model.module, full_weights=full_weights),
                folder=self.recipe.folder,
                full_weights=full_weights,
                first=self.ranks.is_main,
                any_rank=self.ranks.any,
                sharded=self._sharded,
            )
            if isinstance(section, ChainEngineSection):
                assert isinstance(model, DenoisingModel), "the recipe's checks ensure it"
                self.engines[section] = section.build(model, context)
            else:
                assert not isinstance(model, DenoisingModel), "the recipe's checks ensure it"
                self.engines[section] = section.build(model, context)
        return self.engines[section]

    def capture(self, stepper: Stepper, *, step: int) -> TrainState:
        """Return the state from which the run continues bit for bit: weights, optimizer, copies, and each rank's global generators.

        All ranks must call it. Sharded tensors are gathered one at a time when they are read, so all ranks must call
        ``checkpoint.save`` or ``checkpoint.send`` before the next step.

        Schedules, samplers and noise depend only on the step and the recipe's seed, so they have no state. Data streams store their
        position, which only avoids reading their rows from the start.
        """
        weights, copies = self.stored()
        found: tuple[Mapping[str, Tensor], ...] = (
            gathered_state(weights, self.ranks),
            stepper.state(),
            copies,
            all_generators(self.ranks),
        )
        tensors = dict(zip(GROUPS, found, strict=True))
        numbers: dict[str, Json] = {"world": self.ranks.world}
        streams = [sets.train.state() if isinstance(sets.train, UnindexedTasks) else None for sets in self.sets]
        if any(state is not None for state in streams):
            numbers["streams"] = streams
        return TrainState(step=step, tensors=tensors, numbers=numbers)

    def restore(self, state: TrainState, stepper: Stepper) -> None:
        """Restore everything that ``capture`` captured."""
        restore_weights(self.copies, state, self.painted)
        stepper.load(state.tensors["optimizer"])
        streams = state.numbers.get("streams")
        for sets, stored in zip(self.sets, streams if isinstance(streams, list) else (), strict=False):
            if isinstance(sets.train, UnindexedTasks):
                sets.train.load_state(stored)
        set_generators(self.ranks, state.tensors["random"])

    def close_engines(self) -> None:
        """Remove what the engines keep outside of this process, such as adapters in a server."""
        for engine in self.engines.values():
            if (close := getattr(engine, "close", None)) is not None:  # the engine may be used again after it
                close()

    def _average(self, copies: WeightCopies, taken: int) -> None:
        ema = self.recipe.policy.ema
        if ema is not None and taken % ema.every == 0:
            # Warm-up of the decay, as in diffusers' EMAModel: after few steps, the initial weights must not dominate the average.
            # ``taken`` starts again in each phase, so the average soon forgets the phase before.
            copies.update_ema("average", min((1 + taken) / (10 + taken), ema.decay))


def assemble(
    recipe: Recipe, ranks: Ranks, *, ledger: Ledger | None = None, resumed: RunFolder | None = None, trains: bool = True
) -> Assembly:
    """Build a run's parts.

    ``ledger``: caches the answers of judges; None: no cache. ``resumed``: the folder of the run, if it has steps. ``trains``: False
    if the policy is only evaluated or used. Raises ValueError, before any weight of a policy is loaded, if the rows of a step
    cannot be divided among the ranks, the data are invalid, the reward reads a column that the data do not have, the judge differs
    from the judge in the ledger, or the data of a resumed run have changed; and then if its base weights have.
    """
    check_ranks(recipe, ranks.world)
    placement = plan_placement(recipe, ranks)
    recipe.policy.require_kernels(placement.policy)
    phases = recipe.resolved_phases()
    sets = sets_of(recipe, phases, size=recipe.image_size, trains=trains)
    if first := sets[0].heldout[: recipe.eval.batch]:
        for _, _, part in recipe.reward.parts():
            part.require_columns(first)
        if recipe.evaluates_in_turns:
            require_turns(first, most=MOST_TURNS)
    # Building a reward may wait hours for its server, so mistakes in data and weights are found first.
    for model in {id(each): each for each in (recipe.policy.model, recipe.image_model)}.values():
        model.fetch_weights()
    recipe.policy.train.require_files()
    for path in teachers(recipe, "model").values() if trains else ():
        fetch_weights(path, MODEL if recipe.policy.is_autoregressive else DENOISER, key="objective.teachers")
    taught = teachers(recipe, "run") if trains and resumed is None else {}  # a checkpoint of this run has the teachers' weights
    for folder in taught.values():
        if not RunFolder(Path(folder)).checkpoints.is_dir():
            raise ValueError(f"objective.teachers: {folder} has no checkpoints; give the folder of a run that was trained")
    reward = recipe.reward.build(device=placement.reward, keep=unchanged if ledger is None else ledger.cached)
    if ledger is not None:
        ledger.require_same_judge(reward)
    judge = RewardScorer(reward, recipe.reward.combine, device=placement.reward)
    recipe.advantage.check_range(judge.combination.low, judge.combination.high)
    if recipe.advantage.reads_scores:
        recipe.advantage.check_columns(reward.columns, judge.combination.columns)
    column = recipe.eval.column
    if column not in (None, *reward.columns) and column not in (columns := evaluated_columns(recipe, reward.columns)):
        raise ValueError(
            f"eval.column: the reward has no column {column!r}, only {', '.join(columns)}; name one of them, or "
            "give null for the combined reward"
        )
    for phase in phases if trains else ():
        if not phase.objective.uses_advantages:
            phase.objective.load(placement.reward)
    if resumed is not None:
        require_same_data(resumed, sets, ranks)
    parts = connect(recipe, ranks, placement=placement, judge=judge, sets=sets, trains=trains)
    if resumed is not None:
        require_same_weights(resumed, parts.base_hashes(), ranks)
    for name, folder in taught.items():
        restore_copy(parts.copies, name, RunFolder(Path(folder)).checkpoints)
    return parts


def connect(
    recipe: Recipe,
    ranks: Ranks,
    *,
    placement: Placement,
    judge: RewardScorer,
    sets: Sequence[DataSets],
    trains: bool = True,
) -> Assembly:
    """Build the model, its weight copies and the value head, and combine them with the other parts of the run.

    ``sets``: the tasks of each phase. ``trains``: see ``assemble``. Raises ValueError if the loaded weights are not the weights
    that the recipe needs.
    """
    phases = recipe.resolved_phases()
    plan = list(zip(phases, steps_of(phases, sets), strict=True))
    read = [(phase, steps if trains else range(0)) for phase, steps in plan]
    acting = assemble_policy(recipe, ranks, partial(encode_prompts, recipe, read, sets, ranks), trains=trains)
    sets = [each.with_model(acting.image_model) for each in sets]
    head = None
    if recipe.advantage.value_head is not None:
        first = examples(sets[0].train) or sets[0].heldout
        head = build_head(recipe.advantage.value_head, acting.model, tasks=first, seed=recipe.seed)
    clock = Clock(partial(torch.cuda.Event, enable_timing=True) if placement.policy.type == "cuda" else None)
    return Assembly(**{**vars(acting), "head": head}, judge=judge, sets=sets, plan=plan, clock=clock)


def encode_prompts(
    recipe: Recipe, plan: Sequence[tuple[ResolvedPhase, range]], sets: Sequence[DataSets], ranks: Ranks, model: DenoisingModel
) -> None:
    """Encode the tasks of this rank in all steps of the run, also as their teachers read them, and the held-out tasks, each prompt
    once. The prompts of a stream are not known before the run, so they are encoded in the step that reads them."""
    scales = [phase.rollout.guidance_scale for phase, _ in plan if isinstance(phase.rollout, DenoisingRollout)]
    scale = max(scales + [each.guidance_scale or 1.0 for phase, _ in plan for each in phase.objective.taught_by.values()])
    encode = (Guided(model, scale) if scale > 1 else model).encode
    done: set[tuple[str, str]] = set()
    for (phase, steps), each in zip(plan, sets, strict=True):
        share = {"group_size": phase.group_size, "minibatches": recipe.minibatches, "rank": ranks.rank, "world": ranks.world}
        for step in () if isinstance(each.train, UnindexedTasks) else range(len(steps)):
            places = places_in_step(count=phase.tasks_per_step, **share)
            drawn = draw(each.train, seed=recipe.seed, step=step, count=phase.tasks_per_step, places=places)
            for task in (drawn[place] for place in places):
                told = [each.texts(task) for each in phase.objective.taught_by.values() if each.instructions in task.meta]
                for text in (task.instruction, *(text for texts in told for text in texts)):
                    if (task.id, text) not in done:
                        encode([replace(task, instruction=text)])
                        done.add((task.id, text))
        for task in each.heldout:
            encode([task])


def assemble_policy(
    recipe: Recipe, ranks: Ranks, prepare: Callable[[DenoisingModel], None] | None = None, *, trains: bool = False
) -> PolicyParts:
    """Build the models of a run, without data and judge. Weights that the policy and the image model share are loaded once.

    ``prepare``: called with a denoising model whose prompt embeddings are cached, before its transformer is on the device.
    ``trains``: also load the models that teach.
    """
    placement, policy, renderer = plan_placement(recipe, ranks), recipe.policy, recipe.renderer
    swapped = 0 if recipe.devices is None else recipe.devices.swap_blocks
    model: DenoisingModel | AutoregressiveModel
    image_model: DenoisingModel | AutoregressiveModel
    if renderer is None:
        assert isinstance(policy, DenoisingPolicyKeys), "the recipe's checks ensure it"
        waits: dict[str, Any] = {"offload": placement.offload, "swap_blocks": swapped}
        model = image_model = policy.build_model(device=placement.policy, **waits, prepare=prepare)
    else:
        assert isinstance(policy, AutoregressivePolicyKeys), "the recipe's checks ensure it"
        model, image_model = renderer.load(
            partial(policy.build_model, device=placement.policy),
            device=_CPU if placement.offload else placement.renderer,
            base_frozen=policy.train.reference_is_base,
        )
    if image_model.module is not model.module:
        image_model.module.requires_grad_(False)
    others = teachers(recipe, "model") if trains else {}
    models = {name: load_teacher(policy, model, path, device=placement.policy) for name, path in others.items()}
    policy.make_trainable(model.module, seed=recipe.seed)
    painted, averaged = None, {"average"} if policy.ema is not None else set()
    if (text_to_image := recipe.text_to_image) is not None:
        targets = recipe.image_model.targets_in(image_model.module)
        text_to_image.train.make_trainable(image_model.module, targets=targets, seed=recipe.seed)
        if text_to_image.gradient_checkpointing:
            image_model.module.enable_gradient_checkpointing()  # type: ignore[operator]
        painted = WeightCopies(image_model.module)
        _snapshot(painted, text_to_image.objective.weight_copies | averaged, base=text_to_image.train.reference_is_base)
    if swapped:
        SwappedBlocks(model.module, count=swapped, device=placement.policy)
    hashes = None
    copies = WeightCopies(model.module, devices=dict.fromkeys(copies_in_cpu_memory(recipe), _CPU))
    if recipe.sharding == "fsdp2" and ranks.world > 1:
        from retouch.distributed.fsdp import ShardedCopies, shard

        if any(is_quantized(weight) for weight in model.module.parameters()):
            raise ValueError("sharding: fsdp2 cannot shard quantised weights, which are small; use null or zero2")
        hashes = _base_hashes(model, image_model)
        shard(model.module, ranks, weights_on_cpu=placement.weights_on_cpu)
        copies = ShardedCopies(model.module, ranks)
    names = _stale_copies(recipe) | averaged
    names = names.union(*(phase.objective.weight_copies for phase in recipe.resolved_phases()))
    if renderer is not None:
        names |= renderer.weight_copies
    if renderer is not None and not renderer.policy_encodes and model.module in getattr(image_model, "parts", ()):
        names |= {"reference"} if image_model is not model else set()  # for a frozen encoder that shares the policy's base weights
    _snapshot(copies, names, base=policy.train.reference_is_base)
    copies.models.update(models)
    made = PolicyParts(
        recipe=recipe, ranks=ranks, placement=placement, model=model, image_model=image_model, copies=copies, painted=painted
    )
    return made if hashes is None else replace(made, hashes=hashes)


def _snapshot(copies: WeightCopies, names: Iterable[str], *, base: bool) -> None:
    """Make the copies with these names. ``base``: the reference is the model without its adapter."""
    for name in sorted(names):
        if name == "reference" and base:
            copies.snapshot_without_adapter(name)
        else:
            copies.snapshot(name)


def _base_hashes(model: Any, image_model: Any) -> dict[str, str]:
    if image_model is model:
        return frozen_hashes(model)
    return frozen_hashes({"policy": model, "renderer": image_model})


def _save_trained(module: Any, folder: Path, *, full_weights: bool) -> None:
    if full_weights:
        module.save_pretrained(folder)
        return
    from retouch.models.lora import write_lora

    write_lora(module, folder, pipeline=None)
