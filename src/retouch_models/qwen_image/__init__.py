"""The recipe's sections of Qwen-Image and its editing models; ``model.py`` has the model. This file imports no torch,
because it is imported when a recipe is read."""

from __future__ import annotations

from typing import Literal

from retouch.models.base import ComfyUINames, DiffusersModel, TaskInputs, Usual


class QwenImageFamily(DiffusersModel):
    """Base class of the sections of Qwen-Image and its editing models."""

    # Flow-GRPO's LoRA targets for Qwen-Image (rank 64, alpha 128): the whole attention and both feed-forward layers of a block.
    lora_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
        *("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
    )
    ip_adapter_blocks = ("double",)
    usual = (("", Usual(guidance=4.0)),)
    comfyui = ComfyUINames(prefix="diffusion_model.")
    configurations = (("2511", "qwen-image-edit-2511.json"), ("", "qwen-image.json"))


class QwenImageModel(QwenImageFamily):
    """Qwen-Image, text to image.

    Source: Qwen-Image (arXiv 2508.02324), diffusers' QwenImagePipeline; weights Qwen/Qwen-Image.
    """

    kind: Literal["qwen-image"] = "qwen-image"

    takes = TaskInputs(images=(0, 0), responses=True)
    adapter = "retouch_models.qwen_image.model:QwenImage"
    pipeline = "QwenImagePipeline"
    hub_ids = ("Qwen/Qwen-Image",)


class QwenImageEditor(QwenImageFamily):
    """Base class of the sections of Qwen-Image's editing models."""


class QwenImageEditModel(QwenImageEditor):
    """Qwen-Image-Edit: it edits one source image.

    Source: Qwen-Image (arXiv 2508.02324), diffusers' QwenImageEditPipeline; weights Qwen/Qwen-Image-Edit.
    """

    kind: Literal["qwen-image-edit"] = "qwen-image-edit"

    takes = TaskInputs(images=(1, 1), responses=True)
    adapter = "retouch_models.qwen_image.model:QwenImageEdit"
    pipeline = "QwenImageEditPipeline"
    hub_ids = ("Qwen/Qwen-Image-Edit",)


class QwenImageEditPlusModel(QwenImageEditor):
    """Qwen-Image-Edit-Plus (2509, 2511): it edits one to eight source images.

    Source: Qwen-Image (arXiv 2508.02324), diffusers' QwenImageEditPlusPipeline; weights Qwen/Qwen-Image-Edit-2509 and -2511.
    """

    kind: Literal["qwen-image-edit-plus"] = "qwen-image-edit-plus"

    takes = TaskInputs(images=(1, 8), responses=True)
    adapter = "retouch_models.qwen_image.model:QwenImageEditPlus"
    pipeline = "QwenImageEditPlusPipeline"
    hub_ids = (
        "Qwen/Qwen-Image-Edit-2509",
        "Qwen/Qwen-Image-Edit-2511",
    )
