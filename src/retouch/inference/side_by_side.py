"""Samples one task with the untrained and with the trained weights of a run, from the same noise."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from retouch.assembly.state import restore_weights
from retouch.inference.opening import open_policy, read_target
from retouch.inference.reference_context import SampleContext, check_context
from retouch.inference.sampling import UserSample, sample_tasks
from retouch.records.libraries import silence_libraries
from retouch.training import checkpoint
from retouch.training.checkpoint import TrainState
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
