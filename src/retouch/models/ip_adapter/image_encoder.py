"""A frozen CLIP or SigLIP vision model: what an IP-Adapter is told of a picture, one vector each."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor, nn
from transformers import (
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    SiglipConfig,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from retouch.models.common.folders import LOCAL

_CLIP = (CLIPVisionModelWithProjection, CLIPImageProcessorPil, "image_embeds")
_SIGLIP = (SiglipVisionModel, SiglipImageProcessorPil, "pooler_output")
_KINDS: dict[str, tuple[Any, Any, str]] = {
    "clip": _CLIP,
    "clip_vision_model": _CLIP,
    "siglip": _SIGLIP,
    "siglip_vision_model": _SIGLIP,
}


class ImageEncoder:
    """A picture as CLIP's projected embedding (what diffusers' pipelines take) or SigLIP's pooled one.

    ``width``: numbers of a vector. Folders of the whole two-tower model do as well as those of the vision model alone.
    """

    def __init__(self, model: nn.Module, processor: Any, *, field: str, width: int) -> None:
        self.model = model.requires_grad_(False).eval()
        self.width = width
        self._processor = processor
        self._field = field

    @classmethod
    def from_pretrained(cls, path: Path | str, *, dtype: torch.dtype, device: torch.device | str) -> "ImageEncoder":
        """From a local folder (safetensors, no remote code). ValueError for another kind of model."""
        folder = Path(path)
        model_class, processor_class, field = _KINDS[_kind(folder)]
        settings: dict[str, Any] = {"dtype": dtype}
        width = embed_width(folder)
        if model_class is CLIPVisionModelWithProjection:
            settings["config"] = CLIPVisionConfig.from_pretrained(folder, local_files_only=True, projection_dim=width)
        model = model_class.from_pretrained(folder, **settings, **LOCAL).to(device)
        return cls(model, processor_class.from_pretrained(folder, local_files_only=True), field=field, width=width)

    @torch.no_grad()
    def embed(self, images: Sequence[Image]) -> Float[Tensor, "r d"]:
        """A vector a picture, fp32, of any sizes; each is resized as the encoder was trained."""
        pictures = [image.convert("RGB") for image in images]
        pixels = self._processor(images=pictures, input_data_format="channels_last", return_tensors="pt")["pixel_values"]
        weight = next(self.model.parameters())
        embeds: Tensor = getattr(self.model(pixels.to(weight)), self._field)
        return embeds.float()


def embed_width(path: Path | str) -> int:
    """Numbers of a vector of the encoder in a folder, from its configuration. ValueError for another kind of model."""
    folder = Path(path)
    _kind(folder)
    return width_of(_config(folder))


def width_of(config: Mapping[str, Any]) -> int:
    """The same of a configuration: of CLIP the projection's, which stands beside both towers; of SigLIP the vision tower's own.
    What is left out of a tower's is transformers' default."""
    kind = config["model_type"]
    if kind == "clip":
        return int(CLIPConfig(**config).projection_dim)
    if kind == "siglip":
        return int(SiglipConfig(**config).vision_config.hidden_size)
    if kind == "clip_vision_model":
        return int(CLIPVisionConfig(**config).projection_dim)
    return int(SiglipVisionConfig(**config).hidden_size)


def _kind(folder: Path) -> str:
    kind = _config(folder).get("model_type")
    if kind not in _KINDS:
        raise ValueError(f"{folder} is a model of type {kind!r}; an IP-Adapter reads one of type {', '.join(_KINDS)}")
    return str(kind)


def _config(folder: Path) -> dict[str, Any]:
    place = folder / "config.json"
    if not place.is_file():
        raise ValueError(f"{folder} holds no model: no config.json")
    return dict(json.loads(place.read_text(encoding="utf-8")))
