"""A trained LoRA as files that others read."""

from pathlib import Path
from typing import Any

import diffusers
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file


def write_lora(module: Any, to: Path, *, pipeline: str | None) -> None:
    """The transformer's adapter for PEFT and, where the name of its class in diffusers is given, for that pipeline."""
    config = module.peft_config["default"]
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in get_peft_model_state_dict(module).items()}
    config.save_pretrained(to)
    save_file({f"base_model.model.{name}": tensor for name, tensor in tensors.items()}, to / "adapter_model.safetensors")
    if pipeline is not None:
        writer: Any = getattr(diffusers, pipeline)
        writer.save_lora_weights(to, transformer_lora_layers=tensors, transformer_lora_adapter_metadata=config.to_dict())
