"""What trains of the model that a recipe names."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from retouch.policies.weights import WeightCopies
from retouch.recipe.policy import AutoregressivePolicyKeys, DenoisingPolicyKeys

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
