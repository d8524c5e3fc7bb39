"""The recipe's sections of Stable Diffusion 3 and 3.5; ``model.py`` has the model. This file imports no torch,
because it is imported when a recipe is read."""

from __future__ import annotations

from typing import Literal

from retouch.models.base import ComfyUINames, DiffusersModel, Usual


class SD3Model(DiffusersModel):
    """Stable Diffusion 3 or 3.5, text to image.

    Source: Esser et al. 2024 (arXiv 2403.03206), diffusers' StableDiffusion3Pipeline; weights
    stabilityai/stable-diffusion-3-medium-diffusers and 3.5.
    """

    kind: Literal["sd3"] = "sd3"

    adapter = "retouch_models.sd3.model:SD3"
    pipeline = "StableDiffusion3Pipeline"
    hub_ids = (
        "stabilityai/stable-diffusion-3-medium-diffusers",
        "stabilityai/stable-diffusion-3.5-medium",
        "stabilityai/stable-diffusion-3.5-large",
    )
    # Flow-GRPO's LoRA targets for SD3 (rank 32, alpha 64): the joint attention of each block.
    lora_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
    )
    configurations = (
        ("3.5-large", "sd3.5-large.json"),
        ("3.5-medium", "sd3.5-medium.json"),
        ("3-medium", "sd3-medium.json"),
    )
    usual = (
        ("turbo", Usual(steps=4)),
        ("3.5-large", Usual(guidance=3.5)),
        ("3-medium", Usual(guidance=7.0)),
        ("", Usual(guidance=4.5)),
    )
    comfyui = ComfyUINames(prefix="transformer.")
