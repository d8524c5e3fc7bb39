"""The shared part of forward-process objectives: points between data and noise, and the fields that control how they are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from retouch.config.section import Count, Positive
from retouch.objectives.base import Objective
from retouch.types import Batch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class ForwardProcess(Objective):
    """An objective that evaluates velocities at points x_sigma = (1 - sigma) x0 + sigma * noise.

    With s ``uniform`` on (0, 1), or ``logit_normal`` (the logistic of a standard normal), sigma = shift s / (1 + (shift - 1) s)
    (Esser et al. 2024, arXiv 2403.03206).
    """

    sigma_sampling: Literal["logit_normal", "uniform"] = "uniform"
    """How sigma is drawn between 0 (data) and 1 (noise)."""
    shift: Positive = 1.0
    """Values above 1 draw sigma closer to 1. Small images need this, because the prompt matters only at sigmas close to 1."""

    def draw_points(
        self,
        x0: Float[Tensor, "r ..."],
        batch: Batch,
        rows: slice,
        *,
        purpose: str,
        epoch: int,
        draw: int,
        noise: Float[Tensor, "r ..."] | None = None,
    ) -> tuple[Float[Tensor, "r ..."], Float[Tensor, "r ..."], Float[Tensor, " r"]]:
        """Call the function ``draw_points`` with this objective's distribution of sigma."""
        return draw_points(
            x0,
            batch,
            rows,
            purpose=purpose,
            epoch=epoch,
            draw=draw,
            sigma_sampling=self.sigma_sampling,
            shift=self.shift,
            noise=noise,
        )


class SampledPoints(ForwardProcess):
    """A ``ForwardProcess`` that draws several points per image."""

    samples: Count = 1
    """Number of points (noise and sigma) drawn per image (per pair for ``dpo``)."""


def squared_distance(velocity: Float[Tensor, "r ..."], target: Float[Tensor, "r ..."]) -> Float[Tensor, " r"]:
    """Mean squared difference of two velocities over a latent's elements."""
    return (velocity - target).square().flatten(1).mean(dim=1)


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
    noise: Float[Tensor, "r ..."] | None = None,
) -> tuple[Float[Tensor, "r ..."], Float[Tensor, "r ..."], Float[Tensor, " r"]]:
    """One point of the forward process for each row: (x_sigma, noise, sigma), with sigma in [1e-4, 1].

    Draws are keyed by (seed, purpose, step, group, slot, epoch, draw). For ``sigma_sampling`` and ``shift`` see ``ForwardProcess``.
    ``noise``: the noise of each row, in place of drawn noise; sigma is the same with and without it.

    Source: flow matching with straight paths (Lipman et al. 2023, arXiv 2210.02747; rectified flow, arXiv 2209.03003).
    """
    import torch

    from retouch.core.random import generator

    noises, sigmas = [], []
    for group, slot in zip(batch.group[rows], batch.slot[rows], strict=True):
        key = generator(batch.seed, purpose, batch.step, batch.group_ids[group], slot, epoch, draw)
        drawn = torch.rand((), generator=key) if sigma_sampling == "uniform" else torch.sigmoid(torch.randn((), generator=key))
        sigmas.append(drawn)
        if noise is None:
            noises.append(torch.randn(x0.shape[1:], generator=key))
    noise = torch.stack(noises).to(x0.device) if noise is None else noise
    sigma = torch.stack(sigmas).to(x0.device)
    sigma = (shift * sigma / (1 + (shift - 1) * sigma)).clamp(1e-4, 1.0)
    spread = sigma.view(-1, *[1] * (x0.dim() - 1))
    return (1 - spread) * x0 + spread * noise, noise, sigma
