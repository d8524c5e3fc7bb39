"""The models of a recipe, and what of them trains."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn

from retouch.distributed.placement import Placement
from retouch.policies.denoising.policy import DenoisingPolicy
from retouch.policies.weights import WeightCopies
from retouch.protocols import AutoregressiveModel, DenoisingModel
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
    if recipe.renderer is None:
        model = policy.build_model(device=placement.policy)
        return model, model
    assert isinstance(policy, AutoregressivePolicyKeys), "the recipe's checks ensure it"
    return recipe.renderer.load(
        partial(policy.build_model, device=placement.policy),
        device=torch.device("cpu") if placement.offload else placement.renderer,
        base_frozen=policy.train.reference_is_base,
    )


def make_trainable(
    module: nn.Module,
    policy: DenoisingPolicyKeys | AutoregressivePolicyKeys,
    *,
    seed: int,
    copy_devices: Mapping[str, torch.device] | None = None,
) -> WeightCopies:
    """Let train what the recipe says, and freeze the rest of the module. ``copy_devices``: see ``WeightCopies``."""
    policy.make_trainable(module, seed=seed)
    return WeightCopies(module, devices=copy_devices)


def lora_targets(policy: DenoisingPolicyKeys | AutoregressivePolicyKeys) -> Sequence[str]:
    """The linear layers that get an adapter, as endings of their paths. Raises ValueError if nothing names them."""
    assert policy.train.lora is not None
    return policy.train.lora.layers(policy.model.lora_targets)
