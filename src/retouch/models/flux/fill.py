"""FLUX.1-Fill: the masked part of a picture is made anew.

Beside each token of the noise (64 channels) the transformer reads the picture without its masked part (64) and the mask (256).
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from retouch.models.flux.latents import FluxLatents
from retouch.models.flux.model import Flux, places
from retouch.types import Conditioning, Task


class FluxFill(Flux):
    """``size``: (height, width) in px that source and mask are resized to; None takes the source's own.

    ValueError for a task without exactly one picture, or without a mask; and where sizes differ between tasks.
    """

    GUIDANCE: ClassVar[float] = 30.0

    @classmethod
    def _channels(cls, latents: FluxLatents) -> int:
        return 2 * super()._channels(latents) + 4 * latents.latent_pixels**2

    def _pictures(self, tasks: Sequence[Task]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        masks = []
        for task in tasks:
            if len(task.images) != 1 or task.mask is None:
                having = f"{len(task.images)} pictures and {'a' if task.mask is not None else 'no'} mask"
                raise ValueError(f"task {task.id!r} has {having}; FluxFill takes one picture and a mask")
            masks.append(task.mask)
        sizes = {(task.images[0].height, task.images[0].width) for task in tasks} if self.size is None else {self.size}
        if len(sizes) != 1:
            raise ValueError(f"source pictures of different sizes in one batch: {sorted(sizes)}; bucket the tasks by size")
        size = sizes.pop()
        mask = self.latents.mask(masks, size)
        kept = self.latents.encode(self.latents.pixels([task.images[0] for task in tasks], size) * (1 - mask))
        return {"source": torch.cat([kept, self.latents.pack_mask(mask).to(kept.device)], dim=2)}, {"size": size}

    def _input(self, x: Float[Tensor, "r s d"], conditioning: Conditioning) -> tuple[Float[Tensor, "r t e"], Float[Tensor, "t 3"]]:
        return torch.cat([x, conditioning.tensors["source"]], dim=2), places(self.latents.grid(conditioning.shared["size"]))
