"""How large the published models are, counted on the meta device from their configurations: no weight is loaded or made.

``models/<family>/*.json`` hold each model's parts as ``{"class": ..., "config": ...}`` with their source,
``models/configs/writers/*.json`` one language model each, ``models/configs/judges/*.json`` one model of a reward each,
``models/configs/encoders/*.json`` one image encoder each.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import nn

from retouch.models.language import published_language_model

_MODELS = Path(str(files("retouch.models")))


def known_models() -> list[str]:
    """The names that ``parts`` takes."""
    return sorted(file.stem for file in _MODELS.glob("*/*.json"))


def parts(name: str) -> dict[str, dict[str, Any]]:
    """The parts of a published model: part name to its class and configuration. ValueError for a name that is not known."""
    if name not in known_models():
        raise ValueError(f"no configuration of {name!r}; there are {', '.join(known_models())}")
    file = next(_MODELS.glob(f"*/{name}.json"))
    return dict(json.loads(file.read_text(encoding="utf-8"))["parts"])


def parts_in(folder: Path, *, loaded_as: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """The parts of a model in a local diffusers folder, described in the same way. ValueError where it has no transformer.

    ``loaded_as``: the classes of parts that are loaded as another class than the folder names.
    """
    described = {}
    for place in sorted(folder.glob("*/config.json")):
        config = json.loads(place.read_text(encoding="utf-8"))
        name = config.get("_class_name") or next(iter(config.get("architectures") or ()), None)
        if name is not None:
            kept = {key: value for key, value in config.items() if not key.startswith("_")}
            part = place.parent.name
            described[part] = {"class": (loaded_as or {}).get(part, name), "config": kept}
    if "transformer" not in described:
        raise ValueError(f"{folder} is no diffusers folder: it has no transformer/config.json")
    return described


def judge(name: str) -> dict[str, Any] | None:
    """A published model that a reward judges with, by its id or the last part of it; None where its configuration is not known."""
    return _one("judges", name) or published_language_model(name)


def image_encoder(name: str) -> dict[str, Any] | None:
    """As ``judge``, for the image encoder of an IP-Adapter."""
    return _one("encoders", name)


def _one(kind: str, name: str) -> dict[str, Any] | None:
    place = _MODELS / "configs" / kind / f"{name.rpartition('/')[2].lower()}.json"
    return dict(json.loads(place.read_text(encoding="utf-8"))) if place.is_file() else None


def build_meta(part: Mapping[str, Any]) -> nn.Module:
    """The part on the meta device: shapes without storage. ValueError for a class that is in neither diffusers nor transformers."""
    return _build(json.dumps(part, sort_keys=True))


def parameter_count(part: Mapping[str, Any]) -> int:
    """Trained numbers of a part: shared ones once."""
    return sum(weight.numel() for weight in build_meta(part).parameters())


def stored_count(part: Mapping[str, Any]) -> int:
    """What its checkpoint holds and a device has to keep: parameters and persistent buffers (SD3's table of positions)."""
    module = build_meta(part)
    saved = module.state_dict()
    return parameter_count(part) + sum(tensor.numel() for name, tensor in module.named_buffers() if name in saved)


def lora_count(part: Mapping[str, Any], *, rank: int, targets: Sequence[str]) -> int:
    """Parameters of PEFT's low-rank adapters on the linear layers whose names end in a target.

    ValueError for a target without a layer.
    """
    linear = {name: module for name, module in build_meta(part).named_modules() if isinstance(module, nn.Linear)}
    unmatched = [target for target in targets if not any(_matches(name, target) for name in linear)]
    if unmatched:
        raise ValueError(f"no linear layer is called {unmatched[0]!r} in {part['class']}")
    hit = [module for name, module in linear.items() if any(_matches(name, target) for target in targets)]
    return sum(rank * (module.in_features + module.out_features) for module in hit)


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


@cache
def _build(part: str) -> nn.Module:
    described = json.loads(part)
    config = described["config"]
    name = described["class"]
    found = getattr(diffusers, name, None) or getattr(transformers, name, None)
    with torch.device("meta"):
        if isinstance(found, type) and issubclass(found, diffusers.ModelMixin):
            # from_config ignores keys of other versions, as from_pretrained does.
            module: nn.Module = found.from_config(config)
            return module
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found(found.config_class(**config))
    raise ValueError(f"a part of class {name!r} cannot be counted")
