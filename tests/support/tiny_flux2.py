"""A tiny FLUX.2-klein of the real classes, with random weights."""

from pathlib import Path

import torch
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline, Flux2Transformer2DModel
from transformers import Qwen2Tokenizer, Qwen3ForCausalLM

import tiny_models

SCHEDULER = {"shift": 3.0, "use_dynamic_shifting": True, "time_shift_type": "exponential"}


def text_encoder(tokenizer: Qwen2Tokenizer, seed: int = 0) -> Qwen3ForCausalLM:
    """Make a text encoder of 28 layers; the pipeline reads the 9th, 18th and 27th."""
    return tiny_models.qwen3(tokenizer, seed, width=16, layers=28)


def transformer(seed: int = 0, *, guidance_embeds: bool = False) -> Flux2Transformer2DModel:
    """Make a transformer of two double and two single blocks."""
    torch.manual_seed(seed)
    return Flux2Transformer2DModel(
        in_channels=64,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=48,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance_embeds,
    ).eval()


def vae(seed: int = 0) -> AutoencoderKLFlux2:
    """Make an autoencoder with 4 x downsampling and 16 channels, whose latent statistics are not 0 and 1."""
    torch.manual_seed(seed)
    made = AutoencoderKLFlux2(**tiny_models.AUTOENCODER, layers_per_block=1).eval()
    made.bn.running_mean.normal_(std=0.3)
    made.bn.running_var.uniform_(0.5, 2.0)
    return made


def pipeline(*, distilled: bool = False) -> Flux2KleinPipeline:
    tokenizer = tiny_models.chat_tokenizer()
    made = Flux2KleinPipeline(
        transformer=transformer(),
        vae=vae(),
        text_encoder=text_encoder(tokenizer),
        tokenizer=tokenizer,
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        is_distilled=distilled,
    )
    made.set_progress_bar_config(disable=True)
    return made


def save(folder: Path, *, distilled: bool = False) -> Path:
    """Save a folder in the pipeline's format."""
    pipeline(distilled=distilled).save_pretrained(folder)
    return folder
