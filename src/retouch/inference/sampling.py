"""`retouch sample`: use a policy as its end user would, for one instruction or for a list of instructions."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from PIL.Image import SAVE, Image, registered_extensions

from retouch.data.images import fit, fit_mask, load_image, load_mask, off_centre, removed_by_fit
from retouch.data.sources.prompts import read_instructions
from retouch.data.tasks import require_same_size
from retouch.inference.opening import open_policy, read_target
from retouch.inference.reference_context import SampleContext, check_context, reference_canvas, sized_by_source
from retouch.policies.autoregressive.trajectory import AutoregressiveTrajectory
from retouch.recipe.recipe import Recipe
from retouch.records.folder import RunFolder
from retouch.records.libraries import silence_libraries
from retouch.renderers.wrappers import Completions
from retouch.run.build import PolicyParts
from retouch.run.completions import completion_texts
from retouch.types import Batch, Task


@dataclass(frozen=True, slots=True)
class UserSample:
    """An image for a task. ``text``: the completion, if the policy generates text. ``fell_back``: no image could be made from the
    completion, so the image was made from the task's instruction."""

    task: Task
    image: Image
    text: str | None
    fell_back: bool


def sample_target(
    target: str,
    *,
    instruction: str,
    image: Path | None,
    mask: Path | None,
    reference: Path | None = None,
    context: SampleContext | None = None,
    out: Path,
    seed: int,
    overrides: Sequence[str] = (),
) -> UserSample:
    """Make one image from the instruction and its source images, and write it to ``out``. ``context``: see ``sample_tasks``.
    ``overrides``: changes of the recipe, as for ``--set``.

    Raises ValueError if an image cannot be read, if ``out`` is no file of a known image format, if the model does not take the
    images or needs others, or if the policy makes no usable image.
    """
    if not instruction.strip():
        raise ValueError("--instruction is empty; say what the image should become")
    _require_image_file(out)
    images = () if image is None else (load_image(image),)
    task = Task(
        id=str(out),
        instruction=instruction,
        images=images,
        mask=None if mask is None else load_mask(mask),
        reference=None if reference is None else load_image(reference),
    )
    recipe, folder = read_target(target, overrides)
    _require_inputs(recipe, task, context)
    (sample,) = _samples(recipe, folder, [task], seed, context)
    out.parent.mkdir(parents=True, exist_ok=True)
    sample.image.save(out)
    return sample


def _require_image_file(out: Path) -> None:
    """Raise ValueError if no image can be written to ``out``."""
    if out.is_dir():
        raise ValueError(f"--out {out}: this is a folder; give the name of a file, for example {out / 'image.png'}")
    if registered_extensions().get(out.suffix.lower()) not in SAVE:
        raise ValueError(f"--out {out}: not the ending of an image file; use for example {out.name}.png")
    if (above := next((folder for folder in out.parents if folder.exists()), None)) is not None and not above.is_dir():
        raise ValueError(f"--out {out}: {above} is a file, not a folder; give another name")


def sample_list(
    target: str,
    *,
    instructions: Path,
    context: SampleContext | None = None,
    out: Path,
    seed: int,
    overrides: Sequence[str] = (),
) -> list[UserSample]:
    """Make an image for each line of a list (see ``read_instructions``), in the new folder ``out`` with ``samples.jsonl``.

    Each line has its own noise. ``context`` and ``overrides``: see ``sample_target``. Raises ValueError in the cases of
    ``sample_target``, and before sampling if the list is invalid or ``out`` is not empty.
    """
    tasks = read_instructions(instructions)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} already exists and is not empty; give a new folder")
    recipe, folder = read_target(target, overrides)
    if context is not None:
        check_context(recipe)
        for task in tasks:
            reference_canvas(task)
    samples = list(_samples(recipe, folder, tasks, seed, context))
    out.mkdir(parents=True, exist_ok=True)
    with (out / "samples.jsonl").open("w", encoding="utf-8") as lines:
        for number, sample in enumerate(samples):
            name = f"{number:05d}.png"
            sample.image.save(out / name)
            completion = {} if sample.text is None else {"text": sample.text, "fell_back": sample.fell_back}
            line = {"image": name, "id": sample.task.id, "instruction": sample.task.instruction, **completion}
            lines.write(json.dumps(line, ensure_ascii=False) + "\n")
    return samples


def _require_inputs(recipe: Recipe, task: Task, context: SampleContext | None) -> None:
    """Raise ValueError if the task lacks an image that the model or the context needs, or has one that nothing would read."""
    takes = recipe.image_model.takes
    if takes is not None and (recipe.renderer is None or recipe.renderer.uses_sources):
        if len(task.images) < takes.images[0]:
            raise ValueError("this model edits an image; give one with --image")
        if len(task.images) > takes.images[1]:
            raise ValueError("--image: this model makes images from text alone; leave it out")
        if takes.mask and task.mask is None:
            raise ValueError("this model fills the masked part of an image; give a mask with --mask")
    if task.mask is not None and takes is not None and not takes.mask:
        raise ValueError("--mask: this model reads no mask; leave it out")
    if task.mask is not None and task.images:
        require_same_size(task.mask.size, task.images[0].size)
    if task.reference is None and recipe.policy.train.reads_reference:
        raise ValueError("the IP-Adapter of this policy reads a reference image; give one with --reference")
    if context is not None:
        check_context(recipe)
        reference_canvas(task)
    elif task.reference is not None and not recipe.policy.train.reads_reference:
        raise ValueError("--reference: only an IP-Adapter reads a reference image, and this policy has none; leave it out")


def _samples(
    recipe: Recipe, folder: RunFolder | None, tasks: Sequence[Task], seed: int, context: SampleContext | None
) -> Iterator[UserSample]:
    silence_libraries()
    parts, _ = open_policy(recipe, folder)
    yield from sample_tasks(parts, tasks, seed, context=context)


def sample_tasks(
    parts: PolicyParts,
    tasks: Sequence[Task],
    seed: int,
    *,
    numbers: Sequence[int] | None = None,
    slot: int = 0,
    context: SampleContext | None = None,
) -> Iterator[UserSample]:
    """Yield an image for each task, whose source images are resized as in training. Raises ValueError if an image is not usable.

    A source image that does not divide into the model's tokens gets the size of the training images, if these are generated.

    ``seed``, ``numbers`` and ``slot`` key the noise of each task's image; by default ``numbers`` counts the tasks from 0.
    ``context``: "reference" shows the reference image of each task to an inpainting model as a part of its canvas
    (``reference_canvas``, with its errors); the image is the rest of the canvas.
    """
    if context not in (None, "reference"):
        raise ValueError(f"context: {context!r} is not known; use 'reference' or None")
    data = parts.recipe.data
    tasks = _sized(tasks, data.image_size or parts.recipe.image_size)
    if data.generated_size is not None:
        side = getattr(getattr(parts.image_model, "latents", None), "token_pixels", 1)
        tasks = [task if _divides(task, side) else _sized([task], data.generated_size)[0] for task in tasks]
    canvases = None if context is None else [reference_canvas(task) for task in tasks]
    shown = tasks if canvases is None else [canvas.task for canvas in canvases]
    ids = range(len(tasks)) if numbers is None else numbers
    for rows in _same_sizes(shown, at_most=parts.recipe.eval.batch):
        batch = Batch(
            seed=seed,
            step=0,
            tasks=tuple(shown[row] for row in rows),
            group_ids=tuple(ids[row] for row in rows),
            group=tuple(range(len(rows))),
            slot=(slot,) * len(rows),
        )
        if canvases is None:
            yield from _sample(parts, batch)
            continue
        with sized_by_source(parts.image_model):
            made = list(_sample(parts, batch))
        for row, sample in zip(rows, made, strict=True):
            yield replace(sample, task=tasks[row], image=canvases[row].crop(sample.image))


def _sized(tasks: Sequence[Task], size: tuple[int, int] | None) -> Sequence[Task]:
    """The tasks with source images and masks resized to ``size``, (height, width) in px; unchanged if it is None. Raises ValueError
    if this would crop a whole mask away."""
    if size is None:
        return tasks
    target = (size[1], size[0])
    for task in tasks:
        if task.mask is not None and (reason := removed_by_fit("mask", off_centre(task.mask), task.mask.size, size=target)):
            raise ValueError(reason)
    return [
        replace(
            task,
            images=tuple(fit(image, size=target) for image in task.images),
            mask=None if task.mask is None else fit_mask(task.mask, size=target),
        )
        for task in tasks
    ]


def _divides(task: Task, side: int) -> bool:
    """Whether the sides of all source images are multiples of ``side`` px."""
    return not any(length % side for image in task.images for length in image.size)


def _same_sizes(tasks: Sequence[Task], *, at_most: int) -> Iterator[range]:
    """Consecutive tasks whose images have the same sizes, at most ``at_most`` at a time."""
    start, sizes = 0, None
    for row, task in enumerate(tasks):
        own = [image.size for image in task.images]
        if row > start and (own != sizes or row - start == at_most):
            yield range(start, row)
            start = row
        sizes = own
    yield range(start, len(tasks))


def _sample(parts: PolicyParts, batch: Batch) -> Iterator[UserSample]:
    """Sample and render; rows whose completion cannot be rendered are rendered again from the task's instruction."""
    tasks = batch.tasks
    trajectory = parts.policy(parts.recipe.rollout).sample(batch)
    renderer = parts.users_renderer()
    images = renderer(tasks, trajectory)
    failed = [row for row in batch.group if images[row] is None]
    if not isinstance(trajectory, AutoregressiveTrajectory):
        if failed:
            raise ValueError("the policy made latents that are not finite; train it less far, or use an earlier checkpoint")
        yield from (UserSample(task, image, None, False) for task, image in zip(tasks, images, strict=True) if image is not None)
        return
    completions, texts = trajectory.outputs, completion_texts(trajectory)
    if failed:
        again = [tasks[row] for row in failed]
        instead = renderer(again, Completions.empty(again, [completions[row] for row in failed]))
        for row, image in zip(failed, instead, strict=True):
            if image is None:
                raise ValueError(f"no image can be made of {tasks[row].instruction!r}, nor of {completions[row].text!r}")
            images[row] = image
    for row, (task, image) in enumerate(zip(tasks, images, strict=True)):
        assert image is not None
        yield UserSample(task, image, texts[row], row in failed)
