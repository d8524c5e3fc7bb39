"""The recipe's section of Qwen-Image-2.1."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from retouch.models.base import Area, DiffusersModel, TaskInputs
from retouch.models.shapes import Blocks, ImageBatch, Part, PartConfigs, Shape, Size

if TYPE_CHECKING:
    from torch import Tensor


class QwenImage2Model(DiffusersModel):
    """Qwen-Image-2.1: an image from a prompt, or from a prompt and source images.

    Source: diffusers' QwenImage21Pipeline.
    """

    kind: Literal["qwen-image-2"] = "qwen-image-2"
    source_area: Area | None = Field(default=None, exclude_if=lambda area: area is None)
    """Area in pixels to which a source image is resized, with its aspect ratio; null takes the pipeline's 1024 x 1024."""

    takes = TaskInputs(images=(0, 10))
    adapter = "retouch.models.qwen_image_2.model:QwenImage2"
    pipeline = "QwenImage21Pipeline"
    # All linear layers of every block.
    lora_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("img_mlp.proj", "img_mlp.gate_layer", "img_mlp.out"),
    )
    configurations = (("", "qwen-image-2.1.json"),)
    loaded_as = (("text_encoder", "Qwen3VLModel"),)
    text_tokens = 512
    pads_prompts = False

    def options(self, source: Any) -> dict[str, Any]:
        return {} if self.source_area is None else {"source_area": self.source_area}

    @property
    def source_size(self) -> Size:
        side = round(math.sqrt(self.source_area or 1024 * 1024) / 32) * 32
        return side, side

    def source_tokens(self, described: PartConfigs) -> int:
        return (self.source_area or 1024 * 1024) // 16**2

    def token_pixels(self, described: PartConfigs) -> int:
        return 16

    def shape(self, transformer: Part) -> Shape:
        config = transformer["config"]
        width = config["num_attention_heads"] * config["attention_head_dim"]
        blocks = (Blocks(config["num_layers"], {2: 74, 4: 132}),)
        return Shape(blocks=blocks, width=width, latents=config["in_channels"], text=config["context_in_dim"])

    def one_of_each_block(self, transformer: Part) -> Part:
        part = super().one_of_each_block(transformer)
        # Separate modulation of text and sources depends on values, so the meta device cannot trace it: 3 numbers per token less.
        return {**part, "config": {**part["config"], "causal_condition": False}}

    def step_inputs(self, described: PartConfigs, batch: ImageBatch) -> dict[str, Any]:
        import torch

        config = described["transformer"]["config"]
        grids = [(1, height // 16, width // 16) for height, width in (*[batch.source] * batch.sources, batch.size)]
        counts = [height * width for _, height, width in grids]
        slots = torch.arange(batch.text + sum(counts) // 4) >= batch.text
        # The transformer computes one row at a time.
        return {
            "hidden_states": batch.empty(sum(counts), config["in_channels"])[:1],
            "timestep": batch.times()[:1],
            "encoder_hidden_states": batch.empty(batch.text + sum(counts[:-1]) // 4, config["context_in_dim"])[:1],
            "img_shapes": [grids],
            "img_mask": slots[None],
            "return_dict": False,
        }

    def latents(self, vae: Part, batch: ImageBatch) -> Tensor:
        return batch.empty(vae["config"]["z_dim"], 1, batch.size[0] // 16, batch.size[1] // 16)

    def pixels(self, vae: Part, batch: ImageBatch) -> Tensor:
        return batch.empty(vae["config"].get("in_channels", 4), 1, *batch.source)
