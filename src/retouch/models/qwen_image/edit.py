"""Qwen-Image-Edit (one source picture) and Qwen-Image-Edit-Plus (2509 and 2511: one to several), as diffusers runs them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from PIL.Image import Image
from transformers import PreTrainedTokenizerBase, Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessorPil

from retouch.models.common.chat_template import Tokens
from retouch.models.common.folders import load_parts
from retouch.models.common.latents import Area, Size, fit
from retouch.models.common.pipeline_model import common_size
from retouch.models.qwen_image.flow import PARTS, Prepared, QwenFlow
from retouch.models.qwen_image.layout import QwenLatents
from retouch.models.qwen_image.text import EDIT, EDIT_PLUS, VISION, QwenText
from retouch.types import Task


class QwenImageEdit(QwenFlow):
    """Qwen-Image-Edit: one source picture, read through the text encoder and, as latents, beside the noise.

    ``size``: (height, width) of the output in px; None takes the source's, brought to ``source_area``. ``condition_area`` and
    ``source_area``: px that the text encoder and the autoencoder see of a picture, with its aspect ratio and sides of multiples
    of 32 (None: the pipeline's own; "as_is": pictures as they are). ``template``: None is the official one. ``image_processor``:
    the text encoder's, Qwen2VLImageProcessorPil for one.
    """

    TEMPLATE: ClassVar[str] = EDIT
    CONDITION_AREA: ClassVar[int] = 1024 * 1024
    SOURCE_AREA: ClassVar[int] = 1024 * 1024
    MOST_SOURCES: ClassVar[int] = 1

    def __init__(
        self,
        *,
        transformer: QwenImageTransformer2DModel,
        vae: AutoencoderKLQwenImage,
        text_encoder: Qwen2_5_VLForConditionalGeneration,
        tokenizer: PreTrainedTokenizerBase,
        image_processor: Any,
        scheduler_config: Mapping[str, Any],
        size: Size | None = None,
        template: str | None = None,
        condition_area: Area | None = None,
        source_area: Area | None = None,
    ) -> None:
        template = self.TEMPLATE if template is None else template
        text = QwenText(text_encoder, tokenizer, template=template, image_processor=image_processor)
        latents = QwenLatents(vae)
        super().__init__(transformer=transformer, latents=latents, text=text, scheduler_config=scheduler_config, size=size)
        self.condition_area: Area = self.CONDITION_AREA if condition_area is None else condition_area
        self.source_area: Area = self.SOURCE_AREA if source_area is None else source_area

    @classmethod
    def from_pretrained(
        cls,
        path: Path | str,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        size: Size | None = None,
        template: str | None = None,
        condition_area: Area | None = None,
        source_area: Area | None = None,
    ) -> "QwenImageEdit":
        """Load a local diffusers folder (safetensors, no remote code); everything but the transformer is frozen."""
        parts = load_parts(path, dtype=dtype, device=device, **PARTS)
        return cls(
            **{name: parts[name] for name in PARTS},
            # In its PIL version, which needs no torchvision.
            image_processor=Qwen2VLImageProcessorPil.from_pretrained(Path(path) / "processor", local_files_only=True),
            scheduler_config=parts["scheduler"],
            size=size,
            template=template,
            condition_area=condition_area,
            source_area=source_area,
        )

    def prepare(self, tasks: Sequence[Task], *, instructions: Sequence[str] | None = None) -> Prepared:
        """Everything that needs no gradient: tokens, pixels and source latents; ``instructions`` replace the tasks' own.

        ValueError where a task has too many pictures or none, or where sizes differ between tasks.
        """
        for task in tasks:
            if not 1 <= len(task.images) <= self.MOST_SOURCES:
                raise ValueError(
                    f"task {task.id!r} has {len(task.images)} source pictures; {type(self).__name__} takes 1 to {self.MOST_SOURCES}"
                )
        sizes = common_size([tuple(fit(image, self.source_area) for image in task.images) for task in tasks])
        tokens = self.tokenise(tasks, instructions=instructions)
        columns = [[task.images[k] for task in tasks] for k in range(len(sizes))]
        source = [self.latents.encode(self.latents.pixels(images, each)) for images, each in zip(columns, sizes, strict=True)]
        size = sizes[-1] if self.size is None else self.size
        grids = tuple((1, *self.latents.grid(each)) for each in (size, *sizes))
        return Prepared(tokens, torch.cat(source, dim=1), {"grids": grids, "size": size})

    def tokenise(self, tasks: Sequence[Task], *, instructions: Sequence[str] | None = None) -> Tokens:
        """What the text encoder reads; ``instructions`` replace the tasks' own. Sizes may differ."""
        texts = [task.instruction for task in tasks] if instructions is None else list(instructions)
        for task, text in zip(tasks, texts, strict=True):
            self.text.check(text, task.id)
        seen = [[self.latents.resize(image, fit(image, self.condition_area)) for image in task.images] for task in tasks]
        bodies = [self._body(text, len(task.images)) for task, text in zip(tasks, texts, strict=True)]
        return self.text.tokenise(bodies, seen)

    def _body(self, instruction: str, pictures: int) -> str:
        assert pictures == 1  # its place is in the template
        return instruction

    def fit(self, image: Image) -> Size:
        return fit(image, self.source_area)


class QwenImageEditPlus(QwenImageEdit):
    """Qwen-Image-Edit-Plus: one to several source pictures ("Picture 1: ..."), small for the text encoder; output like the last.

    2511 differs from 2509 in its transformer's configuration (zero_cond_t) only.
    """

    TEMPLATE: ClassVar[str] = EDIT_PLUS
    CONDITION_AREA: ClassVar[int] = 384 * 384
    MOST_SOURCES: ClassVar[int] = 8

    def _body(self, instruction: str, pictures: int) -> str:
        return "".join(f"Picture {k}: {VISION}" for k in range(1, pictures + 1)) + instruction
