"""How large an IP-Adapter and its encoder are, counted on the meta device from configurations: no weight is loaded or made."""

import copy
from collections.abc import Mapping
from typing import Any

import torch

from retouch.memory.sizes import build_meta
from retouch.models.ip_adapter.adapter import AdapterSettings, attach, modules
from retouch.models.ip_adapter.image_encoder import width_of

_TYPES = {"CLIPVisionModelWithProjection": "clip_vision_model", "SiglipVisionModel": "siglip_vision_model"}
_WHOLE = {"CLIPModel": "CLIPVisionModelWithProjection", "SiglipModel": "SiglipVisionModel"}


def vision_part(described: Mapping[str, Any]) -> dict[str, Any]:
    """What of a described model is loaded: of a two-tower model its vision tower."""
    if described["class"] not in _WHOLE:
        return dict(described)
    config = described["config"]
    projection = {"projection_dim": config["projection_dim"]} if "projection_dim" in config else {}
    return {"class": _WHOLE[described["class"]], "config": {**config["vision_config"], **projection}}


def embed_width(encoder: Mapping[str, Any]) -> int:
    """Numbers of what a described vision model makes of a picture."""
    return width_of({"model_type": _TYPES[encoder["class"]], **encoder["config"]})


def adapter_counts(transformer: Mapping[str, Any], encoder: Mapping[str, Any], settings: AdapterSettings) -> tuple[int, int]:
    """Numbers of the adapter on a described transformer, with a described vision model to read, and of its projection alone."""
    module = copy.deepcopy(build_meta(transformer))
    with torch.device("meta"):
        attach(module, settings, embed_width=embed_width(encoder), seed=0)
    projection, *blocks = (sum(weight.numel() for weight in part.parameters()) for part in modules(module))
    return projection + sum(blocks), projection
