"""Qwen-Image-Edit (one source image) and Qwen-Image-Edit-Plus (2509 and 2511: one or more), as diffusers runs them."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor

from retouch.models.common.chat_template import VISION
from retouch.models.common.latents import Area, Size, fit
from retouch.models.common.parts import Source, load_image_processor
from retouch.models.common.pipeline_model import common_size
from retouch.models.qwen_image.model import EncoderInputs, QwenFlow
from retouch.models.qwen_image.text import EDIT, EDIT_PLUS
from retouch.types import Task


class QwenImageEdit(QwenFlow):
    """Qwen-Image-Edit: the text encoder reads the source image, and the source's latents follow those of the output.

    ``size``: None takes the source's size after it is resized to ``source_area``. ``condition_area``, ``source_area``: area in px
    to which an image is resized for the text encoder and for the autoencoder. The aspect ratio is kept, and sides are multiples of
    32 (None: the pipeline's area; "as_is": images are not resized).

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
        """Return the packed source latents, and the values that all rows share.

        Raises ValueError if a task has too many images or none, or if sizes differ between tasks.
        """
        for task in tasks:
            if not 1 <= len(task.images) <= self.MOST_SOURCES:
                raise ValueError(
                    f"task {task.id!r} has {len(task.images)} source images; {type(self).__name__} takes 1 to {self.MOST_SOURCES}"
                )
        sizes = common_size([tuple(fit(image, self.source_area) for image in task.images) for task in tasks], tasks)
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
        assert images == 1  # the template contains the image's vision block
        return instruction

    def fit(self, image: Image) -> Size:
        return fit(image, self.source_area)


class QwenImageEditPlus(QwenImageEdit):
    """Qwen-Image-Edit-Plus: one or more source images ("Picture 1: ..."), which the text encoder reads at a small size.

    The output has the size of the last source image. 2511 differs from 2509 only in its transformer's configuration (zero_cond_t).

    Source: diffusers' QwenImageEditPlusPipeline.
    """

    TEMPLATE = EDIT_PLUS
    CONDITION_AREA: ClassVar[int] = 384 * 384
    MOST_SOURCES: ClassVar[int] = 8

    def _body(self, instruction: str, images: int) -> str:
        return "".join(f"Picture {k}: {VISION}" for k in range(1, images + 1)) + instruction
