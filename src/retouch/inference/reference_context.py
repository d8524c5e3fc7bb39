"""Sampling with the reference image as context: an inpainting model sees the reference above the source image on one canvas.

The mask of the canvas is 0 over the reference, so the model keeps it, and the part of the result below it is the image. Source: the
inference scripts of Calligrapher (arXiv 2506.24123).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import PIL.Image
from PIL.Image import Image

from retouch.data.tasks import require_same_size
from retouch.models.common.wrappers import ModelWrapper
from retouch.models.flux.model import FluxFill
from retouch.recipe.recipe import Recipe
from retouch.types import Task

SampleContext: TypeAlias = Literal["reference"]
"""What an inpainting model sees next to the source image."""

_MULTIPLE = 16
_HIGHEST = 4


@dataclass(frozen=True, slots=True)
class ContextCanvas:
    """A task whose source image is a canvas. ``top``: height in px of its upper part, which shows the reference image."""

    task: Task
    top: int

    def crop(self, canvas: Image) -> Image:
        """The part of an image of the canvas's size that is below the reference."""
        return canvas.crop((0, self.top, canvas.width, canvas.height))


def reference_canvas(task: Task) -> ContextCanvas:
    """Put the reference image of a task above its source image.

    The source of (w, h) px stays as it is. The reference of (a, b) px is scaled to width w (Lanczos), and its height w * b / a,
    rounded down, becomes the nearest multiple of 16 px, the smaller one of two, and at least 16. The mask of the canvas is 0 over
    the reference, and the task's mask below it. The result has the same instruction and reference.

    Raises ValueError for a task without exactly one source image, without a mask of its size or without a reference, and for a
    reference that is more than four times as high as wide.
    """
    if len(task.images) != 1 or task.mask is None:
        having = f"{len(task.images)} images and {'a' if task.mask is not None else 'no'} mask"
        raise ValueError(f"context: task {task.id!r} has {having}; give one source image and a mask")
    if task.reference is None:
        raise ValueError(f"context: task {task.id!r} has no reference image; give one")
    (source,), (width, height) = task.images, task.reference.size
    require_same_size(task.mask.size, source.size)
    if height > _HIGHEST * width:
        raise ValueError(
            f"context: the reference image of task {task.id!r} is {width}x{height}; crop it to at most {_HIGHEST} times its width"
        )
    scaled = source.width * height // width
    top = max(1, (scaled + _MULTIPLE // 2 - 1) // _MULTIPLE) * _MULTIPLE
    size = (source.width, top + source.height)
    canvas, mask = PIL.Image.new("RGB", size), PIL.Image.new("L", size)
    canvas.paste(task.reference.resize((source.width, top), PIL.Image.Resampling.LANCZOS), (0, 0))
    canvas.paste(source, (0, top))
    mask.paste(task.mask, (0, top))
    return ContextCanvas(replace(task, images=(canvas,), mask=mask), top)


def check_context(recipe: Recipe) -> None:
    """Raise ValueError if the policy of the recipe cannot sample with a reference as context, as far as its sections say."""
    takes = recipe.image_model.takes
    if recipe.renderer is not None or (takes is not None and not takes.mask):
        raise ValueError("context: this policy fills no masked part of an image; use an inpainting model, such as flux-fill")


@contextmanager
def sized_by_source(model: object) -> Iterator[None]:
    """While this is open, the images of an inpainting model have the sizes of their source images, whatever its ``size`` is.

    Raises ValueError for a model that is not FLUX.1-Fill.
    """
    while isinstance(model, ModelWrapper):
        model = model.model
    if not isinstance(model, FluxFill):
        raise ValueError(f"context: {type(model).__name__} fills no masked part of an image; use flux-fill")
    size, model.size = model.size, None
    try:
        yield
    finally:
        model.size = size
