"""Reading a local transformers folder of a Qwen instruct model: safetensors only, named classes only, no code from the folder."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Qwen2_5_VLForConditionalGeneration,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3ForCausalLM,
    Qwen3VLForConditionalGeneration,
)

from retouch.models.common.chat_template import VISION
from retouch.models.common.latents import Area
from retouch.models.language import Attention
from retouch.models.qwen_vl.model import STOP, QwenWriter, Reader

CLASSES: dict[str, Any] = {
    "qwen2_vl": Qwen2VLForConditionalGeneration,
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": Qwen3VLForConditionalGeneration,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
}


def load_writer(
    path: Path | str,
    *,
    template: str,
    dtype: torch.dtype,
    device: torch.device | str,
    attention: Attention = "sdpa",
    picture: str = VISION,
    area: Area = "as_is",
    stop: Sequence[str] = STOP,
    gradient_checkpointing: bool = False,
) -> QwenWriter:
    """The writer in ``dtype`` on ``device``, all of it frozen.

    ValueError where the folder holds none of these models, or attention cannot be computed so here.
    """
    require_attention(attention, dtype=dtype, device=torch.device(device))
    config = Path(path) / "config.json"
    kind = json.loads(config.read_text())["model_type"] if config.is_file() else None
    if kind not in CLASSES:
        found = "no config.json" if kind is None else f"a model of type {kind!r}"
        raise ValueError(f"{path} holds {found}; give the local folder of one of {', '.join(CLASSES)}")
    module = CLASSES[kind].from_pretrained(
        path, dtype=dtype, attn_implementation=attention, local_files_only=True, use_safetensors=True
    )
    module.requires_grad_(False).eval().to(device)
    return QwenWriter(
        module,
        Qwen2Tokenizer.from_pretrained(path, local_files_only=True),
        template=template,
        # In its PIL version, which needs no torchvision.
        image_processor=Qwen2VLImageProcessorPil.from_pretrained(path, local_files_only=True)
        if isinstance(module, Reader)
        else None,
        picture=picture,
        area=area,
        stop=stop,
        gradient_checkpointing=gradient_checkpointing,
    )


def require_attention(attention: Attention, *, dtype: torch.dtype, device: torch.device) -> None:
    """ValueError, with what to take, where flash attention is asked for and cannot be had."""
    if attention != "flash_attention_2":
        return
    wrong = None
    if importlib.util.find_spec("flash_attn") is None:
        wrong = "the package flash-attn is not installed"
    elif device.type != "cuda":
        wrong = f"it needs a CUDA device, and this is {device}"
    elif dtype == torch.float32:
        wrong = "it computes in 16 bits, and dtype is float32"
    if wrong is not None:
        raise ValueError(f"policy.model.attention: flash_attention_2: {wrong}; take sdpa, whose kernels are of the same kind")
