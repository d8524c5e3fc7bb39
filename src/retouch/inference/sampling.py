"""Images of a policy, made as its end user would: for instructions, and with the reference as context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeAlias

from PIL import Image

from retouch.data.images import fit, fit_mask, load_image, load_mask, off_centre, removed_by_fit
from retouch.data.sources.folder import read_instructions
from retouch.data.tasks import require_same_size
from retouch.distributed.ranks import scoring_device
from retouch.inference.opening import open_policy, read_target
from retouch.models.pipeline import ModelWrapper, PipelineModel
from retouch.policies.decoding import AutoregressiveTrajectory
from retouch.recipe.recipe import Recipe
from retouch.records.files import jsonable, write_lines
from retouch.records.libraries import silence_libraries
from retouch.renderers.base import Completions
from retouch.rewards.base import close
from retouch.rewards.combination import combination
from retouch.rewards.scoring import scores_of
from retouch.run.build import PolicyParts
from retouch.run.metrics import completion_texts
from retouch.types import Batch, Sample, Task

SampleContext: TypeAlias = Literal["reference"]
"""What an inpainting model sees next to the source image."""
_MULTIPLE = 16
_HIGHEST = 4


@dataclass(frozen=True, slots=True)
class UserSample:
    """An image for a task. ``text``: the completion, if the policy generates text. ``fell_back``: no image could be made from the
    completion, so the image was made from the task's instruction."""

    task: Task
    image: Image.Image
    text: str | None
    fell_back: bool
    scores: Mapping[str, float] = field(default_factory=dict)
    """The columns of the run's reward, NaN if missing, and their combination as ``reward``; empty if they were not asked for."""


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
    if out.is_dir():
        raise ValueError(f"--out {out}: this is a folder; give the name of a file, for example {out / 'image.png'}")
    if Image.registered_extensions().get(out.suffix.lower()) not in Image.SAVE:
        raise ValueError(f"--out {out}: not the ending of an image file; use for example {out.name}.png")
    if (above := next((folder for folder in out.parents if folder.exists()), None)) is not None and not above.is_dir():
        raise ValueError(f"--out {out}: {above} is a file, not a folder; give another name")
    images = () if image is None else (load_image(image),)
    task = Task(
        id=str(out),
        instruction=instruction,
        images=images,
        mask=None if mask is None else load_mask(mask),
        reference=None if reference is None else load_image(reference),
    )
    recipe, folder = read_target(target, overrides)
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
    silence_libraries()
    (sample,) = sample_tasks(open_policy(recipe, folder)[0], [task], seed, context=context)
    out.parent.mkdir(parents=True, exist_ok=True)
    sample.image.save(out)
    return sample


def sample_list(
    target: str,
    *,
    instructions: Path,
    context: SampleContext | None = None,
    out: Path,
    seed: int,
    scores: bool = False,
    overrides: Sequence[str] = (),
) -> list[UserSample]:
    """Make an image for each line of a list (see ``read_instructions``), in the new folder ``out`` with ``samples.jsonl``.

    Each line has its own noise. ``scores``: also score each sample with the reward of the recipe, as in training: a completion that
    cannot be rendered gets the worst value of each column. ``context`` and ``overrides``: see ``sample_target``. Raises ValueError
    in the cases of ``sample_target``, and before sampling if the list is invalid or ``out`` is not empty.
    """
    tasks = read_instructions(instructions)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} already exists and is not empty; give a new folder")
    recipe, folder = read_target(target, overrides)
    if context is not None:
        check_context(recipe)
        for task in tasks:
            reference_canvas(task)
    silence_libraries()
    reward = recipe.reward.build(device=scoring_device()) if scores else None
    try:
        samples = list(sample_tasks(open_policy(recipe, folder)[0], tasks, seed, context=context))
        if reward is not None:
            given = scores_of(reward, [Sample(each.task, None if each.fell_back else each.image, each.text) for each in samples])
            given["reward"] = combination(recipe.reward.combine, reward.columns)(given)
            samples = [replace(each, scores={name: given[name][row].item() for name in given}) for row, each in enumerate(samples)]
    finally:
        close(reward)
    out.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, sample in enumerate(samples):
        name = f"{number:05d}.png"
        sample.image.save(out / name)
        completion = {} if sample.text is None else {"text": sample.text, "fell_back": sample.fell_back}
        scored = {"scores": jsonable(dict(sample.scores))} if scores else {}
        lines.append({"image": name, "id": sample.task.id, "instruction": sample.task.instruction, **completion, **scored})
    write_lines(out / "samples.jsonl", lines)
    return samples


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
        sides = [(task, [length for image in task.images for length in image.size]) for task in tasks]
        tasks = [_sized([task], data.generated_size)[0] if any(each % side for each in own) else task for task, own in sides]
    canvases = None if context is None else [reference_canvas(task) for task in tasks]
    shown = tasks if canvases is None else [canvas.task for canvas in canvases]
    ids = range(len(tasks)) if numbers is None else numbers
    starts = [0]  # consecutive tasks whose images have the same sizes, at most ``eval.batch`` at a time
    for row in range(1, len(shown)):
        same = [image.size for image in shown[row].images] == [image.size for image in shown[row - 1].images]
        if not same or row - starts[-1] == parts.recipe.eval.batch:
            starts.append(row)
    for rows in (range(start, end) for start, end in pairwise([*starts, len(shown)])):
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
            below = sample.image.crop((0, canvases[row].top, sample.image.width, sample.image.height))
            yield replace(sample, task=tasks[row], image=below)


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


@dataclass(frozen=True, slots=True)
class ContextCanvas:
    """A task whose source image is a canvas. ``top``: height in px of its upper part, which shows the reference image."""

    task: Task
    top: int


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
    canvas, mask = Image.new("RGB", size), Image.new("L", size)
    canvas.paste(task.reference.resize((source.width, top), Image.Resampling.LANCZOS), (0, 0))
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

    Raises ValueError for a model that fills no masked part of an image.
    """
    while isinstance(model, ModelWrapper):
        model = model.model
    if not isinstance(model, PipelineModel) or not model.FILLS_MASKS:
        raise ValueError(f"context: {type(model).__name__} fills no masked part of an image; use flux-fill")
    size, model.size = model.size, None
    try:
        yield
    finally:
        model.size = size
