"""The kinds of image model that a recipe can name, and what each has of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from retouch.models.flux import model as flux
from retouch.models.flux.fill import FluxFill
from retouch.models.flux.kontext import FluxKontext
from retouch.models.qwen_image import flow as qwen_flow
from retouch.models.qwen_image.edit import QwenImageEdit, QwenImageEditPlus
from retouch.models.qwen_image.model import QwenImage
from retouch.models.sd3 import model as sd3
from retouch.models.z_image import model as z_image


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """``adapter``: its class, with ``from_pretrained``. ``lora_targets``: the linear layers that usually get an adapter.
    ``pipeline``: the class in diffusers that loads such a LoRA.
    """

    adapter: Any
    lora_targets: Sequence[str]
    pipeline: str


def _qwen(adapter: type, pipeline: str) -> Family:
    return Family(adapter=adapter, lora_targets=qwen_flow.LORA_TARGETS, pipeline=pipeline)


def _flux(adapter: type, pipeline: str) -> Family:
    return Family(adapter=adapter, lora_targets=flux.LORA_TARGETS, pipeline=pipeline)


FAMILIES = {
    "playground": _qwen(QwenImageEdit, "QwenImageEditPipeline"),
    "playground-painter": _qwen(QwenImage, "QwenImagePipeline"),
    "playground-words": _flux(FluxFill, "FluxFillPipeline"),
    "qwen-image": _qwen(QwenImage, "QwenImagePipeline"),
    "qwen-image-edit": _qwen(QwenImageEdit, "QwenImageEditPipeline"),
    "qwen-image-edit-plus": _qwen(QwenImageEditPlus, "QwenImageEditPlusPipeline"),
    "sd3": Family(adapter=sd3.SD3, lora_targets=sd3.LORA_TARGETS, pipeline="StableDiffusion3Pipeline"),
    "z-image": Family(adapter=z_image.ZImage, lora_targets=z_image.LORA_TARGETS, pipeline="ZImagePipeline"),
    "flux": _flux(flux.Flux, "FluxPipeline"),
    "flux-fill": _flux(FluxFill, "FluxFillPipeline"),
    "flux-kontext": _flux(FluxKontext, "FluxKontextPipeline"),
}
