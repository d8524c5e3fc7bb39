"""Loads a Qwen instruct model from a local transformers folder (safetensors only, known classes only, no code from the folder), or
takes a model that a script has loaded."""

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
from retouch.models.common.loaded import LoadedLanguageModel
from retouch.models.common.parts import LOCAL
from retouch.models.language import Attention, require_attention
from retouch.models.qwen_vl.model import STOP, QwenWriter, VisionModel
from retouch.records.files import read_json

CLASSES: dict[str, Any] = {
    "qwen2_vl": Qwen2VLForConditionalGeneration,
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": Qwen3VLForConditionalGeneration,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
}


def load_writer(
    source: Path | str | LoadedLanguageModel,
    *,
    template: str,
    dtype: torch.dtype,
    device: torch.device | str,
    attention: Attention = "sdpa",
    image_block: str = VISION,
    area: Area = "as_is",
    stop: Sequence[str] = STOP,
    gradient_checkpointing: bool = False,
) -> QwenWriter:
    """Load the writer in ``dtype`` on ``device`` with all weights frozen; a loaded model keeps its dtype and its attention. For the
    other arguments see ``QwenWriter``.

    Raises ValueError for a folder with another model, and for an attention implementation that is not available.
    """
    image_processor = None
    if isinstance(source, LoadedLanguageModel):
        module, tokenizer = source.base(), source.tokenizer
        if isinstance(module, VisionModel):
            image_processor = source.image_processor
    else:
        require_attention(attention, dtype=dtype, device=torch.device(device))
        settings = {"dtype": dtype, "attn_implementation": attention}
        module = _class_in(Path(source)).from_pretrained(source, **settings, **LOCAL)
        tokenizer = Qwen2Tokenizer.from_pretrained(source, local_files_only=True)
        if isinstance(module, VisionModel):
            image_processor = Qwen2VLImageProcessorPil.from_pretrained(source, local_files_only=True)  # needs no torchvision
    return QwenWriter(
        module.requires_grad_(False).eval().to(device),
        tokenizer,
        template=template,
        image_processor=image_processor,
        image_block=image_block,
        area=area,
        stop=stop,
        gradient_checkpointing=gradient_checkpointing,
    )


def _class_in(path: Path) -> Any:
    config = path / "config.json"
    kind = read_json(config)["model_type"] if config.is_file() else None
    if kind not in CLASSES:
        found = "no config.json" if kind is None else f"a model of type {kind!r}"
        raise ValueError(f"{path} contains {found}; set the local folder of a model of type {', '.join(CLASSES)}")
    return CLASSES[kind]
