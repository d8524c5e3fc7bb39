"""From clean latents to pictures, through the model's own decoder."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from PIL.Image import Image
from torch import Tensor

from retouch.protocols import DenoisingModel
from retouch.types import Conditioning, Task


@runtime_checkable
class Denoised(Protocol):
    """What this renderer reads of a trajectory."""

    @property
    def outputs(self) -> Tensor: ...

    @property
    def conditioning(self) -> Conditioning: ...


class LatentRenderer:
    """Decodes a denoising policy's outputs; latents that are not finite are the policy's own fault and give None."""

    def __init__(self, model: DenoisingModel) -> None:
        self.model = model

    @torch.no_grad()
    def __call__(self, tasks: Sequence[Task], trajectory: Denoised) -> list[Image | None]:
        x = trajectory.outputs
        finite = x.flatten(1).isfinite().all(dim=1)
        if not finite.any():
            return [None] * len(x)
        drawn = iter(self.model.decode(x[finite], trajectory.conditioning))
        return [next(drawn) if usable else None for usable in finite.tolist()]
