"""The recipe's sections of FLUX.1, FLUX.1-Fill (inpainting) and FLUX.1-Kontext (editing); ``model.py`` has the models.

This file imports no torch, because it is imported when a recipe is read.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from retouch.config.section import NonNegative
from retouch.models.base import ComfyUINames, DiffusersModel, TaskInputs, Usual


class FluxFamily(DiffusersModel):
    """Base class of the sections of FLUX.1's models."""

    guidance: NonNegative | None = Field(default=None, exclude_if=lambda guidance: guidance is None)
    """Guidance input of a guidance-distilled model; it needs no second forward pass. Null takes the pipeline's default: 3.5, and 30
    for ``flux-fill``."""

    # Flow-GRPO's LoRA targets for Flux (rank 32, alpha 64): the attention of double and single blocks, and the feed-forward layers
    # of double blocks.
    lora_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
        *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
    )
    ip_adapter_blocks = ("double", "all")
    configurations: ClassVar[tuple[tuple[str, str], ...]] = (("schnell", "flux.1-schnell.json"), ("", "flux.1-dev.json"))
    # Guidance is an input of these models, so it needs no second forward pass.
    usual = (("schnell", Usual(steps=4)),)
    comfyui = ComfyUINames(prefix="transformer.")

    def options(self, source: Any) -> dict[str, Any]:
        return {} if self.guidance is None else {"guidance": self.guidance}


class FluxModel(FluxFamily):
    """FLUX.1-dev or -schnell, text to image.

    Source: diffusers' FluxPipeline; weights black-forest-labs/FLUX.1-dev and FLUX.1-schnell.
    """

    kind: Literal["flux"] = "flux"

    adapter = "retouch_models.flux.model:Flux"
    pipeline = "FluxPipeline"
    hub_ids = (
        "black-forest-labs/FLUX.1-dev",
        "black-forest-labs/FLUX.1-schnell",
    )


class FluxFillModel(FluxFamily):
    """FLUX.1-Fill: it fills the masked part of an image.

    Source: diffusers' FluxFillPipeline; weights black-forest-labs/FLUX.1-Fill-dev.
    """

    kind: Literal["flux-fill"] = "flux-fill"

    takes = TaskInputs(images=(1, 1), mask=True)
    adapter = "retouch_models.flux.model:FluxFill"
    pipeline = "FluxFillPipeline"
    hub_ids = ("black-forest-labs/FLUX.1-Fill-dev",)
    configurations = (("", "flux.1-fill-dev.json"),)


class FluxKontextModel(FluxFamily):
    """FLUX.1-Kontext: it edits an image according to an instruction.

    Source: FLUX.1 Kontext (arXiv 2506.15742), diffusers' FluxKontextPipeline; weights black-forest-labs/FLUX.1-Kontext-dev.
    """

    kind: Literal["flux-kontext"] = "flux-kontext"

    takes = TaskInputs(images=(1, 1))
    adapter = "retouch_models.flux.model:FluxKontext"
    pipeline = "FluxKontextPipeline"
    hub_ids = ("black-forest-labs/FLUX.1-Kontext-dev",)
