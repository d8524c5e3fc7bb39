"""Which weights of a model FSDP2 shards, and which stay whole on every rank."""

from typing import Any

from torch import nn


def sharded_root(module: nn.Module) -> nn.Module:
    """The submodule that holds all blocks and is called as a whole: a language model's decoder, otherwise the module itself."""
    inner: Any = module
    if hasattr(module, "get_output_embeddings") and hasattr(module, "model"):
        inner = getattr(module.model, "language_model", module.model)
    found: nn.Module = inner
    return found


def called_separately(module: nn.Module) -> set[nn.Parameter]:
    """Weights that are called on their own and are not in a block: a language model's embeddings, an IP-Adapter's projection."""
    made: Any = module
    if sharded_root(module) is module:
        return {weight for name, weight in module.named_parameters() if name.startswith("encoder_hid_proj.")}
    parts = made.get_input_embeddings(), made.get_output_embeddings()
    return {part.weight for part in parts if getattr(part, "weight", None) is not None}


def whole_weights(module: nn.Module) -> list[nn.Parameter]:
    """The weights that stay whole on every rank: those called separately, and those outside the root, such as a vision tower."""
    separate = called_separately(module)
    inside = set(sharded_root(module).parameters()) - separate
    return [weight for weight in module.parameters() if weight not in inside]
