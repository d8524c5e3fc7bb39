"""Images next to each other: of two policies, or of one policy before and after training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw
from torch import Tensor

from retouch.data.images import load_image
from retouch.inference.opening import open_policy, read_target
from retouch.inference.reference_context import SampleContext, check_context
from retouch.inference.sampling import UserSample, sample_tasks
from retouch.records.files import inside
from retouch.records.folder import RunFolder
from retouch.records.libraries import silence_libraries
from retouch.run import checkpoint
from retouch.run.checkpoint import TrainState
from retouch.run.state import restore_weights
from retouch.types import Task


class SideBySide:
    """A run's model with its untrained weights. Raises ValueError if the run's recipe or model cannot be loaded.

    ``device``: replaces the recipe's device, for example "cpu" while the run trains on the GPU.
    """

    def __init__(self, run: Path, *, device: str | None = None) -> None:
        silence_libraries()
        recipe, folder = read_target(str(run), [] if device is None else [f"device={device}"])
        if folder is None:
            raise ValueError(f"{run} is not the folder of a run")
        self._checkpoints = folder.checkpoints
        self._parts, _ = open_policy(recipe, None)
        copies = self._parts.copies
        tensors = {"weights": _cloned(copies.parameters), "copies": _cloned(copies.state())}
        self._untrained = TrainState(step=0, tensors=tensors, numbers={})
        self._loaded = 0

    def sample(
        self,
        task: Task,
        *,
        step: int,
        seed: int,
        context: SampleContext | None = None,
        called: Callable[[], None] = lambda: None,
    ) -> UserSample:
        """The image for a task with the weights of a checkpoint; step 0 is the untrained policy.

        The same ``seed`` gives the same noise with all weights. ``context``: see ``sample_tasks``. ``called`` is called after each
        forward pass of the image model. Raises ValueError if the model needs an image that the task lacks, or does not read one
        that the task has, if there is no intact checkpoint of this step, or if the policy makes no usable image.
        """
        self._check_images(task)
        if context is not None:
            check_context(self._parts.recipe)
        self._restore(step)
        with self._calling(called):
            (made,) = sample_tasks(self._parts, [task], seed, context=context)
        return made

    def _check_images(self, task: Task) -> None:
        recipe = self._parts.recipe
        takes, reads_reference = recipe.image_model.takes, recipe.policy.train.reads_reference
        if reads_reference and task.reference is None:
            raise ValueError("the IP-Adapter needs a reference image")
        if task.reference is not None and not reads_reference:
            raise ValueError("the model reads no reference image; remove it")
        if takes is None or (recipe.renderer is not None and not recipe.renderer.uses_sources):
            return
        if len(task.images) < takes.images[0]:
            raise ValueError("the model needs a source image")
        if len(task.images) > takes.images[1]:
            raise ValueError("the model makes images from text alone; remove the source image")
        if takes.mask and task.mask is None:
            raise ValueError("the model fills the masked part of an image; it needs a mask")
        if task.mask is not None and not takes.mask:
            raise ValueError("the model reads no mask; remove it")

    def _restore(self, step: int) -> None:
        if step != self._loaded:
            found = checkpoint.load(self._checkpoints / f"step-{step:06d}") if step else self._untrained
            restore_weights(self._parts.copies, found)
            self._loaded = step

    @contextmanager
    def _calling(self, called: Callable[[], None]) -> Iterator[None]:
        handle = self._parts.image_model.module.register_forward_hook(lambda module, given, made: called())
        try:
            yield
        finally:
            handle.remove()


def _cloned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


_GAP = 4
_TITLE = 14


def before_and_after(folder: Path, *, rows: int = 8, side: int = 128, until: int | None = None) -> Image.Image:
    """Draw the first ``rows`` held-out tasks: source image (if there is one), before and after training; each at most ``side`` px.

    Tiny images are enlarged by a whole factor. ``until``: the latest step to show; None means the latest step with images.

    Raises ValueError if the run has no images yet.
    """
    run = RunFolder(folder)
    steps = [step for step in run.sample_steps() if until is None or step <= until]
    if not steps:
        raise ValueError(f"{folder} has no images yet; train first, with samples.every above 0")
    first, last = (
        {line["task"]: line for line in run.read_samples(step) if line["set"] == "heldout"} for step in (steps[0], steps[-1])
    )
    lines = [(first[task], last[task]) for task in last if task in first][:rows]
    table = [
        [_image(run, steps[0], a, "source"), _image(run, steps[0], a, "image"), _image(run, steps[-1], b, "image")]
        for a, b in lines
    ]
    titles = ["source", f"step {steps[0]}", f"step {steps[-1]}"]
    if all(row[0] is None for row in table):
        table, titles = [row[1:] for row in table], titles[1:]
    return _grid(table, titles, side)


def _image(run: RunFolder, step: int, line: dict[str, Any], key: str) -> Image.Image | None:
    name = line[key]
    return None if name is None else load_image(inside(run.samples(step), name))


def _grid(table: list[list[Image.Image | None]], titles: list[str], side: int) -> Image.Image:
    pitch = side + _GAP
    sheet = Image.new("RGB", (pitch * len(titles), _TITLE + pitch * len(table)), "white")
    draw = ImageDraw.Draw(sheet)
    for column, title in enumerate(titles):
        draw.text((column * pitch, 0), title, fill="black")
    for row, images in enumerate(table):
        for column, image in enumerate(images):
            if image is not None:
                sheet.paste(_fitted(image, side), (column * pitch, _TITLE + row * pitch))
    return sheet


def _fitted(image: Image.Image, side: int) -> Image.Image:
    factor = side // max(image.size)
    if factor > 1:
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    image.thumbnail((side, side))
    return image
