"""The trajectory of a denoising policy: the states of the chain around its actions, and the final latents."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from retouch.types import Conditioning, Kind, Trajectory


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DenoisingTrajectory(Trajectory):
    """The trajectory of a denoising policy. ``latents``: the fp32 states before each action and after the last action.

    ``group``: for each row, the index of its task in ``conditioning``. ``means``: the means of the transitions, if RatioNorm needs
    them. ``sigmas``: the whole schedule. ``first``: the number of the denoising step that is action 0. Without transitions,
    ``latents`` is a single state (b, 1, ...), the state before step ``first``: the end of the chain, or the state that was kept for
    the loss: for a gradient through the steps after it, or the initial noise. ``deviations``: for chains that an engine sampled,
    the mean squared distance between the engine's and the policy's means, in units of the variance of the step; else None.
    """

    latents: Float[Tensor, "b t_plus_1 ..."]
    means: Float[Tensor, "b t ..."] | None
    sigmas: Float[Tensor, " n_plus_1"]
    first: int
    conditioning: Conditioning
    group: Int[Tensor, " b"]
    deviations: Float[Tensor, "b t"] | None = None

    @classmethod
    def of_images(cls, x: Tensor, *, sigmas: Tensor, conditioning: Conditioning, group: Tensor) -> "DenoisingTrajectory":
        """A trajectory without transitions: each row of clean latents ``x`` is one action without a log-probability."""
        log_probs = x.new_full((len(x), 1), torch.nan)
        return cls(
            log_probs=log_probs,
            mask=torch.ones_like(log_probs, dtype=torch.bool),
            kind=torch.full_like(log_probs, Kind.IMAGE, dtype=torch.long),
            outputs=x,
            latents=x.unsqueeze(1),
            means=None,
            sigmas=sigmas,
            first=len(sigmas) - 1,
            conditioning=conditioning,
            group=group,
        )

    def take(self, rows: slice | Int[Tensor, " r"]) -> "DenoisingTrajectory":
        return replace(
            self,
            log_probs=self.log_probs[rows],
            mask=self.mask[rows],
            kind=self.kind[rows],
            outputs=self.outputs[rows],
            latents=self.latents[rows],
            means=None if self.means is None else self.means[rows],
            group=self.group[rows],
            values=None if self.values is None else self.values[rows],
            behaviour_log_probs=None if self.behaviour_log_probs is None else self.behaviour_log_probs[rows],
            deviations=None if self.deviations is None else self.deviations[rows],
        )

    @classmethod
    def concat(cls, parts: "Sequence[DenoisingTrajectory]") -> "DenoisingTrajectory":  # type: ignore[override]
        offsets, total = [], 0
        for part in parts:
            offsets.append(total)
            total += int(next(iter(part.conditioning.tensors.values())).shape[0])
        means = [part.means for part in parts if part.means is not None]
        values = [part.values for part in parts if part.values is not None]
        behaviour = [part.behaviour_log_probs for part in parts if part.behaviour_log_probs is not None]
        deviations = [part.deviations for part in parts if part.deviations is not None]
        return cls(
            log_probs=torch.cat([part.log_probs for part in parts]),
            mask=torch.cat([part.mask for part in parts]),
            kind=torch.cat([part.kind for part in parts]),
            outputs=torch.cat([part.outputs for part in parts]),
            latents=torch.cat([part.latents for part in parts]),
            means=torch.cat(means) if means else None,
            sigmas=parts[0].sigmas,
            first=parts[0].first,
            conditioning=Conditioning.concat([part.conditioning for part in parts]),
            group=torch.cat([part.group + offset for part, offset in zip(parts, offsets, strict=True)]),
            values=torch.cat(values) if values else None,
            behaviour_log_probs=torch.cat(behaviour) if behaviour else None,
            deviations=torch.cat(deviations) if deviations else None,
        )
