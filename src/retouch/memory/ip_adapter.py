"""Parameter counts of an IP-Adapter and its image encoder, from their configurations on the meta device. No weights are needed."""

import copy
from collections.abc import Mapping
from typing import Any

import torch

from retouch.memory.sizes import build_meta
from retouch.models.ip_adapter.adapter import AdapterSettings, attach, modules
from retouch.models.ip_adapter.image_encoder import width_of

_MODEL_TYPES = {"CLIPVisionModelWithProjection": "clip_vision_model", "SiglipVisionModel": "siglip_vision_model"}
_VISION_TOWERS = {"CLIPModel": "CLIPVisionModelWithProjection", "SiglipModel": "SiglipVisionModel"}


def vision_part(described: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a described encoder that is loaded: the vision tower of a two-tower model (CLIP, SigLIP), else the whole
    model."""
    if described["class"] not in _VISION_TOWERS:
        return dict(described)
    config = described["config"]
    projection = {"projection_dim": config["projection_dim"]} if "projection_dim" in config else {}
    return {"class": _VISION_TOWERS[described["class"]], "config": {**config["vision_config"], **projection}}


def embed_width(encoder: Mapping[str, Any]) -> int:
    """Width of the image embedding of a described vision model."""
    return width_of({"model_type": _MODEL_TYPES[encoder["class"]], **encoder["config"]})


def adapter_counts(transformer: Mapping[str, Any], encoder: Mapping[str, Any], settings: AdapterSettings) -> tuple[int, int]:
    """Parameter counts of the whole adapter and of its projection alone, for a described transformer and image encoder."""
    module = copy.deepcopy(build_meta(transformer))
    with torch.device("meta"):
        attach(module, settings, embed_width=embed_width(encoder), seed=0)
    projection, *blocks = (sum(weight.numel() for weight in part.parameters()) for part in modules(module))
    return projection + sum(blocks), projection
