"""A tiny Qwen-Image-2.1 of the real classes, with random weights."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage21, FlowMatchEulerDiscreteScheduler, QwenImage21Pipeline, QwenImage21Transformer2DModel
from transformers import Qwen2Tokenizer, Qwen2VLImageProcessorPil, Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLProcessor

import tiny_models

CHANNELS = 8
SCHEDULER = tiny_models.SCHEDULER
CHAT_TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% for part in message.content %}{{ part.text }}{% endfor %}<|im_end|>
{% endfor %}"""


class ImageProcessorOnly(Qwen3VLProcessor):
    """The pipeline's processor without the video processor, which would need torchvision."""

    def check_argument_for_proper_class(self, argument_name, argument):
        return None if argument_name == "video_processor" else super().check_argument_for_proper_class(argument_name, argument)

    def save_pretrained(self, save_directory, **options):
        self.tokenizer.save_pretrained(save_directory)
        self.image_processor.save_pretrained(save_directory)


def image_processor() -> Qwen2VLImageProcessorPil:
    """Make an image processor with one token per 32 x 32 px, as in the published model."""
    return Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, min_pixels=32 * 32, max_pixels=256 * 256)


def processor() -> ImageProcessorOnly:
    return ImageProcessorOnly(image_processor(), tiny_models.qwen_tokenizer(), chat_template=CHAT_TEMPLATE)


def text_encoder(tokenizer: Qwen2Tokenizer, seed: int = 0) -> Qwen3VLForConditionalGeneration:
    torch.manual_seed(seed)
    config = Qwen3VLConfig(
        text_config={
            **tiny_models.TEXT_SIZES,
            "vocab_size": len(tokenizer),
            "num_hidden_layers": 3,
            "head_dim": 16,
            "pad_token_id": tokenizer.pad_token_id,
            "rope_parameters": tiny_models.MROPE,
        },
        vision_config={
            **tiny_models.VISION_SIZES,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        **tiny_models.vision_ids(tokenizer),
    )
    return Qwen3VLForConditionalGeneration(config).eval()


def transformer(seed: int = 0) -> QwenImage21Transformer2DModel:
    torch.manual_seed(seed)
    return QwenImage21Transformer2DModel(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=2,
        attention_head_dim=32,
        num_attention_heads=2,
        context_in_dim=32,
        axes_dims_rope=(8, 12, 12),
    ).eval()


def vae(seed: int = 0) -> AutoencoderKLQwenImage21:
    """Make an autoencoder with 16 x downsampling, which the pipeline assumes."""
    torch.manual_seed(seed)
    return AutoencoderKLQwenImage21(
        base_dim=4,
        decoder_base_dim=4,
        z_dim=CHANNELS,
        dim_mult=[1, 1, 1, 2, 2],
        num_res_blocks=1,
        latents_mean=torch.linspace(-0.5, 0.5, CHANNELS).tolist(),
        latents_std=torch.linspace(0.5, 1.5, CHANNELS).tolist(),
    ).eval()


def pipeline(*, scheduler: Mapping[str, Any] = SCHEDULER, sample_sigmas: Sequence[float] | None = None) -> QwenImage21Pipeline:
    tokenizer = tiny_models.qwen_tokenizer()
    made = QwenImage21Pipeline(
        transformer=transformer(),
        vae=vae(),
        text_encoder=text_encoder(tokenizer),
        processor=processor(),
        scheduler=FlowMatchEulerDiscreteScheduler(**scheduler),
        sample_sigmas=sample_sigmas,
    )
    made.set_progress_bar_config(disable=True)
    return made


def save(folder: Path, **options: Any) -> Path:
    """Save a folder in the pipeline's format."""
    pipeline(**options).save_pretrained(folder)
    return folder
