"""Models that a script has already loaded: the parts of a diffusers pipeline, in the form in which ``parts.load_parts`` returns the
parts of a folder, and a transformers language model with its tokenizer."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import nn
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil

from retouch.models.common.lora import remove_lora
from retouch.models.common.pretrained import fetch_tokenizer


def pipeline_parts(pipeline: DiffusionPipeline, device: torch.device | str, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a loaded pipeline by name, and the configurations "scheduler" and "index" (``model_index.json``).

    ``kinds``: the class of each part. Modules are moved to ``device`` and keep their dtype; all modules except the transformer are
    frozen. Raises ValueError if a part is missing, or if a module is not an instance of its class.
    """
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


def pil_image_processor(processor: Any) -> Qwen2VLImageProcessorPil:
    """The image processor of a Qwen vision-language model in the PIL version, which needs no torchvision."""
    config = getattr(processor, "image_processor", processor).to_dict()
    made: Qwen2VLImageProcessorPil = Qwen2VLImageProcessorPil(
        **{key: value for key, value in config.items() if not key.endswith("_type")}
    )
    return made


@dataclass(frozen=True)
class LoadedLanguageModel:
    """A language model of transformers with its tokenizer.

    ``processor``: the tokenizer, or a processor that contains it; None loads them from the model's folder or repository.
    """

    module: Any
    processor: Any = None

    def base(self) -> Any:
        """The module, without the LoRA that an earlier run in this process added.

        Raises ValueError if the module has a LoRA that Retouch did not add.
        """
        remove_lora(self.module, key="model")
        return self.module

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        if self.processor is None:
            return AutoTokenizer.from_pretrained(fetch_tokenizer(self.module.name_or_path), local_files_only=True)
        return getattr(self.processor, "tokenizer", self.processor)

    @property
    def image_processor(self) -> Qwen2VLImageProcessorPil:
        """The image processor of a Qwen vision-language model."""
        if self.processor is None:
            folder = fetch_tokenizer(self.module.name_or_path)
            found: Qwen2VLImageProcessorPil = Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True)
            return found
        return pil_image_processor(self.processor)

    @staticmethod
    def in_fp32(autoencoder: nn.Module) -> Any:
        """The image tokenizer in fp32, because codes come from a nearest-neighbour search; a copy if it has another dtype."""
        return autoencoder if next(autoencoder.parameters()).dtype == torch.float32 else copy.deepcopy(autoencoder).float()
