"""`retouch sample`: use a policy as its end user would, for one instruction or for a list of them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL.Image import Image

from retouch.assembly.assembly import Assembly
from retouch.data.images import load_image, load_mask
from retouch.data.sources.prompts import read_instructions
from retouch.inference.opening import open_target
from retouch.policies.autoregressive.trajectory import AutoregressiveTrajectory
from retouch.renderers.blind import Blind, Unread
from retouch.types import Batch, Task


@dataclass(frozen=True, slots=True)
class Made:
    """A picture made for a task. ``text``: what a writer wrote for it; ``fell_back``: nothing could be drawn of that, so the
    picture is of the task's own words.
    """

    task: Task
    image: Image
    text: str | None
    fell_back: bool


def sample_target(
    target: str, *, instruction: str, image: Path | None, mask: Path | None, reference: Path | None = None, out: Path, seed: int
) -> Made:
    """Make one picture from the instruction and the pictures beside it, and write it to ``out``.

    ValueError where a picture cannot be read, or where nothing usable was made.
    """
    if not instruction.strip():
        raise ValueError("--instruction is empty; say what the picture should become")
    images = () if image is None else (load_image(image),)
    task = Task(
        id=str(out),
        instruction=instruction,
        images=images,
        mask=None if mask is None else load_mask(mask),
        reference=None if reference is None else load_image(reference),
    )
    (made,) = _use(target, [task], seed)
    out.parent.mkdir(parents=True, exist_ok=True)
    made.image.save(out)
    return made


def sample_list(target: str, *, instructions: Path, out: Path, seed: int) -> list[Made]:
    """Make a picture for each line of a list (see ``read_instructions``) in the folder ``out``, with ``samples.jsonl`` beside them.

    Each line starts from noise of its own. ValueError as ``sample_target``, before any picture is made where it is the list's
    fault, or where ``out`` holds something.
    """
    tasks = read_instructions(instructions)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there already and not empty; give a new folder")
    made = list(_use(target, tasks, seed))
    out.mkdir(parents=True, exist_ok=True)
    with (out / "samples.jsonl").open("w", encoding="utf-8") as lines:
        for number, each in enumerate(made):
            name = f"{number:05d}.png"
            each.image.save(out / name)
            written = {} if each.text is None else {"text": each.text, "fell_back": each.fell_back}
            line = {"image": name, "id": each.task.id, "instruction": each.task.instruction, **written}
            lines.write(json.dumps(line, ensure_ascii=False) + "\n")
    return made


def _use(target: str, tasks: Sequence[Task], seed: int) -> Iterator[Made]:
    parts, _ = open_target(target)
    try:
        for rows in _alike(tasks, at_most=parts.recipe.eval.batch):
            yield from _sample(parts, rows, tuple(tasks[row] for row in rows), seed)
    finally:
        parts.judge.close()


def _alike(tasks: Sequence[Task], *, at_most: int) -> Iterator[range]:
    """Neighbours whose pictures have the same sizes, so many at most at once."""
    start, sizes = 0, None
    for row, task in enumerate(tasks):
        these = [image.size for image in task.images]
        if row > start and (these != sizes or row - start == at_most):
            yield range(start, row)
            start = row
        sizes = these
    yield range(start, len(tasks))


def _sample(parts: Assembly, rows: range, tasks: tuple[Task, ...], seed: int) -> Iterator[Made]:
    """Act, draw, and draw again of their own words what nothing can be drawn of."""
    numbers = tuple(range(len(tasks)))
    batch = Batch(seed=seed, step=0, tasks=tasks, group_ids=tuple(rows), group=numbers, slot=(0,) * len(tasks))
    acted = parts.policy(parts.recipe.rollout).sample(batch)
    renderer = parts.users_renderer()
    images = renderer(tasks, acted)
    failed = [row for row in numbers if images[row] is None]
    if not isinstance(acted, AutoregressiveTrajectory):
        if failed:
            raise ValueError("the policy made latents that are not finite; train it less far, or take an earlier checkpoint")
        yield from (Made(task, image, None, False) for task, image in zip(tasks, images, strict=True) if image is not None)
        return
    if failed:
        unread = Unread([acted.outputs[row] for row in failed])
        for row, image in zip(failed, Blind(renderer)([tasks[row] for row in failed], unread), strict=True):
            if image is None:
                raise ValueError(f"nothing can be drawn of {tasks[row].instruction!r}, nor of {acted.outputs[row].text!r}")
            images[row] = image
    for row, (task, image) in enumerate(zip(tasks, images, strict=True)):
        assert image is not None
        yield Made(task, image, acted.outputs[row].text, row in failed)
