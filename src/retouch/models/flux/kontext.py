"""FLUX.1-Kontext edits an image by an instruction. The source's tokens come after the noise and have image index 1."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor

from retouch.models.common.latents import Size
from retouch.models.common.pipeline_model import common_size
from retouch.models.flux.model import Flux, positions
from retouch.types import Conditioning, Task


class FluxKontext(Flux):
    """FLUX.1-Kontext. ``size``: (height, width) of the output in px; None takes the size to which the source is resized (``fit``).

    ``source_as_is``: the source keeps its own size, rounded down to whole tokens. Raises ``ValueError`` for a task without exactly
    one image, and if sizes differ between tasks.

    Source: FLUX.1 Kontext (arXiv 2506.15742) and diffusers' FluxKontextPipeline.
    """

    GUIDANCE: ClassVar[float] = 3.5
    source_as_is: bool = False

    def with_images(self, tasks: Sequence[Task], tensors: Mapping[str, Tensor]) -> Conditioning:
        for task in tasks:
            if len(task.images) != 1:
                raise ValueError(f"task {task.id!r} has {len(task.images)} images; FluxKontext takes one")
        source = common_size([self.fit(task.images[0]) for task in tasks], tasks)
        size = source if self.size is None else self.size
        return self.conditioning(tensors, size=size, images=[task.images for task in tasks], sizes=[source])

    def fit(self, image: Image) -> Size:
        """Return the training size with the nearest aspect ratio (``source_as_is``: the image's size), rounded to whole tokens."""
        width, height = image.size
        if not self.source_as_is:
            _, width, height = min((abs(width / height - w / h), w, h) for w, h in PREFERRED_KONTEXT_RESOLUTIONS)
        side = self.latents.token_pixels
        return height // side * side, width // side * side

    def _input(self, x: Float[Tensor, "r s d"], conditioning: Conditioning) -> tuple[Float[Tensor, "r t e"], Float[Tensor, "t 3"]]:
        output, source = (self.latents.grid(size) for size in (conditioning.shared["size"], *conditioning.shared["sources"]))
        tokens = torch.cat([x, conditioning.tensors["source"]], dim=1)
        return tokens, torch.cat([positions(output), positions(source, image=1)])
