"""Reading a local diffusers folder of the Qwen-Image family."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from transformers import PreTrainedTokenizerBase, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer, Qwen2VLImageProcessorPil

from retouch.models.common.folders import LOCAL, diffusers_folder


@dataclass(frozen=True, slots=True, eq=False)
class QwenParts:
    """What every pipeline of the family is made of."""

    transformer: QwenImageTransformer2DModel
    vae: AutoencoderKLQwenImage
    text_encoder: Qwen2_5_VLForConditionalGeneration
    tokenizer: PreTrainedTokenizerBase
    scheduler_config: Mapping[str, Any]


def load(path: Path | str, *, dtype: torch.dtype, device: torch.device | str) -> QwenParts:
    """The parts in ``dtype`` on ``device``, autoencoder and text encoder frozen. ValueError where it is no such folder."""
    root = diffusers_folder(path)
    transformer = QwenImageTransformer2DModel.from_pretrained(root / "transformer", torch_dtype=dtype, **LOCAL)
    vae = AutoencoderKLQwenImage.from_pretrained(root / "vae", torch_dtype=dtype, **LOCAL)
    text_encoder = Qwen2_5_VLForConditionalGeneration.from_pretrained(root / "text_encoder", dtype=dtype, **LOCAL)
    for frozen in (vae, text_encoder):
        frozen.requires_grad_(False).eval()
    return QwenParts(
        transformer=transformer.to(device),
        vae=vae.to(device),
        text_encoder=text_encoder.to(device),
        tokenizer=Qwen2Tokenizer.from_pretrained(root / "tokenizer", local_files_only=True),
        scheduler_config=FlowMatchEulerDiscreteScheduler.load_config(root / "scheduler", local_files_only=True),
    )


def load_image_processor(path: Path | str) -> Qwen2VLImageProcessorPil:
    """The text encoder's image processor, in its PIL version, which needs no torchvision."""
    return Qwen2VLImageProcessorPil.from_pretrained(Path(path) / "processor", local_files_only=True)
