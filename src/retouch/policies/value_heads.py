"""Value heads: small networks that say, before each action, what reward is to be expected.

A head trains beside the policy and is no part of it. For tokens it reads the policy's own last hidden states, which an evaluation
computes anyway. A denoiser has none that were one thing in all of its families, so its head reads the state itself: the mean and
spread of each latent channel, sigma, and the mean of each of the conditioning's embeddings. That asks nothing of the transformer,
neither in a rollout nor in an update, and what it says of a state does not change as the policy does.

A head that has learned nothing says 0 everywhere.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from retouch.core.random import generator
from retouch.types import Conditioning


class _Network(nn.Module):
    """Two layers: (..., features) to (...). All ranks begin with the same weights."""

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
    """Values from the states before tokens, each normalised first.

    ``coefficient``: the share of the value loss's gradient that goes on into the policy; 0 lets the head learn alone.
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
    """Values from latents, sigma and conditioning. ``channels`` of the latents, ``told`` numbers of the conditioning."""

    def __init__(self, channels: int, told: int, *, width: int, seed: int) -> None:
        super().__init__()
        self.network = _Network(2 * channels + told + 1, width=width, seed=seed)

    def forward(self, x: Float[Tensor, "r t ..."], sigma: Float[Tensor, " t"], told: Float[Tensor, "r f"]) -> Float[Tensor, "r t"]:
        rows, actions = x.shape[:2]
        of_task = told[:, None].expand(rows, actions, -1)
        values: Tensor = self.network(torch.cat([_looks(x), of_task, sigma.expand(rows, actions)[..., None]], dim=2))
        return values


def summary(conditioning: Conditioning) -> Float[Tensor, "p f"]:
    """A task's conditioning in few numbers: each embedding's mean over its sequence, normalised; masks and the like are left out.

    What a sequence is padded with does not count.
    """
    found = [_mean(tensor, padded=name in conditioning.padded) for name, tensor in conditioning.tensors.items() if _says(tensor)]
    rows = len(next(iter(conditioning.tensors.values())))
    return torch.cat(found, dim=1) if found else torch.zeros(rows, 0)


def _says(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dim() >= 2


def _mean(tensor: Tensor, *, padded: bool) -> Float[Tensor, "p d"]:
    rows = tensor.float()
    if rows.dim() == 4:  # pictures, (p, c, h, w)
        rows = rows.flatten(2).transpose(1, 2)
    if rows.dim() > 2:
        there = (rows != 0).any(-1, keepdim=True) if padded else torch.ones_like(rows[..., :1], dtype=torch.bool)
        rows = rows.sum(1) / there.sum(1).clamp(min=1)
    return F.layer_norm(rows, rows.shape[1:])


def _looks(x: Float[Tensor, "r t ..."]) -> Float[Tensor, "r t f"]:
    """Mean and spread of each channel: packed tokens (n, c) have it last, latents (c, h, w) first."""
    channels = x.transpose(2, 3) if x.dim() == 4 else x.flatten(3)
    return torch.cat([channels.mean(-1), channels.std(-1, correction=0)], dim=2)


def channels_of(x: Float[Tensor, "r ..."]) -> int:
    """How many channels one state has, in either layout."""
    return int(x.shape[2] if x.dim() == 3 else x.shape[1])
