"""What the forward-process objectives share: drawing noised points on the way from data to noise."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from retouch.core.random import generator
from retouch.types import Batch


def draw_points(
    x0: Float[Tensor, "r ..."],
    batch: Batch,
    rows: slice,
    *,
    purpose: str,
    epoch: int,
    draw: int,
    sigma_sampling: Literal["uniform", "logit_normal"],
    shift: float,
) -> tuple[Float[Tensor, "r ..."], Float[Tensor, "r ..."], Float[Tensor, " r"]]:
    """One point of the forward process for each row: (x_sigma, noise, sigma), keyed by (seed, step, group, slot, epoch, draw).

    x_sigma = (1 - sigma) x0 + sigma * noise. ``sigma_sampling``: s ``uniform`` on (0, 1), or ``logit_normal`` (the logistic of a
    standard normal); then sigma = shift s / (1 + (shift - 1) s). Where a picture is small its noised latent shows what it is
    until sigma is close to 1, so that only there the text is needed: a ``shift`` above 1 goes there more often (Esser et al. 2024).
    """
    noises, sigmas = [], []
    for group, slot in zip(batch.group[rows], batch.slot[rows], strict=True):
        key = generator(batch.seed, purpose, batch.step, batch.group_ids[group], slot, epoch, draw)
        drawn = torch.rand((), generator=key) if sigma_sampling == "uniform" else torch.sigmoid(torch.randn((), generator=key))
        sigmas.append(drawn)
        noises.append(torch.randn(x0.shape[1:], generator=key))
    noise = torch.stack(noises).to(x0.device)
    sigma = torch.stack(sigmas).to(x0.device)
    sigma = (shift * sigma / (1 + (shift - 1) * sigma)).clamp(1e-4, 1.0)
    spread = sigma.view(-1, *[1] * (x0.dim() - 1))
    return (1 - spread) * x0 + spread * noise, noise, sigma


def mismatch(velocity: Float[Tensor, "r ..."], wanted: Float[Tensor, "r ..."]) -> Float[Tensor, " r"]:
    """Mean squared difference of two velocities over a latent's elements."""
    return (velocity - wanted).square().flatten(1).mean(dim=1)
