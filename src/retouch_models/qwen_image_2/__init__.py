"""The recipe's sections of Qwen-Image-2.1; ``model.py`` has the model. This file imports no torch,
because it is imported when a recipe is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from retouch.models.base import Area, DiffusersModel, TaskInputs

if TYPE_CHECKING:
    pass


class QwenImage2Model(DiffusersModel):
    """Qwen-Image-2.1: an image from a prompt, or from a prompt and source images.

    Source: diffusers' QwenImage21Pipeline.
    """

    kind: Literal["qwen-image-2"] = "qwen-image-2"
    source_area: Area | None = Field(default=None, exclude_if=lambda area: area is None)
    """Area in pixels to which a source image is resized, with its aspect ratio; null takes the pipeline's 1024 x 1024."""

    takes = TaskInputs(images=(0, 10))
    adapter = "retouch_models.qwen_image_2.model:QwenImage2"
    pipeline = "QwenImage21Pipeline"
    hub_ids = ("Qwen/Qwen-Image-2.1",)
    # All linear layers of every block.
    lora_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("img_mlp.proj", "img_mlp.gate_layer", "img_mlp.out"),
    )
    configurations = (("", "qwen-image-2.1.json"),)

    def options(self, source: Any) -> dict[str, Any]:
        return {} if self.source_area is None else {"source_area": self.source_area}
