"""A flow-matching model that is also conditioned on a task's reference image, with an IP-Adapter on its transformer."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from retouch.models.common.wrappers import ModelWrapper
from retouch.models.ip_adapter.image_encoder import ImageEncoder
from retouch.protocols import DenoisingModel
from retouch.types import Conditioning, Task


class ReferenceModel(ModelWrapper[DenoisingModel]):
    """``model``, also conditioned on each task's reference image (implements ``DenoisingModel``).

    The negative branch of guidance gets zeros as its reference, like rows with a dropped reference in supervised learning.
    ``encode`` raises ValueError for a task without a reference.

    Source: IP-Adapter (Ye et al. 2023, arXiv 2308.06721).
    """

    def __init__(self, model: DenoisingModel, encoder: ImageEncoder) -> None:
        super().__init__(model)
        self.encoder = encoder

    def encode(self, tasks: Sequence[Task]) -> Conditioning:
        references = []
        for task in tasks:
            if task.reference is None:
                raise ValueError(f"task {task.id!r} has no reference image, which an IP-Adapter needs; add one to the data")
            references.append(task.reference)
        return _with_reference(self.model.encode(tasks), self.encoder.embed(references))

    def encode_negative(self, tasks: Sequence[Task]) -> Conditioning:
        return _with_reference(self.model.encode_negative(tasks), torch.zeros(len(tasks), self.encoder.width))


def _with_reference(conditioning: Conditioning, embeds: Float[Tensor, "p d"]) -> Conditioning:
    device = next(iter(conditioning.tensors.values())).device
    return replace(conditioning, tensors={**conditioning.tensors, Conditioning.REFERENCE: embeds.to(device)})
