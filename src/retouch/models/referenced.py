"""A flow-matching model that is also shown a task's reference picture, through an IP-Adapter on its transformer."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor, nn

from retouch.models.image_encoder import ImageEncoder
from retouch.types import Conditioning, DenoisingModel, Task


class Referenced:
    """``model``, told of each task's reference too; it is itself a ``DenoisingModel``.

    The unconditional branch of guidance has a reference of zeros, which is what dropout in supervised learning shows as well.
    ValueError for a task without a reference.
    """

    def __init__(self, model: DenoisingModel, encoder: ImageEncoder) -> None:
        self.model = model
        self.module: nn.Module = model.module
        self.encoder = encoder

    def encode(self, tasks: Sequence[Task]) -> Conditioning:
        references = []
        for task in tasks:
            if task.reference is None:
                raise ValueError(f"task {task.id!r} has no reference picture, which an IP-Adapter reads; give the data one")
            references.append(task.reference)
        return _told(self.model.encode(tasks), self.encoder.embed(references))

    def encode_negative(self, tasks: Sequence[Task]) -> Conditioning:
        return _told(self.model.encode_negative(tasks), torch.zeros(len(tasks), self.encoder.width))

    def velocity(self, module: nn.Module, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Float[Tensor, "r ..."]:
        return self.model.velocity(module, x, sigma, conditioning)

    def combine(self, positive: Tensor, negative: Tensor, guidance_scale: float) -> Tensor:
        return self.model.combine(positive, negative, guidance_scale)

    def initial_noise(self, conditioning: Conditioning, generators: Sequence[torch.Generator]) -> Float[Tensor, "r ..."]:
        return self.model.initial_noise(conditioning, generators)

    def sigmas(self, num_steps: int, conditioning: Conditioning) -> Float[Tensor, " num_steps_plus_1"]:
        return self.model.sigmas(num_steps, conditioning)

    def encode_images(self, images: Sequence[Image]) -> Float[Tensor, "r ..."]:
        return self.model.encode_images(images)

    def decode(self, x: Tensor, conditioning: Conditioning) -> list[Image]:
        return self.model.decode(x, conditioning)


def _told(conditioning: Conditioning, embeds: Float[Tensor, "p d"]) -> Conditioning:
    device = next(iter(conditioning.tensors.values())).device
    return replace(conditioning, tensors={**conditioning.tensors, Conditioning.REFERENCE: embeds.to(device)})
