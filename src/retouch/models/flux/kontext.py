"""FLUX.1-Kontext: a picture is edited as the words say. The source's tokens follow the noise, as picture 1."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor

from retouch.models.common.latents import Size
from retouch.models.flux.model import Flux, places
from retouch.types import Conditioning, Task


class FluxKontext(Flux):
    """``size``: (height, width) of the output in px; None takes the source's, brought to the nearest size that it was trained at.

    ``source_as_is``: the source stays at its own size, cut to whole tokens. ValueError for a task without exactly one picture, and
    where sizes differ between tasks.
    """

    GUIDANCE: ClassVar[float] = 3.5
    source_as_is: bool = False

    def _pictures(self, tasks: Sequence[Task]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        for task in tasks:
            if len(task.images) != 1:
                raise ValueError(f"task {task.id!r} has {len(task.images)} pictures; FluxKontext takes one")
        sources = {self._trained_at(task.images[0]) for task in tasks}
        if len(sources) != 1:
            raise ValueError(f"source pictures of different sizes in one batch: {sorted(sources)}; bucket the tasks by size")
        source = sources.pop()
        tokens = self.latents.encode(self.latents.pixels([task.images[0] for task in tasks], source))
        return {"source": tokens}, {"size": source if self.size is None else self.size, "source": source}

    def _trained_at(self, image: Image) -> Size:
        width, height = image.size
        if not self.source_as_is:
            _, width, height = min((abs(width / height - w / h), w, h) for w, h in PREFERRED_KONTEXT_RESOLUTIONS)
        side = self.latents.token_pixels
        return height // side * side, width // side * side

    def _input(self, x: Float[Tensor, "r s d"], conditioning: Conditioning) -> tuple[Float[Tensor, "r t e"], Float[Tensor, "t 3"]]:
        shared = conditioning.shared
        own, other = self.latents.grid(shared["size"]), self.latents.grid(shared["source"])
        return torch.cat([x, conditioning.tensors["source"]], dim=1), torch.cat([places(own), places(other, picture=1)])

    def encode_images(self, images: Sequence[Image]) -> Float[Tensor, "r s d"]:
        sizes = {self._trained_at(image) for image in images} if self.size is None else {self.size}
        if len(sizes) != 1:
            raise ValueError(f"pictures of different sizes in one batch: {sorted(sizes)}; bucket them by size")
        return self.latents.encode(self.latents.pixels(images, sizes.pop()))
