"""A flow-matching model around another one: what it does not do in its own way, the inner model does."""

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor, nn

from retouch.protocols import DenoisingModel
from retouch.types import Conditioning, Task

Inner = TypeVar("Inner", bound=DenoisingModel)


class ModelWrapper(Generic[Inner]):
    """``model`` as it is, to be derived from; it is itself a ``DenoisingModel``."""

    def __init__(self, model: Inner) -> None:
        self.model = model
        self.module: nn.Module = model.module

    def encode(self, tasks: Sequence[Task]) -> Conditioning:
        return self.model.encode(tasks)

    def encode_negative(self, tasks: Sequence[Task]) -> Conditioning:
        return self.model.encode_negative(tasks)

    def combine(self, positive: Tensor, negative: Tensor, guidance_scale: float) -> Tensor:
        return self.model.combine(positive, negative, guidance_scale)

    def initial_noise(self, conditioning: Conditioning, generators: Sequence[torch.Generator]) -> Float[Tensor, "r ..."]:
        return self.model.initial_noise(conditioning, generators)

    def sigmas(self, num_steps: int, conditioning: Conditioning) -> Float[Tensor, " num_steps_plus_1"]:
        return self.model.sigmas(num_steps, conditioning)

    def velocity(self, module: nn.Module, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Float[Tensor, "r ..."]:
        return self.model.velocity(module, x, sigma, conditioning)

    def encode_images(self, images: Sequence[Image]) -> Float[Tensor, "r ..."]:
        return self.model.encode_images(images)

    def decode(self, x: Tensor, conditioning: Conditioning) -> list[Image]:
        return self.model.decode(x, conditioning)
