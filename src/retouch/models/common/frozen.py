"""Runs frozen modules in eval mode and without gradient, and restores their mode afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Eval mode (no dropout) and no gradient inside the block; each module's mode is restored at its end."""
    training = [module for module in modules if module.training]
    for module in training:
        module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.train()
