"""Gradient checkpointing of a transformers model without its training mode: layers are recomputed, dropout stays off.

transformers recomputes a layer where the layer itself is in training mode; by its own switch, train(), that would be its parts
too, with their dropout.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


@contextmanager
def recomputing(module: nn.Module, *, on: bool) -> Iterator[None]:
    """Where ``on``, forwards inside the block keep only each layer's input. The backward pass may run outside of it."""
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
