"""What plans of memory read from a recipe's policy: the types of its weights, and its layers with adapters."""

from collections.abc import Sequence

import torch

from retouch.recipe.policy import AutoregressivePolicyKeys, DenoisingPolicyKeys

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def lora_targets(policy: DenoisingPolicyKeys | AutoregressivePolicyKeys) -> Sequence[str]:
    """The linear layers that get an adapter, as endings of their paths. Raises ValueError if nothing names them."""
    assert policy.train.lora is not None
    return policy.train.lora.layers(policy.model.lora_targets)
