"""Builds the parts of a run from its recipe, for the session that runs it.

Modules that only some recipes need (sharding, a value head) are imported where they are used.
"""

from collections.abc import Sequence
from functools import partial

import torch

from retouch.assembly.parts import Assembly, PolicyParts
from retouch.assembly.phases import copies_in_cpu_memory, copies_needed, sets_of, steps_of
from retouch.data.base import DataSets
from retouch.data.sampler import examples
from retouch.distributed.placement import Placement, plan_placement
from retouch.distributed.ranks import Ranks
from retouch.policies.weights import WeightCopies
from retouch.protocols import AutoregressiveModel, DenoisingModel
from retouch.recipe.checks import check_ranks
from retouch.recipe.policy import AutoregressivePolicyKeys, DenoisingPolicyKeys
from retouch.recipe.recipe import Recipe
from retouch.recipe.reward_checks import evaluated_columns
from retouch.rewards.base import unchanged
from retouch.rewards.judging import RewardScorer
from retouch.training.clock import Clock
from retouch.training.ledger import Ledger

_CPU = torch.device("cpu")


def assemble(recipe: Recipe, ranks: Ranks, *, ledger: Ledger | None = None, trains: bool = True) -> Assembly:
    """Build a run's parts.

    ``ledger``: caches the answers of judges; None: no cache. ``trains``: False if the policy is only evaluated or used. Raises
    ValueError, before any weight of a policy is loaded, if the rows of a step cannot be divided among the ranks, the data are
    invalid, or the judge differs from the judge in the ledger.
    """
    check_ranks(recipe, ranks.world)
    placement = plan_placement(recipe, ranks)
    recipe.policy.require_kernels(placement.policy)
    reward = recipe.reward.build(device=placement.reward, keep=unchanged if ledger is None else ledger.cached)
    if ledger is not None:
        ledger.require_same_judge(reward)
    judge = RewardScorer(reward, recipe.reward.combine, device=placement.reward)
    recipe.advantage.check_range(judge.combination.low, judge.combination.high)
    column = recipe.eval.column
    if column not in (None, *reward.columns) and column not in (columns := evaluated_columns(recipe, reward.columns)):
        raise ValueError(
            f"eval.column: the reward has no column {column!r}, only {', '.join(columns)}; name one of them, or "
            "give null for the combined reward"
        )
    phases = recipe.resolved_phases()
    for phase in phases if trains else ():
        if phase.objective.differentiates_reward:
            phase.objective.load(placement.reward)
    sets = sets_of(recipe, phases, size=recipe.image_size, trains=trains)
    return connect(recipe, ranks, placement=placement, judge=judge, sets=sets)


def connect(recipe: Recipe, ranks: Ranks, *, placement: Placement, judge: RewardScorer, sets: Sequence[DataSets]) -> Assembly:
    """Build the model, its weight copies and the value head, and combine them with the other parts of the run.

    ``sets``: the tasks of each phase. Raises ValueError if the loaded weights are not the weights that the recipe needs.
    """
    phases = recipe.resolved_phases()
    plan = list(zip(phases, steps_of(phases, sets), strict=True))
    acting = assemble_policy(recipe, ranks)
    sets = [each.with_model(acting.image_model) for each in sets]
    head = None
    if recipe.advantage.value_head is not None:
        from retouch.assembly.value_head import build_head

        first = examples(sets[0].train) or sets[0].heldout
        head = build_head(recipe.advantage.value_head, acting.model, tasks=first, seed=recipe.seed)
    clock = Clock(partial(torch.cuda.Event, enable_timing=True) if placement.policy.type == "cuda" else None)
    return Assembly(**{**vars(acting), "head": head}, judge=judge, sets=sets, plan=plan, clock=clock)


def assemble_policy(recipe: Recipe, ranks: Ranks) -> PolicyParts:
    """Build the models of a run, without data and judge. Weights that the policy and the image model share are loaded once."""
    placement, policy, renderer = plan_placement(recipe, ranks), recipe.policy, recipe.renderer
    model: DenoisingModel | AutoregressiveModel
    image_model: DenoisingModel | AutoregressiveModel
    if renderer is None:
        assert isinstance(policy, DenoisingPolicyKeys), "the recipe's checks ensure it"
        model = image_model = policy.build_model(device=placement.policy, offload=placement.offload)
    else:
        assert isinstance(policy, AutoregressivePolicyKeys), "the recipe's checks ensure it"
        model, image_model = renderer.load(
            partial(policy.build_model, device=placement.policy),
            device=_CPU if placement.offload else placement.renderer,
            base_frozen=policy.train.reference_is_base,
        )
    policy.make_trainable(model.module, seed=recipe.seed)
    copies = WeightCopies(model.module, devices=dict.fromkeys(copies_in_cpu_memory(recipe), _CPU))
    if recipe.sharding == "fsdp2" and ranks.world > 1:
        from retouch.distributed.fsdp import shard
        from retouch.distributed.sharded_copies import ShardedCopies

        shard(model.module, ranks, weights_on_cpu=placement.weights_on_cpu)
        copies = ShardedCopies(model.module, ranks)
    names = copies_needed(recipe)
    if renderer is not None and not renderer.policy_encodes and model.module in getattr(image_model, "parts", ()):
        names |= {"reference"} if image_model is not model else set()  # for a frozen encoder that shares the policy's base weights
    for name in sorted(names):
        if name == "reference" and policy.train.reference_is_base:
            copies.snapshot_without_adapter(name)
        else:
            copies.snapshot(name)
    return PolicyParts(recipe=recipe, ranks=ranks, placement=placement, model=model, image_model=image_model, copies=copies)
