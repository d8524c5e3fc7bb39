"""The recipe's section of a diffusers pipeline without a family of its own; ``model.py`` has the model. This file imports no torch,
because it is imported when a recipe is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, JsonValue, field_validator

from retouch.config.section import LIVE, live_object
from retouch.models.base import KOHYA, ComfyUINames, DiffusersModel, Size, TaskInputs
from retouch.models.pretrained import pipeline_files
from retouch.records.files import read_json

_COMFYUI = {
    KOHYA: ("StableDiffusion", "StableDiffusionInstructPix2Pix", "StableDiffusionXL", "StableDiffusionXLInstructPix2Pix"),
    "transformer.": ("AuraFlow", "Chroma", "Kandinsky5I2I", "Kandinsky5T2I", "Krea2", "PixArtAlpha", "PixArtSigma"),
}
"""The names of diffusers' modules that ComfyUI knows (``model_lora_keys_unet`` in its ``comfy/lora.py``): prefix and pipelines."""


class DiffusersPipeline(DiffusersModel):
    """Any diffusers pipeline with one denoiser, run by its own ``__call__``: text to image, or editing of source images.

    The pipeline guides by itself, as ``call`` says, and ``rollout.guidance_scale`` stays 1. A null ``size`` is the pipeline's own
    size. Its safety checker is not run, because a reward would score black images. ``docs/models.md`` lists the classes.
    """

    kind: Literal["pipeline"] = "pipeline"
    call: dict[str, JsonValue] = Field(default={})
    """Arguments of the pipeline's ``__call__``, such as ``guidance_scale``, ``true_cfg_scale`` or ``negative_prompt``; all others
    have the pipeline's defaults."""

    takes = TaskInputs(images=(0, 64))
    adapter = "retouch.models.any_pipeline.model:AnyPipeline"

    @property
    def pipeline(self) -> str | None:  # type: ignore[override]
        """The pipeline class, if it is one of diffusers and known on this machine."""
        import diffusers

        try:
            if self.path.startswith(LIVE):
                name = type(live_object(self.path, key="model.path")).__name__
            else:
                folder = self.find_weights()[0]
                name = "" if folder is None else str(read_json(folder / "model_index.json").get("_class_name"))
        except ValueError:
            return None
        return name if hasattr(diffusers, name) else None

    @property
    def comfyui(self) -> ComfyUINames | None:  # type: ignore[override]
        named = (self.pipeline or "").removesuffix("Pipeline")
        return next((ComfyUINames(prefix=prefix) for prefix, names in _COMFYUI.items() if named in names), None)

    @field_validator("size")
    @classmethod
    def _usual_size(cls, size: Size | None) -> Size | None:
        return size

    def options(self, source: Any) -> dict[str, Any]:
        return {"call": self.call}

    def files_of_pipeline(self, *, local: bool) -> Sequence[str] | None:
        return pipeline_files(self.path, local=local)

    def targets_in(self, module: Any) -> tuple[str, ...]:
        from retouch.models.lora import attention_layers

        return attention_layers(module)
