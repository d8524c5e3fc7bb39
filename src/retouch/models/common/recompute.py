"""Gradient checkpointing (arXiv 1604.06174) of a transformers model in eval mode, so that dropout stays off.

transformers recomputes a layer only if the layer is in training mode. ``train()`` would also switch its submodules, and with them
dropout, so only the flag of the layer itself is set.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


@contextmanager
def recomputing(module: nn.Module, *, on: bool) -> Iterator[None]:
    """If ``on``, forward passes inside the block keep only each layer's input. The backward pass may run outside of the block.

    Source: Chen et al. 2016 (arXiv 1604.06174).
    """
    layers = [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)] if on else []
    before = [layer.training for layer in layers]
    for layer in layers:
        layer.gradient_checkpointing = layer.training = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    try:
        yield
    finally:
        for layer, training in zip(layers, before, strict=True):
            layer.gradient_checkpointing, layer.training = False, training
