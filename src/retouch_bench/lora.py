"""Loads trained weights into a diffusers pipeline: a LoRA in any format that diffusers or PEFT reads, or full weights.

diffusers only warns about layers of a file that do not match the model, and continues without them. Here they are an error. To find
them, a copy of the file is loaded first, in which all weights of a layer are replaced by a number that identifies the layer. The
numbers that are then found in the model belong to the layers that diffusers has converted and loaded, whatever the format of the
file.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from retouch.types import Json

_DIFFUSERS = "pytorch_lora_weights.safetensors"
_PEFT = "adapter_model.safetensors"
_NUMBERS = "numbers"
_PARTS = re.compile(r"\.(?:lora[._]|alpha$|lokr_|hada_)")
_DOWN = re.compile(r"lora_down|lora_A|lora\.down")
_SHOWN = 5


def load_lora(pipeline: Any, path: str | Path) -> None:
    """Load the weights at ``path`` into the pipeline.

    A file, or a folder with ``pytorch_lora_weights.safetensors``, is loaded by ``load_lora_weights`` of diffusers, which also reads
    the keys of kohya's scripts and of ComfyUI. A folder with only ``adapter_model.safetensors`` is loaded by PEFT. A folder with
    a subfolder ``transformer`` (which `retouch export` writes for a run that trained all weights) replaces the transformer of the
    pipeline.

    Raises ValueError if there is nothing of this kind, or if the pipeline lacks a layer of the file; the message names the layer.
    """
    place = Path(path)
    file = place if place.is_file() else place / _DIFFUSERS
    if file.is_file():
        numbers, numbered = _numbered(file, path)
        try:
            pipeline.load_lora_weights(numbered, adapter_name=_NUMBERS)
            found = _values_in(pipeline)
            pipeline.unload_lora_weights()
        except (ValueError, RuntimeError, KeyError, IndexError, AttributeError) as error:
            first = ", ".join(list(numbers)[:_SHOWN])
            raise ValueError(
                f"--lora {path}: diffusers cannot load it into {type(pipeline).__name__}: {error}; its first layers are {first}"
            ) from error
        _require_none([name for name, number in numbers.items() if number not in found], len(numbers), pipeline, path)
        pipeline.load_lora_weights(str(file.parent), weight_name=file.name)
    elif (place / _PEFT).is_file():
        from peft import PeftModel, get_peft_model_state_dict

        try:
            model = PeftModel.from_pretrained(pipeline.transformer, place)  # inserts the layers into pipeline.transformer in place
        except (ValueError, RuntimeError, KeyError) as error:
            raise ValueError(f"--lora {path}: PEFT cannot load it into {type(pipeline).__name__}: {error}") from error
        placed = get_peft_model_state_dict(model, save_embedding_layers=False)
        with safe_open(place / _PEFT, framework="pt") as content:
            keys = list(content.keys())
        left = dict.fromkeys(_layer(key) for key in keys if key not in placed)
        _require_none(list(left), len({_layer(key) for key in keys}), pipeline, path)
    elif (place / "transformer" / "config.json").is_file():
        old = pipeline.transformer
        new = type(old).from_pretrained(place / "transformer", torch_dtype=old.dtype).to(old.device)
        pipeline.register_modules(transformer=new)
    elif place.exists():
        raise ValueError(f"--lora {path}: no {_DIFFUSERS}, no {_PEFT} and no folder transformer in it; give the path of the file")
    else:
        raise ValueError(f"--lora {path}: no such file or folder")


def lora_digest(path: str | Path) -> dict[str, Json]:
    """Return the path of the weights and the SHA-256 of their files, so that a changed file is detected."""
    place = Path(path)
    files = [place] if place.is_file() else sorted(place.rglob("*.safetensors"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return {"path": str(path), "sha256": digest.hexdigest()}


def _numbered(file: Path, path: str | Path) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return the number of each layer, and the tensors of the file with all weights replaced by the number of their layer."""
    shapes: dict[str, list[int]] = {}
    try:
        with safe_open(file, framework="pt") as content:
            for key in content.keys():  # noqa: SIM118, it is not a mapping
                shapes[key] = content.get_slice(key).get_shape()
    except (SafetensorError, OSError) as error:
        raise ValueError(f"--lora {path}: not a safetensors file: {error}") from error
    ranks = {_layer(key): shape[0] for key, shape in shapes.items() if _DOWN.search(key)}
    numbers: dict[str, float] = {}
    tensors: dict[str, torch.Tensor] = {}
    for key, shape in shapes.items():
        if key.endswith(".alpha"):
            tensors[key] = torch.tensor(float(ranks.get(_layer(key), 1)))  # the weights are multiplied by alpha / rank
        else:
            index = len(numbers)  # the number is different for each index below about 3000, and exact in float16 and bfloat16
            number = math.ldexp(1 + (index % 128) / 128, index // 128 - 8)
            tensors[key] = torch.full(shape, numbers.setdefault(_layer(key), number))
    return numbers, tensors


def _layer(key: str) -> str:
    """Return the layer of a key: ``a.to_q`` for ``a.to_q.lora_down.weight``. A key in another format counts as a layer itself."""
    return _PARTS.split(key)[0]


def _values_in(pipeline: Any) -> set[float]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    modules = [part for part in pipeline.components.values() if isinstance(part, nn.Module)]
    found: set[float] = set()
    for layer in (layer for module in modules for layer in module.modules() if isinstance(layer, BaseTunerLayer)):
        for name in layer.adapter_layer_names:
            held = getattr(layer, name)
            if _NUMBERS in held:
                weight = held[_NUMBERS].weight if isinstance(held[_NUMBERS], nn.Module) else held[_NUMBERS]
                found |= set(weight.detach().float().unique().tolist())
    return found


def _require_none(left: Sequence[str], of: int, pipeline: Any, path: str | Path) -> None:
    """Raise ValueError if ``left`` is not empty: the layers of a file that the pipeline does not have."""
    if not left:
        return
    count = "none of its layers is" if len(left) == of else f"{len(left)} of its {of} layers are not"
    shown = ", ".join(left[:_SHOWN]) + (f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else "")
    raise ValueError(
        f"--lora {path}: {count} in {type(pipeline).__name__}: {shown}. The LoRA is for another model, or in a format "
        "that diffusers does not convert for this model"
    )
