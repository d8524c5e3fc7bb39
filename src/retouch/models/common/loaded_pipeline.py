"""The parts of a diffusers pipeline that a script has loaded, as ``parts.load_parts`` returns those of a folder."""

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import nn
from transformers import Qwen2VLImageProcessorPil

from retouch.models.common.lora import remove_lora


def pipeline_parts(pipeline: DiffusionPipeline, device: torch.device | str, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The parts by their names, and the configurations "scheduler" and "index" (``model_index.json``).

    Modules are moved to ``device`` and keep their dtype; all but the transformer are frozen. A LoRA that an earlier run in this
    process added is removed. Raises ValueError for a part that is missing or of another class than ``kinds`` says, and for a
    transformer with a LoRA of another origin.
    """
    remove_lora(pipeline.components["transformer"], key=f"{type(pipeline).__name__}.transformer")
    parts: dict[str, Any] = {}
    for name, kind in kinds.items():
        part = pipeline.components.get(name)
        if name == "processor" and not isinstance(part, kind):
            part = getattr(part, "tokenizer", part)
        if issubclass(kind, nn.Module) and not isinstance(part, kind):
            part = getattr(part, "model", part)  # the language model without its head
        if part is None or (issubclass(kind, nn.Module) and not isinstance(part, kind)):
            found = "none" if part is None else f"a {type(part).__name__}"
            raise ValueError(f"{type(pipeline).__name__}.{name}: a {kind.__name__} is needed, and the pipeline has {found}")
        if isinstance(part, nn.Module):
            part.to(device)
            if name != "transformer":
                part.requires_grad_(False).eval()
        parts[name] = part
    return {**parts, "scheduler": dict(pipeline.scheduler.config), "index": dict(pipeline.config)}


def pipeline_image_processor(pipeline: DiffusionPipeline) -> Qwen2VLImageProcessorPil:
    """Its image processor in the PIL version, which needs no torchvision."""
    processor = pipeline.components["processor"]
    config = getattr(processor, "image_processor", processor).to_dict()
    made: Qwen2VLImageProcessorPil = Qwen2VLImageProcessorPil(
        **{key: value for key, value in config.items() if not key.endswith("_type")}
    )
    return made
