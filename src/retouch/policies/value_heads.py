"""Value heads: small networks that predict the reward before each action.

A value head trains together with the policy but is not part of it. For tokens it reads the policy's last hidden states, which an
evaluation computes anyway. Denoising models have no hidden state that is the same in all families, so their value head reads the
state of the chain: sigma, and the mean and standard deviation of each channel of latents and conditioning. These inputs need no
forward pass of the transformer, and the input for a given state does not change as the policy trains.

An untrained value head predicts 0 everywhere.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from retouch.core.random import generator
from retouch.types import Conditioning


class _Network(nn.Module):
    """Two linear layers: (..., features) to (...). All ranks start with the same weights."""

    def __init__(self, features: int, *, width: int, seed: int) -> None:
        super().__init__()
        self.inner = nn.Linear(features, width)
        self.outer = nn.Linear(width, 1)
        with torch.no_grad():
            drawn = torch.randn(width, features, generator=generator(seed, "value head"))
            self.inner.weight.copy_(drawn / math.sqrt(features))
            for zeroed in (self.inner.bias, self.outer.weight, self.outer.bias):
                zeroed.zero_()

    def forward(self, features: Float[Tensor, "*b f"]) -> Float[Tensor, "*b"]:
        made: Tensor = self.outer(F.silu(self.inner(features))).squeeze(-1)
        return made


class TokenValues(nn.Module):
    """Values from the hidden states before tokens, (n, d) to (n,), with layer norm.

    ``coefficient``: the factor of the value loss's gradient in the policy's weights; with 0 only the value head learns.
    """

    def __init__(self, features: int, *, width: int, seed: int, coefficient: float = 0.0) -> None:
        super().__init__()
        self.network = _Network(features, width=width, seed=seed)
        self.coefficient = coefficient

    def forward(self, states: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        seen = states.detach().float()
        if self.coefficient:
            seen = seen + self.coefficient * (states.float() - seen)
        values: Tensor = self.network(F.layer_norm(seen, seen.shape[-1:]))
        return values


class LatentValues(nn.Module):
    """Values from latents with ``channels`` channels, sigma and conditioning.

    ``sampled``: ``summary`` of the conditioning of some tasks, (n, f), whose mean and standard deviation standardise each feature.
    The features of different tasks are almost equal; standardising makes their differences visible to the value head.
    """

    centre: Tensor
    spread: Tensor

    def __init__(self, channels: int, sampled: Float[Tensor, "n f"], *, width: int, seed: int) -> None:
        super().__init__()
        spread = sampled.std(0, correction=0)
        self.register_buffer("centre", sampled.mean(0))
        self.register_buffer("spread", spread.clamp(min=1e-6 + 0.1 * float(spread.mean() if len(spread) else 0.0)))
        self.network = _Network(2 * channels + sampled.shape[1] + 1, width=width, seed=seed)

    def forward(self, x: Float[Tensor, "r t ..."], sigma: Float[Tensor, " t"], task: Float[Tensor, "r f"]) -> Float[Tensor, "r t"]:
        rows, actions = x.shape[:2]
        of_task = ((task - self.centre) / self.spread).clamp(-5.0, 5.0)[:, None].expand(rows, actions, -1)
        state = _mean_and_spread(_sequence(x.flatten(0, 1))).unflatten(0, (rows, actions))
        values: Tensor = self.network(torch.cat([state, of_task, sigma.expand(rows, actions)[..., None]], dim=2))
        return values


def summary(conditioning: Conditioning) -> Float[Tensor, "p f"]:
    """Features (p, f) of each task's conditioning: mean and standard deviation of each channel of each embedding.

    Padding and masks are left out.
    """
    found = []
    for name, tensor in conditioning.tensors.items():
        if tensor.is_floating_point() and tensor.dim() == 2:
            found.append(tensor.float())
        elif tensor.is_floating_point() and tensor.dim() > 2:
            rows = _sequence(tensor.float())
            there = (rows != 0).any(2) if name in conditioning.padded else None
            found.append(_mean_and_spread(rows, there))
    count = len(next(iter(conditioning.tensors.values())))
    return torch.cat(found, dim=1) if found else torch.zeros(count, 0)


def _sequence(x: Float[Tensor, "r ..."]) -> Float[Tensor, "r n c"]:
    """Bring x to positions and channels (n, c), the layout of packed tokens; latents (c, h, w) have their channels first."""
    return x if x.dim() == 3 else x.flatten(2).transpose(1, 2)


def _mean_and_spread(rows: Float[Tensor, "r n c"], there: Bool[Tensor, "r n"] | None = None) -> Float[Tensor, "r f"]:
    """Mean and standard deviation of each channel over the positions where ``there`` is True."""
    weights = torch.ones_like(rows[..., :1]) if there is None else there[..., None].float()
    count = weights.sum(1).clamp(min=1)
    mean = (rows * weights).sum(1) / count
    spread = (((rows - mean[:, None]) * weights).square().sum(1) / count).sqrt()
    return torch.cat([mean, spread], dim=1)


def channels_of(x: Float[Tensor, "r ..."]) -> int:
    """The number of channels of the states ``x``, packed tokens or latents."""
    return int(x.shape[2] if x.dim() == 3 else x.shape[1])
