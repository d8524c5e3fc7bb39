"""The models of a recipe, what of them trains, and the policy, of either kind."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import nn

from retouch.distributed.placement import Placement
from retouch.models.base import DiffusersModel
from retouch.models.common.wrappers import Guided
from retouch.models.ip_adapter.section import IpAdapter
from retouch.models.train import Lora
from retouch.policies.autoregressive.rollout import TokenRollout
from retouch.policies.denoising.policy import DenoisingPolicy
from retouch.policies.engines.base import Engine
from retouch.policies.value_heads import LatentValues, TokenValues
from retouch.policies.weights import WeightCopies
from retouch.protocols import AutoregressiveModel, DenoisingModel
from retouch.recipe.phases import Rollout
from retouch.recipe.policy import AutoregressivePolicyKeys, DenoisingPolicyKeys
from retouch.recipe.recipe import Recipe

if TYPE_CHECKING:
    from retouch.policies.autoregressive.policy import AutoregressivePolicy

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TrainedPolicy: TypeAlias = "DenoisingPolicy | AutoregressivePolicy"
TrainedModel: TypeAlias = DenoisingModel | AutoregressiveModel


def build_models(recipe: Recipe, placement: Placement) -> tuple[TrainedModel, TrainedModel]:
    """The model that trains and the model that makes the images, which is another one for policies of text.

    Weights that both need are held once.
    """
    policy = recipe.policy
    if isinstance(policy, DenoisingPolicyKeys):
        model = _with_references(policy, policy.model.build(device=placement.policy), placement)
        return model, model
    assert recipe.renderer is not None, "the recipe's checks ensure it"
    return recipe.renderer.load(
        lambda: policy.model.build(device=placement.policy, gradient_checkpointing=policy.gradient_checkpointing),
        device=torch.device("cpu") if placement.offload else placement.renderer,
        base_frozen=isinstance(policy.train, Lora),
    )


def _with_references(policy: DenoisingPolicyKeys, model: DenoisingModel, placement: Placement) -> DenoisingModel:
    """The model, with reference images as an input if an IP-Adapter trains."""
    if not isinstance(policy.train, IpAdapter):
        return model
    assert isinstance(policy.model, DiffusersModel), "the recipe's checks ensure it"
    return policy.train.with_references(model, dtype=DTYPES[policy.model.dtype], device=placement.policy)


def make_trainable(
    module: nn.Module,
    policy: DenoisingPolicyKeys | AutoregressivePolicyKeys,
    *,
    seed: int,
    copy_devices: Mapping[str, torch.device] | None = None,
) -> WeightCopies:
    """Let train what the recipe says, and freeze the rest of the module. ``copy_devices``: see ``WeightCopies``."""
    policy.train.make_trainable(module, targets=policy.model.lora_targets, seed=seed)
    if policy.gradient_checkpointing and isinstance(policy, DenoisingPolicyKeys):
        # A module without it raises its own clear error.
        module.enable_gradient_checkpointing()  # type: ignore[operator]
    return WeightCopies(module, devices=copy_devices)


def lora_targets(policy: DenoisingPolicyKeys | AutoregressivePolicyKeys) -> Sequence[str]:
    """The linear layers that get an adapter, as endings of their paths. Raises ValueError if nothing names them."""
    assert policy.train.lora is not None
    return policy.train.lora.layers(policy.model.lora_targets)


def build_policy(
    recipe: Recipe,
    rollout: Rollout,
    *,
    model: DenoisingModel | AutoregressiveModel,
    copies: WeightCopies,
    acting: Literal["current", "old"],
    keep_means: bool,
    engine: Engine | None = None,
    any_rank: Callable[[bool], bool] = bool,
    in_step: bool = False,
    head: LatentValues | TokenValues | None = None,
) -> TrainedPolicy:
    """The policy that samples as ``rollout`` says, under the weights ``acting``.

    ``engine``: what generates the completions of a policy of tokens; None is its own cache. ``any_rank``: whether a flag is true on
    at least one rank. ``in_step``: all ranks must call the model equally often. ``head``: a value head of this policy's kind.
    """
    if isinstance(rollout, TokenRollout):
        assert not isinstance(model, DenoisingModel)
        assert not isinstance(recipe.policy, DenoisingPolicyKeys)
        assert not isinstance(head, LatentValues)
        from retouch.policies.autoregressive.policy import AutoregressivePolicy

        return AutoregressivePolicy(
            model,
            sampling=rollout,
            microbatch=recipe.microbatch,
            copies=copies,
            logits_at_once=recipe.policy.logits_at_once,
            mask_truncated=recipe.policy.mask_truncated,
            engine=engine,
            any_rank=any_rank,
            in_step=in_step,
            head=head,
        )
    assert isinstance(model, DenoisingModel)
    assert not isinstance(head, TokenValues)
    train = recipe.policy.train
    return DenoisingPolicy(
        Guided(model, rollout.guidance_scale) if rollout.guidance_scale > 1 else model,
        sampling=rollout,
        acting=acting,
        eval_steps=recipe.eval.num_steps or rollout.num_steps,
        microbatch=recipe.microbatch,
        copies=copies,
        keep_means=keep_means,
        head=head,
        reference_dropout=train.dropout if isinstance(train, IpAdapter) else 0.0,
    )
