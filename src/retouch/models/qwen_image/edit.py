"""Qwen-Image-Edit (one source image) and Qwen-Image-Edit-Plus (2509 and 2511: one to several), as diffusers runs them."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor

from retouch.models.common.latents import Area, Size, fit
from retouch.models.common.parts import Source, load_image_processor
from retouch.models.common.pipeline_model import common_size
from retouch.models.qwen_image.model import EncoderInputs, QwenFlow
from retouch.models.qwen_image.text import EDIT, EDIT_PLUS, VISION
from retouch.types import Task


class QwenImageEdit(QwenFlow):
    """Qwen-Image-Edit: one source image, which the text encoder reads, and whose latents follow those of the output.

    ``size``: None takes the source's, resized to ``source_area``. ``condition_area`` and ``source_area``: px that the text encoder
    and the autoencoder see of an image, with its aspect ratio and sides of multiples of 32 (None: the pipeline's own; "as_is":
    images as they are).

    Source: diffusers' QwenImageEditPipeline.
    """

    TEMPLATE = EDIT
    CONDITION_AREA: ClassVar[int] = 1024 * 1024
    SOURCE_AREA: ClassVar[int] = 1024 * 1024
    MOST_SOURCES: ClassVar[int] = 1

    def __init__(self, *, condition_area: Area | None = None, source_area: Area | None = None, **parts: Any) -> None:
        super().__init__(**parts)
        self.condition_area: Area = self.CONDITION_AREA if condition_area is None else condition_area
        self.source_area: Area = self.SOURCE_AREA if source_area is None else source_area

    @classmethod
    def processors(cls, path: Source) -> dict[str, Any]:
        return {"image_processor": load_image_processor(path)}

    def layout(self, tasks: Sequence[Task]) -> tuple[Float[Tensor, "p s d"], Mapping[str, Any]]:
        """The packed source latents, and what all rows share.

        Raises ValueError if a task has too many images or none, or where sizes differ between tasks.
        """
        for task in tasks:
            if not 1 <= len(task.images) <= self.MOST_SOURCES:
                raise ValueError(
                    f"task {task.id!r} has {len(task.images)} source images; {type(self).__name__} takes 1 to {self.MOST_SOURCES}"
                )
        sizes = common_size([tuple(fit(image, self.source_area) for image in task.images) for task in tasks])
        source = self.latents.encode_sources([task.images for task in tasks], sizes)
        size = sizes[-1] if self.size is None else self.size
        grids = tuple((1, *self.latents.grid(each)) for each in (size, *sizes))
        return source, {"grids": grids, "size": size}

    def encoder_inputs(self, tasks: Sequence[Task], *, instructions: Sequence[str] | None = None) -> EncoderInputs:
        texts = self.checked(tasks, instructions)
        seen = [[self.latents.resize(image, fit(image, self.condition_area)) for image in task.images] for task in tasks]
        bodies = [self._body(text, len(task.images)) for task, text in zip(tasks, texts, strict=True)]
        return EncoderInputs(bodies, seen)

    def _body(self, instruction: str, images: int) -> str:
        assert images == 1  # its place is in the template
        return instruction

    def fit(self, image: Image) -> Size:
        return fit(image, self.source_area)


class QwenImageEditPlus(QwenImageEdit):
    """Qwen-Image-Edit-Plus: one to several source images ("Picture 1: ..."), small for the text encoder; output like the last.

    2511 differs from 2509 in its transformer's configuration (zero_cond_t) only.

    Source: diffusers' QwenImageEditPlusPipeline.
    """

    TEMPLATE = EDIT_PLUS
    CONDITION_AREA: ClassVar[int] = 384 * 384
    MOST_SOURCES: ClassVar[int] = 8

    def _body(self, instruction: str, images: int) -> str:
        return "".join(f"Picture {k}: {VISION}" for k in range(1, images + 1)) + instruction
