"""Names of contents: equal contents have equal names, others do not (SHA-256)."""

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import is_dataclass

from PIL.Image import Image

from retouch.rewards.vlm.asking import Question
from retouch.types import Json, Sample


def of_picture(image: Image | None) -> str:
    """A picture's mode, size and pixels; empty where there is none."""
    if image is None:
        return ""
    digest = hashlib.sha256(f"{image.mode} {image.width}x{image.height}\n".encode())
    digest.update(image.tobytes())
    return digest.hexdigest()


class Pictures:
    """Names pictures, each object once: a group's samples share their sources."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Image, str]] = {}  # the picture is held, so that no other one gets its id

    def __call__(self, image: Image | None) -> str:
        if image is None:
            return ""
        if id(image) not in self._known:
            self._known[id(image)] = image, of_picture(image)
        return self._known[id(image)][1]


def of_sample(sample: Sample, judge: str, pictures: Pictures) -> str:
    """All that a reward sees of a sample, and the reward's fingerprint."""
    task = sample.task
    others = [pictures(image) for image in (task.mask, task.reference, task.target, sample.image)]
    words: list[Json] = [task.id, task.instruction, task.text, sample.completion, dict(task.tags), dict(task.meta)]
    return _digest([judge, *words, *others, *(pictures(image) for image in task.images)])


def of_question(question: Question, judge: str, pictures: Pictures) -> str:
    """All that decides an answer: what is asked, of whom, how it is read, temperature and seed.

    Where the form is no dataclass, nothing says whether two of them are equal: such a question has a name of its own each time.
    """
    if not is_dataclass(question.form):
        return secrets.token_hex(32)
    parts: list[Json] = [part if isinstance(part, str) else {"picture": pictures(part)} for part in question.parts]
    form = f"{type(question.form).__module__}.{question.form!r}"
    return _digest([judge, question.rubric, parts, form, question.temperature, question.seed])


def _digest(parts: Sequence[Json]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
