"""The frozen image encoder of an IP-Adapter: a CLIP (arXiv 2103.00020) or SigLIP (arXiv 2303.15343) vision model, one vector per
image."""

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

from retouch.models.common.parts import LOCAL
from retouch.records.files import read_json

_CLIP = (CLIPVisionModelWithProjection, CLIPImageProcessorPil, "image_embeds")
_SIGLIP = (SiglipVisionModel, SiglipImageProcessorPil, "pooler_output")
_KINDS: dict[str, tuple[Any, Any, str]] = {
    "clip": _CLIP,
    "clip_vision_model": _CLIP,
    "siglip": _SIGLIP,
    "siglip_vision_model": _SIGLIP,
}

_VISION_TOWERS = {"CLIPModel": "CLIPVisionModelWithProjection", "SiglipModel": "SiglipVisionModel"}


class ImageEncoder:
    """Encodes images as CLIP's projected embedding (as diffusers' pipelines do) or SigLIP's pooled output.

    ``width``: width of the vector. The folder may contain the whole two-tower model or only the vision model.
    """

    def __init__(self, model: nn.Module, processor: Any, *, field: str, width: int) -> None:
        self.model = model.requires_grad_(False).eval()
        self.width = width
        self._processor = processor
        self._field = field

    @classmethod
    def from_pretrained(cls, path: Path | str, *, dtype: torch.dtype, device: torch.device | str) -> "ImageEncoder":
        """Load the encoder from a local folder (safetensors, no remote code). Raises ValueError for another kind of model."""
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
        """Return one fp32 vector per image. Images may have any size; the encoder's image processor resizes them."""
        rgb = [image.convert("RGB") for image in images]
        pixels = self._processor(images=rgb, input_data_format="channels_last", return_tensors="pt")["pixel_values"]
        weight = next(self.model.parameters())
        embeds: Tensor = getattr(self.model(pixels.to(weight)), self._field)
        return embeds.float()


def embed_width(path: Path | str) -> int:
    """Return the width of the vectors of the encoder in a folder. Raises ValueError for another kind of model."""
    folder = Path(path)
    _kind(folder)
    return width_of(_config(folder))


def width_of(config: Mapping[str, Any]) -> int:
    """Return the width of the vectors of an encoder with this configuration: CLIP's ``projection_dim``, or the width of SigLIP's
    vision tower. Missing values are transformers' defaults."""
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
        raise ValueError(f"policy.train.encoder: {folder} contains a model of type {kind!r}; use one of type {', '.join(_KINDS)}")
    return str(kind)


def _config(folder: Path) -> dict[str, Any]:
    place = folder / "config.json"
    if not place.is_file():
        raise ValueError(f"policy.train.encoder: {folder} contains no model (config.json)")
    return dict(read_json(place))


def vision_part(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the class and configuration of the part of a described encoder that is loaded: the vision tower of a two-tower model
    (CLIP, SigLIP), else the whole model."""
    if described["class"] not in _VISION_TOWERS:
        return dict(described)
    config = described["config"]
    projection = {"projection_dim": config["projection_dim"]} if "projection_dim" in config else {}
    return {"class": _VISION_TOWERS[described["class"]], "config": {**config["vision_config"], **projection}}
