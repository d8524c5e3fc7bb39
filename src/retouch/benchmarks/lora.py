"""Loads trained weights into a pipeline of diffusers: a LoRA in any format that diffusers or PEFT reads, or whole weights."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from retouch.types import Json

_DIFFUSERS = "pytorch_lora_weights.safetensors"
_PEFT = "adapter_model.safetensors"


def load_lora(pipeline: Any, path: str | Path) -> None:
    """Load the weights at ``path`` into the pipeline.

    A file, or a folder with ``pytorch_lora_weights.safetensors``, is loaded by ``load_lora_weights`` of diffusers, which also reads
    the keys of kohya's scripts and of ComfyUI. A folder with only ``adapter_model.safetensors`` is loaded by PEFT. A folder
    ``transformer`` (what `retouch export` writes of a run that trained all weights) replaces the pipeline's transformer.

    Raises ValueError if nothing of this is there, or if no layer of the pipeline has the names in the file.
    """
    place = Path(path)
    if place.is_file():
        pipeline.load_lora_weights(str(place.parent), weight_name=place.name)
    elif (place / _DIFFUSERS).is_file():
        pipeline.load_lora_weights(str(place), weight_name=_DIFFUSERS)
    elif (place / _PEFT).is_file():
        from peft import PeftModel

        PeftModel.from_pretrained(pipeline.transformer, place)  # puts its layers into the transformer itself
    elif (place / "transformer" / "config.json").is_file():
        old = pipeline.transformer
        new = type(old).from_pretrained(place / "transformer", torch_dtype=old.dtype).to(old.device)
        pipeline.register_modules(transformer=new)
        return
    elif place.exists():
        raise ValueError(f"--lora {path}: no {_DIFFUSERS}, no {_PEFT} and no folder transformer there; name the file")
    else:
        raise ValueError(f"--lora {path}: no such file or folder")
    _require_layers(pipeline, path)


def lora_digest(path: str | Path) -> dict[str, Json]:
    """The name of the weights, and a hash of their files, so that a changed file is noticed."""
    place = Path(path)
    files = [place] if place.is_file() else sorted(place.rglob("*.safetensors"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return {"path": str(path), "sha256": digest.hexdigest()}


def _require_layers(pipeline: Any, path: str | Path) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from torch import nn

    modules = [part for part in pipeline.components.values() if isinstance(part, nn.Module)]
    if not any(isinstance(layer, BaseTunerLayer) for module in modules for layer in module.modules()):
        raise ValueError(
            f"--lora {path}: none of its weights belongs to a layer of {type(pipeline).__name__}; it is for another model"
        )
