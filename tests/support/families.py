"""The families of image models: a tiny one of each as Retouch loads it, and the arguments with which diffusers' pipeline draws."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from PIL import Image, ImageDraw

import tiny_editing
import tiny_flux2
import tiny_models
import tiny_pipelines
import tiny_qwen_image_2
from retouch.models.base import DiffusersModel
from retouch.types import Task
from retouch_models.flux import FluxFillModel, FluxKontextModel, FluxModel
from retouch_models.flux2 import Flux2KleinModel
from retouch_models.qwen_image import QwenImageEditModel, QwenImageEditPlusModel, QwenImageModel
from retouch_models.qwen_image.model import EDIT, EDIT_PLUS, TEXT_TO_IMAGE
from retouch_models.qwen_image_2 import QwenImage2Model
from retouch_models.sd3 import SD3Model
from retouch_models.z_image import ZImageModel

TEXTS = ("a red circle", "blue")
CPU = torch.device("cpu")


def save_qwen_image(folder: Path) -> None:
    tiny_pipelines.qwen_image().save_pretrained(folder)
    tiny_models.qwen_image_processor().save_pretrained(folder / "processor")


def qwen_pipeline(template: str, kind: Any, _: Path) -> Any:
    """The pipeline of the folder that ``save_qwen_image`` writes; the tiny tokenizer knows bytes only, so prefixes are longer."""
    made = tiny_editing.parts()
    if kind is not diffusers.QwenImagePipeline:
        return tiny_editing.pipeline(kind, made, template)
    pipe = kind(**made, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**tiny_models.SCHEDULER))
    pipe.prompt_template_encode_start_idx = len(made["tokenizer"](template.partition("{}")[0]).input_ids)
    return pipe


@dataclass(frozen=True)
class Family:
    """A kind of model.

    ``save`` writes a tiny one. ``sources``: source images of a task. ``asks``: the arguments of the pipeline's call for some tasks
    and a scale of guidance, next to prompts and sizes. ``open``: the pipeline of a saved folder.
    """

    section: type[DiffusersModel]
    save: Callable[[Path], object]
    size: tuple[int, int] = (24, 40)
    sources: int = 0
    asks: Callable[[Sequence[Task], float], dict[str, Any]] = lambda tasks, scale: {}
    open: Callable[[Path], Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return str(self.section.model_fields["kind"].default)

    def build(self, folder: Path, dtype: str = "float32", **changes: Any) -> Any:
        """The model of the folder, with short texts and small source images, on which tiny models would spend all their time."""
        settings = {"size": self.size, "dtype": dtype, **self.options, **changes}
        model: Any = self.section(path=str(folder), **settings).build(device=CPU)
        areas = {"source_as_is": True, "condition_area": 32 * 32, "source_area": 64 * 64}
        if self.section is QwenImageEditModel:
            areas["condition_area"] = 64 * 64  # diffusers has one size for both
        for name, value in areas.items():
            if hasattr(model, name):
                setattr(model, name, value)
        if self.section in (FluxModel, FluxFillModel, FluxKontextModel):
            model.text.max_sequence_length = 20
        if self.section is Flux2KleinModel:
            model.text.max_sequence_length = 96
        return model

    def tasks(self, *texts: str, sources: int | None = None, sizes: Sequence[tuple[int, int]] = ((32, 32), (32, 32))) -> list[Task]:
        images = [tiny_models.image(k, *sizes[k]) for k in range(self.sources if sources is None else sources)]
        mask = None
        if self.section is FluxFillModel:
            mask = Image.new("L", sizes[0][::-1])
            ImageDraw.Draw(mask).rectangle((5, 3, 21, 14), fill=255)
        return [Task(id=text, instruction=text, images=tuple(images), mask=mask) for text in texts or TEXTS]

    def pipeline(self, folder: Path) -> Any:
        kind = getattr(diffusers, self.section.pipeline)
        pipe = kind.from_pretrained(folder) if self.open is None else self.open(folder)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def theirs(self, pipe: Any, tasks: Sequence[Task], scale: float = 1.0, **changes: Any) -> torch.Tensor:
        """The pipeline's latents after four steps."""
        asked = {"height": self.size[0], "width": self.size[1], "num_inference_steps": 4, "output_type": "latent"}
        asked |= {"prompt": [task.instruction for task in tasks], "generator": tiny_models.generators(len(tasks))}
        made: torch.Tensor = pipe(**asked | self.asks(tasks, scale) | changes).images
        return made


def ours(model: Any, tasks: Sequence[Task], scale: float = 1.0, *, num_steps: int = 4) -> torch.Tensor:
    negative = model.encode_negative(tasks) if scale > 1 else None
    draws = tiny_models.generators(len(tasks))
    return tiny_models.euler(model, model.encode(tasks), draws, num_steps=num_steps, negative=negative, guidance_scale=scale)


def _flux(tasks: Sequence[Task], scale: float, **more: Any) -> dict[str, Any]:
    negative = {"true_cfg_scale": scale, "negative_prompt": [""] * len(tasks)} if scale > 1 else {}
    return {"max_sequence_length": 20, **negative, **more}


def _fill(tasks: Sequence[Task], scale: float) -> dict[str, Any]:
    return _flux(tasks, scale, image=[task.images[0] for task in tasks], mask_image=[task.mask for task in tasks])


def _kontext(tasks: Sequence[Task], scale: float) -> dict[str, Any]:
    return _flux(tasks, scale, image=[task.images[0] for task in tasks], max_area=24 * 40, _auto_resize=False)


def _negative(tasks: Sequence[Task], scale: float, text: str = " ") -> dict[str, Any]:
    return {"negative_prompt": [text] * len(tasks) if scale > 1 else None, "true_cfg_scale": scale}


def _edit(tasks: Sequence[Task], scale: float) -> dict[str, Any]:
    """The pipeline resizes what the text encoder reads if it gets one image, but not if it gets a list."""
    return _negative(tasks, scale) | {"image": tasks[0].images[0]}


def _edit_plus(tasks: Sequence[Task], scale: float) -> dict[str, Any]:
    return _negative(tasks, scale) | {"image": list(tasks[0].images)}


def _qwen_image_2(tasks: Sequence[Task], scale: float) -> dict[str, Any]:
    """The pipeline replaces an empty negative prompt by " "."""
    return _negative(tasks, scale, "") | {"image": list(tasks[0].images) or None, "use_kv_cache": False, "output_resolution": 64}


def _qwen(section: type[DiffusersModel], template: str, **more: Any) -> Family:
    opened = partial(qwen_pipeline, template, getattr(diffusers, section.pipeline))
    return Family(section, save_qwen_image, open=opened, **more)


FAMILIES = {
    "sd3": Family(
        SD3Model,
        lambda folder: tiny_pipelines.sd3().save_pretrained(folder),
        asks=lambda tasks, scale: {"guidance_scale": scale, "max_sequence_length": 256},
    ),
    "flux": Family(FluxModel, tiny_models.save_flux, asks=partial(_flux, guidance_scale=2.0), options={"guidance": 2.0}),
    "flux-fill": Family(FluxFillModel, partial(tiny_models.save_flux, fills=True), sources=1, asks=_fill),
    "flux-kontext": Family(FluxKontextModel, tiny_models.save_flux, sources=1, asks=_kontext),
    "flux2": Family(
        Flux2KleinModel,
        tiny_flux2.save,
        size=(64, 96),
        asks=lambda tasks, scale: {"guidance_scale": scale, "image": list(tasks[0].images) or None, "max_sequence_length": 96},
    ),
    "qwen-image": _qwen(QwenImageModel, TEXT_TO_IMAGE, asks=_negative),
    "qwen-image-edit": _qwen(QwenImageEditModel, EDIT, sources=1, asks=_edit),
    "qwen-image-edit-plus": _qwen(QwenImageEditPlusModel, EDIT_PLUS, sources=2, asks=_edit_plus),
    "qwen-image-2": Family(
        QwenImage2Model, tiny_qwen_image_2.save, size=(64, 96), asks=_qwen_image_2, open=lambda _: tiny_qwen_image_2.pipeline()
    ),
    "z-image": Family(ZImageModel, tiny_models.save_z_image, asks=lambda tasks, scale: {"guidance_scale": scale - 1}),
}
