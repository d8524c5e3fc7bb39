"""The recipe's sections of Qwen-Image and its editing models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from retouch.models.base import DiffusersModel, TaskInputs
from retouch.models.common.comfyui_lora import ComfyUINames

if TYPE_CHECKING:
    from torch import nn

    from retouch.protocols import AutoregressiveModel, DenoisingModel


class QwenImageFamily(DiffusersModel):
    """Base class of the sections of Qwen-Image and its editing models."""

    # Flow-GRPO's LoRA targets for Qwen-Image (rank 64, alpha 128): the whole attention and both feed-forward layers of a block.
    lora_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
        *("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
    )
    ip_adapter_blocks = ("double",)
    comfyui = ComfyUINames(prefix="diffusion_model.")
    configurations = (("2511", "qwen-image-edit-2511.json"), ("", "qwen-image.json"))

    def writer_for(self, editor: DenoisingModel, writer: AutoregressiveModel) -> AutoregressiveModel:
        from retouch.models.qwen_image.model import QwenFlow
        from retouch.models.qwen_image.responses import writer_for
        from retouch.models.qwen_vl.model import QwenWriter

        assert isinstance(editor, QwenFlow)
        assert isinstance(writer, QwenWriter), "the recipe's checks ensure it"
        if writer.template.tokenizer.get_vocab() != editor.text.tokenizer.get_vocab():
            raise ValueError("policy.model: its tokenizer differs from the editor's; use a model with the editor's tokenizer")
        made: Any = writer_for(editor, writer.module, gradient_checkpointing=writer.gradient_checkpointing)
        same_prompts: AutoregressiveModel = made
        return same_prompts

    def share_encoder(self, editor: DenoisingModel, writer: nn.Module, *, policy_encodes: bool, base_frozen: bool) -> None:
        from retouch.models.qwen_image.model import QwenFlow, share_encoder

        assert isinstance(editor, QwenFlow)
        share_encoder(editor, writer, policy_encodes=policy_encodes, base_frozen=base_frozen)

    def response_editor(self, editor: DenoisingModel, writer: nn.Module, **options: Any) -> Any:
        from retouch.models.qwen_image.model import QwenFlow, encoder_for
        from retouch.models.qwen_image.responses import QwenResponses

        assert isinstance(editor, QwenFlow)
        return QwenResponses(editor, encoder_for(editor, writer, **options))


class QwenImageModel(QwenImageFamily):
    """Qwen-Image, text to image.

    Source: Qwen-Image (arXiv 2508.02324), diffusers' QwenImagePipeline; weights Qwen/Qwen-Image.
    """

    kind: Literal["qwen-image"] = "qwen-image"

    takes = TaskInputs(images=(0, 0), responses=True)
    adapter = "retouch.models.qwen_image.model:QwenImage"
    pipeline = "QwenImagePipeline"


class QwenImageEditor(QwenImageFamily):
    """Base class of the sections of Qwen-Image's editing models."""


class QwenImageEditModel(QwenImageEditor):
    """Qwen-Image-Edit: it edits one source image.

    Source: Qwen-Image (arXiv 2508.02324), diffusers' QwenImageEditPipeline; weights Qwen/Qwen-Image-Edit.
    """

    kind: Literal["qwen-image-edit"] = "qwen-image-edit"

    takes = TaskInputs(images=(1, 1), responses=True)
    adapter = "retouch.models.qwen_image.model:QwenImageEdit"
    pipeline = "QwenImageEditPipeline"


class QwenImageEditPlusModel(QwenImageEditor):
    """Qwen-Image-Edit-Plus (2509, 2511): it edits one to eight source images.

    Source: Qwen-Image (arXiv 2508.02324), diffusers' QwenImageEditPlusPipeline; weights Qwen/Qwen-Image-Edit-2509 and -2511.
    """

    kind: Literal["qwen-image-edit-plus"] = "qwen-image-edit-plus"

    takes = TaskInputs(images=(1, 8), responses=True)
    adapter = "retouch.models.qwen_image.model:QwenImageEditPlus"
    pipeline = "QwenImageEditPlusPipeline"
