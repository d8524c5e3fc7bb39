"""Names of contents: equal contents have equal names, others do not (SHA-256)."""

import hashlib
import json
from collections.abc import Sequence

from PIL.Image import Image

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
    return digest([judge, *words, *others, *(pictures(image) for image in task.images)])


def digest(parts: Sequence[Json]) -> str:
    """The SHA-256 of JSON values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
