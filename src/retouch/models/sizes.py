"""Parameter counts of published models, from their configurations on the meta device. No weights are needed.

Packaged configurations: ``models/<family>/*.json`` contain the parts of a model as ``{"class": ..., "config": ...}`` with their
source; ``models/configs/writers/*.json`` one language model each, ``models/configs/judges/*.json`` one reward model each, and
``models/configs/encoders/*.json`` one image encoder each.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import nn

from retouch.models.language import published_language_model
from retouch.records.files import read_json

_MODELS = Path(str(files("retouch.models")))


def reward_model(name: str) -> dict[str, Any] | None:
    """Class and configuration of a reward's model, by its Hub id or the last part of it; None if it is not packaged."""
    return _packaged("judges", name) or published_language_model(name)


def image_encoder(name: str) -> dict[str, Any] | None:
    """Class and configuration of an IP-Adapter's image encoder, by its Hub id or the last part of it; None if it is not
    packaged."""
    return _packaged("encoders", name)


def _packaged(kind: str, name: str) -> dict[str, Any] | None:
    place = _MODELS / "configs" / kind / f"{name.rpartition('/')[2].lower()}.json"
    return dict(read_json(place)) if place.is_file() else None


def build_meta(part: Mapping[str, Any]) -> nn.Module:
    """Build the part on the meta device, without storage. Raises ValueError for a class of neither diffusers nor transformers."""
    return _build(json.dumps(part, sort_keys=True))


def parameter_count(part: Mapping[str, Any]) -> int:
    """Number of parameters of a part; shared parameters count once."""
    return sum(weight.numel() for weight in build_meta(part).parameters())


def stored_count(part: Mapping[str, Any]) -> int:
    """Number of values in a part's checkpoint: parameters and persistent buffers (such as SD3's position table)."""
    module = build_meta(part)
    saved = module.state_dict()
    return parameter_count(part) + sum(tensor.numel() for name, tensor in module.named_buffers() if name in saved)


@cache
def _build(part: str) -> nn.Module:
    described = json.loads(part)
    config = described["config"]
    name = described["class"]
    found: Any = getattr(diffusers, name, None) or getattr(transformers, name, None)
    with torch.device("meta"):
        if _is_class_of(diffusers.ModelMixin, found):
            return found.from_config(config)  # it ignores keys of other versions, as from_pretrained does
        if _is_class_of(transformers.PreTrainedModel, found):
            return found(found.config_class(**config))
    raise ValueError(f"the size of class {name!r} is not known: it is neither a diffusers nor a transformers model")


def _is_class_of(base: type, found: object) -> bool:
    return isinstance(found, type) and issubclass(found, base)
