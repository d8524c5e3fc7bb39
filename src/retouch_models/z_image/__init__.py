"""The recipe's sections of Z-Image and Z-Image-Turbo; ``model.py`` has the model. This file imports no torch,
because it is imported when a recipe is read."""

from __future__ import annotations

from typing import Literal

from retouch.models.base import ComfyUINames, DiffusersModel, Usual


class ZImageModel(DiffusersModel):
    """Z-Image or Z-Image-Turbo, text to image.

    Source: Z-Image (arXiv 2511.22699), diffusers' ZImagePipeline; weights Tongyi-MAI/Z-Image-Turbo.
    """

    kind: Literal["z-image"] = "z-image"

    adapter = "retouch_models.z_image.model:ZImage"
    pipeline = "ZImagePipeline"
    hub_ids = (
        "Tongyi-MAI/Z-Image",
        "Tongyi-MAI/Z-Image-Turbo",
    )
    # Attention and feed-forward layers of every block, including the refiner blocks of image and text.
    lora_targets = (
        *("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0"),
        *("feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
    )
    configurations = (("", "z-image.json"),)
    usual = (
        ("turbo", Usual(steps=8)),
        ("", Usual(guidance=5.0)),
    )
    comfyui = ComfyUINames(prefix="diffusion_model.")
