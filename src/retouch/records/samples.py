"""Stores samples for people to look at: their images, and one JSON line about each sample."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from PIL.Image import Image

from retouch.records import files
from retouch.types import Sample

SampleSet = Literal["heldout", "group"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SampleRecord:
    """A sample with its scores, stored for people to look at.

    ``group`` and ``slot``: the number of the group, and of the sample in the group (for held-out tasks: the index of the task, and
    slot 0). NaN in ``scores`` or ``reward`` means that the sample could not be scored. ``advantage``: None for held-out tasks.
    ``text``: the completion that the policy wrote for the image, or None. ``tokens``: the sampled tokens of the completion with
    their log-probabilities in nats. ``states``: images of the denoising states of the sample.
    """

    sample: Sample
    group: int
    slot: int
    scores: Mapping[str, float]
    reward: float
    advantage: float | None = None
    text: str | None = None
    tokens: Sequence[tuple[str, float]] | None = None
    states: Sequence[Image] = ()


def write_images(folder: Path, head: Mapping[str, Any], records: Sequence[SampleRecord]) -> list[dict[str, Any]]:
    """Write the images of samples into ``folder``, and return a line about each sample, which begins with the keys of ``head``.

    ``head``: the keys ``step`` and ``set`` (``SampleSet``).
    """
    saved: set[str] = set()
    return [_write_sample(folder, head, record, saved=saved) for record in records]


def _write_sample(folder: Path, head: Mapping[str, Any], item: SampleRecord, *, saved: set[str]) -> dict[str, Any]:
    """Write a sample's images (the task's own images once per group) and return its line."""
    task = item.sample.task
    stem = f"{head['set']}-{item.group:04d}"
    source = task.images[0] if task.images else None
    own = f"{stem}-{item.slot:03d}"
    states = [_write_image(folder / f"{own}-state{place:02d}.png", each, saved=saved) for place, each in enumerate(item.states)]
    return {
        **head,
        "task": task.id,
        "instruction": task.instruction,
        "group": item.group,
        "slot": item.slot,
        "image": _write_image(folder / f"{own}.png", item.sample.image, saved=saved),
        "source": _write_image(folder / f"{stem}-source.png", source, saved=saved),
        "target": _write_image(folder / f"{stem}-target.png", task.target, saved=saved),
        "scores": dict(item.scores),
        "reward": item.reward,
        "advantage": item.advantage,
        "tags": dict(task.tags),
        **({} if item.text is None else {"text": item.text}),
        **({} if item.tokens is None else {"tokens": item.tokens}),
        **({"states": states} if states else {}),
    }


def _write_image(path: Path, image: Image | None, *, saved: set[str]) -> str | None:
    """Write the image unless ``written`` contains it, and return its file name; None if there is no image."""
    if image is None:
        return None
    if path.name not in saved:
        files.write_png(path, image)
        saved.add(path.name)
    return path.name
