"""Checks that the keys of a recipe fit together, before anything is loaded. Each message says what is wrong and what to do."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from retouch.data.sampler import check_arithmetic
from retouch.objectives.base import ObjectiveContext
from retouch.policies.context import TRUNCATE_AT
from retouch.policies.denoising.rollout import DenoisingRollout
from retouch.recipe.phases import PhaseKeys, ResolvedPhase
from retouch.recipe.policy import DenoisingPolicyKeys
from retouch.recipe.policy_checks import (
    engine_problems,
    image_model_problems,
    ip_adapter_problems,
    kernel_problems,
    parts_problems,
    source_image_problems,
)
from retouch.recipe.reward_checks import differentiated_rewards, reward_data_problems, reward_problems, watch_problems

if TYPE_CHECKING:
    from retouch.recipe.keys import RecipeKeys


ZERO3 = (
    "zero3 gathers the weights in every call of the model, and rollouts and renderers call the model or parts of it outside of "
    'the engine and not equally often on all ranks: they hang, or fail with "pop from an empty deque"'
)


def problems(recipe: "RecipeKeys") -> list[str]:
    """A line for each contradiction between keys; empty for a valid recipe."""
    found = [*_length(recipe), *_outputs(recipe), *_devices(recipe)]
    if recipe.watch is not None:
        differentiated = [section for _, section in differentiated_rewards(recipe)]
        found += watch_problems(recipe.watch, [recipe.reward, *differentiated])
    if unlike := list(parts_problems(recipe)):
        return [*found, *unlike]
    found += [*reward_problems(recipe), *image_model_problems(recipe), *engine_problems(recipe)]
    if recipe.policy.compile is not None or getattr(recipe.policy, "attention", None) is not None:
        found += kernel_problems(recipe)
    found += [*ip_adapter_problems(recipe), *_phases(recipe)]
    try:
        check_ranks(recipe, 1)  # more ranks are checked at the start of the run
    except ValueError as error:
        found.append(f"minibatches: {error}")
    return list(dict.fromkeys(found))


def check_ranks(recipe: "RecipeKeys", world: int) -> None:
    """Raise ValueError, with legal numbers, if ``world`` ranks cannot divide the steps of some phase equally."""
    for phase in recipe.resolved_phases():
        check_arithmetic(
            tasks_per_step=phase.tasks_per_step, group_size=phase.group_size, minibatches=recipe.minibatches, world=world
        )
        parts = recipe.minibatches * world
        if phase.objective.compares_groups and phase.tasks_per_step % parts:
            pairs = phase.objective.needs_pairs
            groups, together = ("pairs", "both images of a pair") if pairs else ("groups", "all samples of a group")
            raise ValueError(
                f"tasks_per_step: {phase.tasks_per_step} {groups} do not divide over {recipe.minibatches} minibatches on {world} "
                f"ranks, and {together} must be in one minibatch; use a multiple of {parts}"
            )


def rank_count_warning(recipe: "RecipeKeys", world: int) -> str | None:
    """A warning if the run has another number of ranks than the recipe is made for, otherwise None."""
    if recipe.ranks is None or recipe.ranks == world:
        return None
    there = "is 1" if world == 1 else f"are {world}"
    return f"the recipe is meant for {recipe.ranks} rank{'s' * (recipe.ranks > 1)}, and there {there}"


def _length(recipe: "RecipeKeys") -> Iterator[str]:
    if recipe.phases is None:
        if (recipe.steps is None) == (recipe.passes is None):
            yield f"steps: {_one_length(recipe.steps)}"
        return
    if not recipe.phases:
        yield "phases: the list is empty; add a phase, or set phases to null and set steps"
        return
    if recipe.steps is not None or recipe.passes is not None:
        yield _length_of_phases(recipe, recipe.phases)
    names = [phase.name for phase in recipe.phases]
    for index, phase in enumerate(recipe.phases):
        if (phase.steps is None) == (phase.passes is None):
            yield f"phases.{index}.steps: {_one_length(phase.steps)}"
        if phase.name in names[:index]:
            yield f"phases.{index}.name: another phase is also called {phase.name!r}; names must be unique"
    if all(phase.steps == 0 for phase in recipe.phases):
        yield "phases: none of them has a step; set steps for one, or evaluate the untrained model with `retouch eval`"
    if recipe.phases[0].keep_optimizer:
        yield "phases.0.keep_optimizer: there is no phase before the first; remove it"


def _length_of_phases(recipe: "RecipeKeys", phases: Sequence[PhaseKeys]) -> str:
    """What to do about a recipe with phases and a length at its top level."""
    key, value = ("steps", recipe.steps) if recipe.steps is not None else ("passes", recipe.passes)
    options = " or ".join(f"--set phases.{index}.{key}={value:g} ({phase.name})" for index, phase in enumerate(phases))
    return (
        "steps: with phases, each phase has its own length; remove the top-level steps and passes, and set the length of a phase: "
        f"{options}"
    )


def _one_length(steps: int | None) -> str:
    """What to do about a run or a phase with both lengths, or with none (``steps`` is None)."""
    return "missing: set the length of the run, in steps or in passes" if steps is None else "set either steps or passes, not both"


def _outputs(recipe: "RecipeKeys") -> Iterator[str]:
    """Check the checkpoints, the uploads and the trackers of a run."""
    every, kept = recipe.checkpoints.every, recipe.checkpoints.keep_every
    if kept is not None and (every == 0 or kept % every):
        yield f"checkpoints.keep_every: {kept} is not a multiple of checkpoints.every ({every}), so none is kept; use a multiple"
    if recipe.push is not None and recipe.sharding == "fsdp2":
        yield "push: with fsdp2 no rank has the whole weights; train without push, then `retouch export` and `hf upload`"
    if recipe.samples.tokens and not _writes_text(recipe):
        yield "samples.tokens: this policy writes no text; remove it"
    if recipe.samples.states and recipe.policy.kind == "autoregressive":
        yield "samples.states: this policy has no denoising states; remove it"
    if len(set(recipe.trackers)) < len(recipe.trackers):
        yield "trackers: one tracker is listed twice; list each once"


def _writes_text(recipe: "RecipeKeys") -> bool:
    """Whether the policy generates text tokens, or may do so (an imported model, whose kinds of tokens are not known)."""
    return recipe.policy.kind == "autoregressive" and (recipe.policy.token_kinds is None or "text" in recipe.policy.token_kinds)


def _devices(recipe: "RecipeKeys") -> Iterator[str]:
    if recipe.sharding == "zero3":
        yield f"sharding: {ZERO3}; use zero2, or fsdp2 if the weights themselves are too large"
    if recipe.optimizer.final_share and recipe.optimizer.schedule == "constant":
        yield "optimizer.final_share: a constant learning rate does not fall; use schedule cosine or linear, or remove it"
    moments = recipe.optimizer.moments
    if moments is not None and recipe.sharding not in (None, *(["fsdp2"] if moments == "cpu" else [])):
        yield f"optimizer.moments: {moments} does not go with sharding {recipe.sharding}; remove it, or use cpu with fsdp2"
    devices = recipe.devices
    if devices is None:
        return
    if devices.policy is not None and recipe.device != "auto":
        yield f"device, devices.policy: {recipe.device} and {devices.policy} both choose the policy's device; set one of them"
    if recipe.renderer is None or recipe.renderer.image_model is None:
        keys = ("renderer",) if isinstance(recipe.policy, DenoisingPolicyKeys) else ("renderer", "offload")
        for key in keys:
            if getattr(devices, key):
                yield f"devices.{key}: this policy renders its images itself, on its own device; remove it"
    if devices.reference is not None and not (recipe.policy.kind == "autoregressive" and recipe.policy.train.kind == "full"):
        yield "devices.reference: only for full training of language models; the reference of a LoRA is small, so remove it"
    if devices.reference is not None and recipe.sharding == "fsdp2":
        yield "devices.reference: fsdp2 already shards the reference over ranks; use zero2, or remove it"
    if devices.weights is not None and recipe.sharding != "fsdp2":
        yield "devices.weights: only weights that are sharded by fsdp2 can wait in CPU memory; set sharding to fsdp2, or remove it"


def _phases(recipe: "RecipeKeys") -> Iterator[str]:
    for index, phase in enumerate(recipe.resolved_phases()):
        at = {key: recipe.phase_key(index, key) for key in ("objective", "rollout", "data", "group_size")}
        yield from phase.objective.problems(_context(recipe, phase, at))
        tokens = phase.rollout.is_autoregressive
        yield from recipe.advantage.problems(phase.objective, objective_key=at["objective"], is_autoregressive=tokens)
        if phase.objective.needs_pairs:
            yield from _pairs(phase, at)
        elif phase.imitates:
            unused = {"refill": phase.rollout.refill is not None, "staleness": phase.rollout.staleness > 0}
            for key in (key for key, is_set in unused.items() if is_set and recipe.phases is None):
                yield f"{at['rollout']}.{key}: {phase.objective.label} samples nothing; remove it"
            if phase.data.contents().target is False:
                has = f"{phase.data.label} have no targets"
                yield f"{at['data']}: {has}, and {phase.objective.label} needs them; use folder or hub data"
        else:
            yield from _exploration(recipe, phase, at)
            if phase.rollout.staleness:
                yield from _staleness(recipe, phase, at)
            elif phase.rollout.truncate_at != TRUNCATE_AT:
                yield f"{at['rollout']}.truncate_at: has an effect only with staleness; set {at['rollout']}.staleness, or remove it"
            if phase.rollout.refill is not None:
                yield from _refill(recipe, phase, at)
        yield from reward_data_problems(recipe, index)
        yield from source_image_problems(recipe, phase, at["data"])
        yield from phase.data.problems(at["data"], eval_split=recipe.eval.split if index == 0 else None)
        if phase.passes is not None and not phase.data.has_length:
            yield f"{recipe.phase_key(index, 'passes')}: the number of rows of a stream is not known; give `steps` instead"
        warmup = recipe.optimizer.warmup_steps
        if phase.steps and warmup > phase.steps:
            yield (
                f"optimizer.warmup_steps: {warmup} exceeds the {phase.steps} steps of phase {phase.name!r}; give fewer steps, or a "
                "share of them below 1"
            )


def _pairs(phase: ResolvedPhase, at: dict[str, str]) -> Iterator[str]:
    """Check a phase in which each group is a pair of images of the data."""
    if phase.data.contents().pairs is False:
        why = f"{phase.data.label} has no columns `chosen` and `rejected`, which {at['objective']}.pairs 'data' compares"
        yield f"{at['data']}: {why}; name them in columns, or give folder, hub or table data that have them"
    if phase.group_size != 2:
        yield f"{at['group_size']}: {phase.group_size}, and a pair of the data has 2 images; set 2"


def _exploration(recipe: "RecipeKeys", phase: ResolvedPhase, at: dict[str, str]) -> Iterator[str]:
    """Check that the samples of a group can differ, and that advantages can differ from 0."""
    if phase.objective.differentiates_reward:
        pass
    elif phase.group_size < (smallest := recipe.advantage.smallest_group):
        nothing = f"{phase.group_size} gives every sample the advantage 0"
        yield f"{at['group_size']}: {nothing}; use {smallest} or more, or advantage.kind batch or gae"
    elif phase.rows < 2:
        yield "tasks_per_step: a step of one sample gives it the advantage 0; use more tasks or a larger group_size"
    yield from phase.rollout.problems(at["rollout"])
    if phase.objective.needs_acting_means and not phase.rollout.is_autoregressive and phase.rollout.engine is not None:
        yield f"{at['objective']}.ratio_norm: an engine does not return the means that it needs; remove ratio_norm, or the engine"


def _staleness(recipe: "RecipeKeys", phase: ResolvedPhase, at: dict[str, str]) -> Iterator[str]:
    """Check that the actions of stale rollouts can be weighted."""
    key, objective = f"{at['rollout']}.staleness", phase.objective
    if not objective.needs_log_probs:
        yield f"{key}: {objective.label} has no probabilities that stale samples could be weighted by; use 0, or policy_gradient"
    elif objective.one_ratio_per_row:
        yield f"{key}: the weights are those of single actions, and gspo has one ratio per row; use 0, or surrogate clip"
    if objective.needs_acting_means:
        yield f"{key}: {at['objective']}.ratio_norm needs the means under the weights that sampled; use 0, or remove ratio_norm"
    if recipe.advantage.value_head is not None:
        yield f"{key}: the predictions of a value head would be stale too; use 0, or an advantage without value head"


def _refill(recipe: "RecipeKeys", phase: ResolvedPhase, at: dict[str, str]) -> Iterator[str]:
    """Check that groups of equal rewards give no gradient, and that they are known before the next step is sampled."""
    key = f"{at['rollout']}.refill"
    if phase.objective.differentiates_reward:
        yield f"{key}: {phase.objective.label} also learns from groups of equal rewards; remove it"
    elif recipe.advantage.smallest_group < 2:
        why = f"advantage {recipe.advantage.label} also learns from groups of equal rewards"
        yield f"{key}: {why}; remove it, or use advantage.kind group"
    if phase.rollout.staleness:
        why = "samples of later steps are made before the rewards of this one are known"
        yield f"{key}: with {at['rollout']}.staleness, {why}; remove one of them"


def _context(recipe: "RecipeKeys", phase: ResolvedPhase, at: dict[str, str]) -> ObjectiveContext:
    """The settings of the recipe that the objective of the phase may check."""
    rollout, lora = phase.rollout, recipe.policy.train.lora
    chain = rollout if isinstance(rollout, DenoisingRollout) else None
    return ObjectiveContext(
        objective=at["objective"],
        rollout=at["rollout"],
        model=recipe.policy.model.kind,
        is_autoregressive=rollout.is_autoregressive,
        token_kinds=recipe.policy.token_kinds,
        stochastic=chain is None or chain.transition.stochastic,
        noise_level=None if chain is None else chain.transition.exploration,
        reduction="token" if chain is None else chain.reduction,
        actions=rollout.actions,
        microbatch=recipe.microbatch,
        optimizer_steps=recipe.epochs * recipe.minibatches,
        lora_dropout=None
        if lora is None
        else (f"policy.train{'' if lora is recipe.policy.train else '.lora'}.dropout", lora.dropout),
        num_steps=None if chain is None else chain.num_steps,
        engine=rollout.engine is not None,
        offload=recipe.devices is not None and bool(recipe.devices.offload),
    )
