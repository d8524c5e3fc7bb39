"""The worker process of ``retouch view --try``: it reads jobs from stdin and writes progress and results to stdout, as JSON lines.

It keeps the model of the last run. It ends when stdin is closed, or after ten minutes without a job.
"""

import base64
import json
import os
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from PIL.Image import Image

from retouch.data.images import EncodedImage, load_image, load_mask
from retouch.data.tasks import require_same_size
from retouch.inference.opening import open_policy, read_target
from retouch.inference.sampling import SampleContext, UserSample, check_context, sample_tasks
from retouch.records.files import png
from retouch.records.libraries import silence_libraries
from retouch.run import checkpoint
from retouch.run.checkpoint import TrainState, restore_weights
from retouch.types import Task

IDLE_SECONDS = 600.0
MAX_PIXELS = 4096 * 4096
_REPORT_SECONDS = 0.1


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
        stored = dict(zip(("weights", "copies"), self._parts.stored(), strict=True))
        tensors = {part: {name: each.detach().clone() for name, each in found.items()} for part, found in stored.items()}
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
        if step != self._loaded:
            found = checkpoint.load(self._checkpoints / f"step-{step:06d}") if step else self._untrained
            restore_weights(self._parts.copies, found, self._parts.painted)
            self._loaded = step
        handle = self._parts.image_model.module.register_forward_hook(lambda module, given, made: called())
        try:
            (made,) = sample_tasks(self._parts, [task], seed, context=context)
        finally:
            handle.remove()
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


def main() -> None:
    """Process jobs until stdin is closed or no job arrives for ``IDLE_SECONDS``."""
    os.nice(10)  # a run that is training has priority
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # stdout becomes stderr, so that libraries cannot print between the events
    opened: tuple[tuple[str, str | None], SideBySide] | None = None
    while select.select([sys.stdin], [], [], IDLE_SECONDS)[0]:
        line = sys.stdin.readline()
        if not line:
            return
        job: dict[str, Any] = json.loads(line)
        try:
            image, mask, reference = (_decoded(job, name) for name in ("image", "mask", "reference"))
            if image is not None and mask is not None:
                require_same_size(mask.size, image.size)
            task = Task("try", job["instruction"], () if image is None else (image,), mask=mask, reference=reference)
            key = (job["run"], job["device"])
            if opened is None or opened[0] != key:
                opened = None  # free its memory before the next model is loaded
                _send(events, {"stage": "loading"})
                opened = key, SideBySide(Path(job["run"]), device=job["device"])
            _run(events, opened[1], task, job)
        except ValueError as error:
            _send(events, {"error": str(error)[:2000]})


def _decoded(job: dict[str, Any], name: str) -> Image | None:
    """Decode an image of a job. Raises ValueError with its name if it cannot be read."""
    if job[name] is None:
        return None
    try:
        content = base64.b64decode(job[name], validate=True)
    except ValueError:
        raise ValueError(f"the {name} is not base64") from None
    load = load_mask if name == "mask" else load_image
    return load(EncodedImage(f"the {name}", content), max_pixels=MAX_PIXELS)


def _run(events: TextIO, pair: SideBySide, task: Task, job: dict[str, Any]) -> None:
    found = {}
    for stage, step in (("base", 0), ("trained", job["step"])):
        _send(events, {"stage": stage, "calls": 0})
        calls, last = 0, time.monotonic()

        def called(stage: str = stage) -> None:
            nonlocal calls, last
            calls += 1
            if time.monotonic() - last > _REPORT_SECONDS:
                last = time.monotonic()
                _send(events, {"stage": stage, "calls": calls})

        made = pair.sample(task, step=step, seed=job["seed"], context=job["context"], called=called)
        found[stage] = {"image": _png(made.image), "text": made.text, "fell_back": made.fell_back}
    source = _png(made.task.images[0]) if task.images else None
    _send(events, {"done": {**found, "source": source, "step": job["step"], "seed": job["seed"]}})


def _png(image: Image) -> str:
    return base64.b64encode(png(image.convert("RGB"))).decode()


def _send(events: TextIO, event: dict[str, Any]) -> None:
    events.write(json.dumps(event) + "\n")
    events.flush()


if __name__ == "__main__":
    main()
