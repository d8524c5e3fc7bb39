"""Wrappers of flow-matching models: the inner model handles every method that a wrapper does not override."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor, nn

from retouch.protocols import DecodesTensors, DenoisingModel
from retouch.types import Conditioning, Task

Inner = TypeVar("Inner", bound=DenoisingModel)


class ModelWrapper(Generic[Inner]):
    """Base class of wrappers: passes every call to ``model`` unless a subclass overrides it. It is itself a ``DenoisingModel``."""

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

    def decode_tensors(self, x: Tensor, conditioning: Conditioning) -> Float[Tensor, "r 3 h w"]:
        if not isinstance(self.model, DecodesTensors):
            raise ValueError(f"{type(self.model).__name__} has no decode_tensors (retouch.protocols.DecodesTensors)")
        return self.model.decode_tensors(x, conditioning)


class Guided(ModelWrapper[DenoisingModel]):
    """A model whose velocity is guided at ``guidance_scale`` (above 1); it is itself a ``DenoisingModel``.

    Both branches are computed in one forward pass with twice the rows, and both have gradient (Ho & Salimans 2022, arXiv
    2207.12598). The model's own ``combine`` combines them. Texts of unequal length need a mask in a joint forward pass, and 16-bit
    attention with a mask has no flash kernel; so a 16-bit model with padded texts computes the branches one after the other.
    """

    def __init__(self, model: DenoisingModel, guidance_scale: float) -> None:
        if guidance_scale <= 1.0:
            raise ValueError(f"guidance_scale {guidance_scale}: guidance needs a scale above 1; use the model without guidance")
        super().__init__(model)
        self.guidance_scale = guidance_scale

    def encode(self, tasks: Sequence[Task]) -> Conditioning:
        return replace(self.model.encode(tasks), negative=self.encode_negative(tasks))

    def velocity(self, module: nn.Module, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Float[Tensor, "r ..."]:
        assert conditioning.negative is not None, "the conditioning was not encoded by this model"
        if conditioning.padded and next(module.parameters()).dtype.itemsize == 2:
            branches = (replace(conditioning, negative=None), conditioning.negative)
            positive, negative = (self.model.velocity(module, x, sigma, branch) for branch in branches)
            return self.combine(positive, negative, self.guidance_scale)
        both = Conditioning.concat([replace(conditioning, negative=None), conditioning.negative])
        positive, negative = self.model.velocity(module, torch.cat([x, x]), torch.cat([sigma, sigma]), both).chunk(2)
        return self.combine(positive, negative, self.guidance_scale)
