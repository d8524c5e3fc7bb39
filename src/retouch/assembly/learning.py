"""Objective, advantage and phases, from what a recipe says of learning."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from retouch.core.advantages import batch_relative, group_relative, rescale_rewards
from retouch.core.weights import Normalise
from retouch.data.sampler import assign, global_rows, tasks_for_step
from retouch.data.tasks import Subset
from retouch.distributed.ranks import Ranks
from retouch.objectives.actor_critic import ActorCritic
from retouch.objectives.awm import AWM
from retouch.objectives.cross_entropy import CrossEntropy
from retouch.objectives.dpo import DPO
from retouch.objectives.nft import NFT
from retouch.objectives.policy_gradient import PolicyGradient
from retouch.objectives.supervised import Supervised
from retouch.policies.denoising.policy import Sampling
from retouch.policies.denoising.windows import Window
from retouch.protocols import Objective
from retouch.recipe import learning as recipe_learning
from retouch.recipe import renderer as recipe_renderer
from retouch.recipe import rollout as recipe_rollout
from retouch.recipe.phases import ResolvedPhase
from retouch.recipe.recipe import Recipe
from retouch.recipe.writer import AutoregressivePolicy
from retouch.training.crediting import ByValue, Crediting, each_action
from retouch.training.loop import Phase
from retouch.training.schedules import learning_rate
from retouch.types import Batch, Kind, Task

_KINDS: dict[str, Sequence[int] | None] = {"all": None, "text": [Kind.TEXT_TOKEN], "vision": [Kind.IMAGE_TOKEN]}


def build_objective(section: recipe_learning.Objective, *, entropy: bool = False) -> Objective:
    """What turns advantages into a loss; ``entropy``: a policy gradient also measures that of the policy's tokens."""
    match section:
        case recipe_learning.PolicyGradient():
            kl = section.kl if isinstance(section.kl, recipe_learning.Kl) else None
            return PolicyGradient(
                surrogate=section.surrogate,
                clip_low=section.clip_low,
                clip_high=section.clip_high,
                dual=section.dual,
                kl=None if kl is None else kl.kind,
                kl_weight=0.0 if kl is None else kl.weight,
                ratio_norm=section.ratio_norm,
                entropy=entropy,
            )
        case recipe_learning.Nft():
            return NFT(
                beta=section.beta,
                advantage_clip=section.advantage_clip,
                reference_weight=section.reference_weight,
                old_rate=section.old_decay.rate,
                old_max=section.old_decay.max,
                draws=section.samples,
                sigma_sampling=section.sigma_sampling,
                shift=section.shift,
            )
        case recipe_learning.Awm():
            return AWM(
                reference_weight=section.reference_weight,
                draws=section.samples,
                sigma_sampling=section.sigma_sampling,
                shift=section.shift,
            )
        case recipe_learning.Dpo():
            return DPO(beta=section.beta, draws=section.samples, sigma_sampling=section.sigma_sampling, shift=section.shift)
        case recipe_learning.Supervised():
            return Supervised(sigma_sampling=section.sigma_sampling, shift=section.shift)
        case recipe_learning.Sft():
            return CrossEntropy()


def copies_needed(recipe: Recipe) -> set[str]:
    """Which weights must be kept beside the current ones, over all phases."""
    needed = {"average"} if recipe.policy.ema is not None else set()
    match recipe.renderer:
        case recipe_renderer.ResponseRenderer(encoder="policy", guidance_scale=scale) if scale > 1:
            needed.add("reference")
    for phase in recipe.resolved_phases():
        match phase.objective:
            case recipe_learning.Nft(reference_weight=weight):
                needed |= {"old", "reference"} if weight > 0 else {"old"}
            case recipe_learning.PolicyGradient(kl=recipe_learning.Kl()) | recipe_learning.Dpo():
                needed.add("reference")
            case recipe_learning.Awm(reference_weight=weight) if weight > 0:
                needed.add("reference")
    return needed


def build_sampling(rollout: recipe_rollout.DenoisingRollout) -> Sampling:
    transition = rollout.transition
    return Sampling(
        num_steps=rollout.num_steps,
        kind=transition.kind,
        noise_level=0.0 if isinstance(transition, recipe_rollout.OdeTransition) else transition.noise_level,
        reduction=rollout.reduction,
        window=Window(**rollout.window.model_dump()),
        shared_noise=rollout.shared_noise,
    )


def build_advantage(
    section: recipe_learning.Advantage, bounds: tuple[float, float]
) -> tuple[Callable[[Tensor, Tensor], Tensor], Crediting]:
    """What a row is worth beside the others, and of that to each of its actions. ``bounds``: what a reward can be."""
    match section:
        case recipe_learning.GaeAdvantage():
            low, high = bounds
            credit = ByValue(gamma=section.gamma, lam=section.lam, whiten=section.whiten, clip=section.clip)
            return lambda rewards, group: rescale_rewards(rewards, low=low, high=high), credit
        case recipe_learning.GroupAdvantage():
            options = section.model_dump(exclude={"kind"})
            return lambda rewards, group: group_relative(rewards, group, **options), each_action
        case recipe_learning.BatchAdvantage():
            options = section.model_dump(exclude={"kind"})
            return lambda rewards, group: batch_relative(rewards, **options), each_action


def build_phase(
    recipe: Recipe, phase: ResolvedPhase, *, steps: range, tasks: Sequence[Task], ranks: Ranks, bounds: tuple[float, float]
) -> Phase:
    """A phase over ``tasks``, taking ``steps`` of the run. ``bounds``: what a reward can be."""
    order = [
        row
        for rank in range(ranks.world)
        for row in global_rows(rows=phase.rows, minibatches=recipe.minibatches, rank=rank, world=ranks.world)
    ]

    def batch(step: int) -> Batch:
        rows = tasks_for_step(seed=recipe.seed, step=step - steps.start, count=phase.tasks_per_step, size=len(tasks))
        return assign(
            seed=recipe.seed,
            step=step,
            tasks=Subset(tasks, rows),
            group_size=phase.group_size,
            minibatches=recipe.minibatches,
            rank=ranks.rank,
            world=ranks.world,
        )

    objective = build_objective(phase.objective, entropy=isinstance(recipe.policy, AutoregressivePolicy) and recipe.policy.entropy)
    if isinstance(recipe.advantage, recipe_learning.GaeAdvantage) and isinstance(objective, PolicyGradient):
        objective = ActorCritic(actor=objective, clip=recipe.advantage.head.clip)
    advantage, credit = build_advantage(recipe.advantage, bounds)

    return Phase(
        name=phase.name,
        steps=steps,
        objective=objective,
        batch=batch,
        order=torch.tensor(order),
        group=torch.arange(phase.rows) // phase.group_size,
        advantage=None if phase.imitates else advantage,
        credit=credit,
        normalise=_normalise(phase),
        max_length=_max_length(phase),
        epochs=recipe.epochs,
        minibatches=recipe.minibatches,
        learning_rate=learning_rate(recipe.optimizer, peak=phase.learning_rate, steps=steps),
        kinds=build_kinds(phase.objective, steps),
    )


def build_kinds(section: recipe_learning.Objective, steps: range) -> Callable[[int], Sequence[int] | None]:
    """Which kinds of token train in each of a phase's steps."""
    tokens = section.tokens if isinstance(section, recipe_learning.PolicyGradient) else "all"
    if isinstance(tokens, recipe_learning.TokenCycle):
        cycle = ["text"] * tokens.text_steps + ["vision"] * tokens.vision_steps
        return lambda step: _KINDS[cycle[(step - steps.start) % len(cycle)]]
    return lambda step: _KINDS[tokens]


def _normalise(phase: ResolvedPhase) -> Normalise:
    if isinstance(phase.objective, recipe_learning.PolicyGradient | recipe_learning.Sft):
        return phase.objective.normalise
    return "sequence"


def _max_length(phase: ResolvedPhase) -> int | None:
    """Actions of the longest chain or completion, where the objective's normalisation asks for it."""
    if isinstance(phase.objective, recipe_learning.PolicyGradient) and phase.objective.normalise == "dr_grpo":
        if isinstance(phase.rollout, recipe_rollout.TokenRollout):
            return phase.rollout.max_new_tokens
        return len(build_sampling(phase.rollout).window.actions(num_steps=phase.rollout.num_steps, seed=0, step=0))
    return None
