"""Classifier-free guidance around any flow-matching model: the same velocity in rollout, evaluation and training."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from retouch.models.common.wrapper import ModelWrapper
from retouch.protocols import DenoisingModel
from retouch.types import Conditioning, Task


class Guided(ModelWrapper[DenoisingModel]):
    """A model whose velocity is guided at ``guidance_scale`` (above 1); it is itself a ``DenoisingModel``.

    Both branches go through one forward of twice the rows, and both have gradient (Ho & Salimans 2022, arXiv 2207.12598).
    How they are combined is the model's own.
    """

    def __init__(self, model: DenoisingModel, guidance_scale: float) -> None:
        if guidance_scale <= 1.0:
            raise ValueError(f"guidance_scale {guidance_scale}: guidance begins above 1; take the model without it")
        super().__init__(model)
        self.guidance_scale = guidance_scale

    def encode(self, tasks: Sequence[Task]) -> Conditioning:
        return replace(self.model.encode(tasks), negative=self.encode_negative(tasks))

    def velocity(self, module: nn.Module, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Float[Tensor, "r ..."]:
        assert conditioning.negative is not None, "the conditioning was not encoded by this model"
        both = Conditioning.concat([replace(conditioning, negative=None), conditioning.negative])
        positive, negative = self.model.velocity(module, torch.cat([x, x]), torch.cat([sigma, sigma]), both).chunk(2)
        return self.combine(positive, negative, self.guidance_scale)
