"""A denoising model whose text encoders and autoencoder are on its device only while they are used."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor, nn

from retouch.models.base import ImageModel
from retouch.models.common.pipeline_model import PipelineModel
from retouch.models.common.wrappers import ModelWrapper
from retouch.models.offloading.on_device import on_device, page_lock, parts_of
from retouch.models.offloading.prompt_embeddings import CachedPrompts
from retouch.models.offloading.store import EmbeddingStore
from retouch.protocols import DenoisingModel
from retouch.types import Conditioning, Task

CPU = torch.device("cpu")


class OffloadedModel(ModelWrapper[DenoisingModel]):
    """Keeps frozen parts of ``model`` in CPU memory while they are not used (implements ``DenoisingModel``).

    It returns the same bits as ``model``.

    ``encoders``: the parts that encode tasks. ``autoencoder``: the parts that encode and decode images, and the sources of tasks.
    """

    def __init__(
        self, model: DenoisingModel, *, device: torch.device, encoders: Sequence[nn.Module], autoencoder: Sequence[nn.Module]
    ) -> None:
        super().__init__(model)
        self.device = device
        self.encoders = list(encoders)
        self.autoencoder = list(autoencoder)

    def encode(self, tasks: Sequence[Task]) -> Conditioning:
        with on_device(self.device, [*self.encoders, *self.autoencoder]):
            return super().encode(tasks)

    def encode_negative(self, tasks: Sequence[Task]) -> Conditioning:
        with on_device(self.device, [*self.encoders, *self.autoencoder]):
            return super().encode_negative(tasks)

    def encode_images(self, images: Sequence[Image]) -> Float[Tensor, "r ..."]:
        with on_device(self.device, self.autoencoder):
            return super().encode_images(images)

    def decode(self, x: Tensor, conditioning: Conditioning) -> list[Image]:
        with on_device(self.device, self.autoencoder):
            return super().decode(x, conditioning)


def build_offloaded(section: ImageModel, *, device: torch.device, offload: bool, cache_prompts: bool) -> DenoisingModel:
    """Build the model of a recipe's section with its transformer on ``device`` and its text encoders in CPU memory.

    ``offload``: the autoencoder is in CPU memory too while it is not used. ``cache_prompts``: prompt embeddings are cached on disk,
    so that only new prompts need the text encoders. Raises ValueError for a model whose parts are not known.
    """
    key = "devices.offload" if offload else "policy.prompt_embeddings"
    model = section.build(device=CPU)
    transformer, *frozen = parts_of(model, key=key)
    if not isinstance(model, PipelineModel):
        raise ValueError(f"{key}: {type(model).__name__} does not derive from PipelineModel; remove the key")
    transformer.to(device)
    encoders = model.text.encoders
    page_lock(frozen if offload else encoders, device)
    autoencoder = [part for part in frozen if all(part is not encoder for encoder in encoders)]
    if cache_prompts:
        model.prompt_embeddings = CachedPrompts(model, EmbeddingStore.of_user(), device=device)
    if offload:
        return OffloadedModel(model, device=device, encoders=[] if cache_prompts else encoders, autoencoder=autoencoder)
    for part in autoencoder:
        part.to(device)
    return model
