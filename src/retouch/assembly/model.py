"""Properties of a recipe's policy that memory plans need: the dtypes of its weights, and the layers that get adapters."""

from collections.abc import Sequence

import torch

from retouch.recipe.policy import AutoregressivePolicyKeys, DenoisingPolicyKeys

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def lora_targets(policy: DenoisingPolicyKeys | AutoregressivePolicyKeys) -> Sequence[str]:
    """Return the linear layers that get an adapter, as suffixes of their paths. Raises ValueError if no layers are given."""
    assert policy.train.lora is not None
    return policy.train.lora.layers(policy.model.lora_targets)
