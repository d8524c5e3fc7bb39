"""FLUX.2-klein in a recipe."""

from __future__ import annotations

from typing import Any, Literal

from retouch.models.base import Blocks, Described, DiffusersModel, ImageBatch, Part, Shape, Takes


class Flux2KleinModel(DiffusersModel):
    """FLUX.2-klein: an image from a prompt, or from a prompt and reference images.

    Source: diffusers' Flux2KleinPipeline.
    """

    kind: Literal["flux2-klein"] = "flux2-klein"

    takes = Takes(images=(0, 10))
    adapter = "retouch.models.flux2.model:Flux2Klein"
    pipeline = "Flux2KleinPipeline"
    # All linear layers of the double blocks, and the fused input projection of the single blocks. Their output projection has the
    # name of a list in the double blocks, "attn.to_out", which no adapter can be put on.
    lora_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.to_qkv_mlp_proj"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
        *("ff.linear_in", "ff.linear_out", "ff_context.linear_in", "ff_context.linear_out"),
    )
    configurations = (("4b", "flux.2-klein-4b.json"), ("9b", "flux.2-klein-9b.json"))
    loaded_as = (("text_encoder", "Qwen3Model"),)
    text_tokens = 512

    def shape(self, transformer: Part) -> Shape:
        shape, config = super().shape(transformer), transformer["config"]
        blocks = Blocks(config["num_layers"], {2: 66, 4: 116}), Blocks(config["num_single_layers"], {2: 62, 4: 100})
        return Shape(blocks=blocks, width=shape.width, latents=shape.latents, text=shape.text)

    def step_inputs(self, described: Described, batch: ImageBatch) -> dict[str, Any]:
        import torch

        config, output = described["transformer"]["config"], self.image_tokens(batch.size, described)
        tokens = output + batch.sources * self.image_tokens(batch.source, described)
        return {
            "hidden_states": batch.empty(tokens, config["in_channels"]),
            "timestep": batch.times(),
            "encoder_hidden_states": batch.empty(batch.text, config["joint_attention_dim"]),
            "img_ids": torch.empty(tokens, 4, device="meta"),
            "txt_ids": torch.empty(batch.text, 4, device="meta"),
            "return_dict": False,
        }
