"""The recipe's sections of FLUX.2-klein; ``model.py`` has the model. This file imports no torch,
because it is imported when a recipe is read."""

from __future__ import annotations

from typing import Literal

from retouch.models.base import ComfyUINames, DiffusersModel, TaskInputs, Usual


class Flux2KleinModel(DiffusersModel):
    """FLUX.2-klein: an image from a prompt, or from a prompt and reference images.

    Source: diffusers' Flux2KleinPipeline.
    """

    kind: Literal["flux2-klein"] = "flux2-klein"

    takes = TaskInputs(images=(0, 10))
    adapter = "retouch_models.flux2.model:Flux2Klein"
    pipeline = "Flux2KleinPipeline"
    hub_ids = (
        "black-forest-labs/FLUX.2-klein-4B",
        "black-forest-labs/FLUX.2-klein-base-4B",
        "black-forest-labs/FLUX.2-klein-9B",
        "black-forest-labs/FLUX.2-klein-base-9B",
    )
    # All linear layers of the double blocks, and the fused input projection of the single blocks. The output projection of the
    # single blocks, "attn.to_out", has the same name as a list in the double blocks, which cannot have an adapter.
    lora_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.to_qkv_mlp_proj"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
        *("ff.linear_in", "ff.linear_out", "ff_context.linear_in", "ff_context.linear_out"),
    )
    configurations = (("4b", "flux.2-klein-4b.json"), ("9b", "flux.2-klein-9b.json"))
    usual = (
        ("base", Usual(guidance=4.0)),
        ("", Usual(steps=4)),
    )
    comfyui = ComfyUINames(
        joined={
            "double_blocks.*.img_attn.qkv": [f"transformer_blocks.*.attn.to_{part}" for part in "qkv"],
            "double_blocks.*.img_attn.proj": ["transformer_blocks.*.attn.to_out.0"],
            "double_blocks.*.img_mlp.0": ["transformer_blocks.*.ff.linear_in"],
            "double_blocks.*.img_mlp.2": ["transformer_blocks.*.ff.linear_out"],
            "double_blocks.*.txt_attn.qkv": [f"transformer_blocks.*.attn.add_{part}_proj" for part in "qkv"],
            "double_blocks.*.txt_attn.proj": ["transformer_blocks.*.attn.to_add_out"],
            "double_blocks.*.txt_mlp.0": ["transformer_blocks.*.ff_context.linear_in"],
            "double_blocks.*.txt_mlp.2": ["transformer_blocks.*.ff_context.linear_out"],
            "single_blocks.*.linear1": ["single_transformer_blocks.*.attn.to_qkv_mlp_proj"],
            "single_blocks.*.linear2": ["single_transformer_blocks.*.attn.to_out"],
            "img_in": ["x_embedder"],
            "txt_in": ["context_embedder"],
            "time_in.in_layer": ["time_guidance_embed.timestep_embedder.linear_1"],
            "time_in.out_layer": ["time_guidance_embed.timestep_embedder.linear_2"],
            "final_layer.linear": ["proj_out"],
        }
    )
