"""SHA-256 hashes of images and samples, which are the keys of the ledger."""

import hashlib
import json
from collections.abc import Sequence

from PIL.Image import DecompressionBombError, Image

from retouch.types import Json, Sample

UNREADABLE = (OSError, ValueError, SyntaxError, DecompressionBombError)
"""The errors of PIL for a file that is not an intact image; a damaged chunk of a PNG is a SyntaxError."""


def image_hash(image: Image | None) -> str:
    """A hash of the image's mode, size and pixels; empty for None."""
    if image is None:
        return ""
    digest = hashlib.sha256(f"{image.mode} {image.width}x{image.height}\n".encode())
    digest.update(image.tobytes())
    return digest.hexdigest()


class ImageHasher:
    """``image_hash`` with a cache by object, because the samples of a group share their source images."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Image, str]] = {}  # keeps a reference to the image, so that its id is not reused

    def __call__(self, image: Image | None) -> str:
        if image is None:
            return ""
        if id(image) not in self._known:
            self._known[id(image)] = image, image_hash(image)
        return self._known[id(image)][1]


def sample_hash(sample: Sample, judge: str, hasher: ImageHasher) -> str:
    """A hash of everything that a reward receives of a sample, and of the reward's fingerprint ``judge``."""
    task = sample.task
    images = [hasher(image) for image in (task.mask, task.reference, task.target, sample.image)]
    texts: list[Json] = [task.id, task.instruction, task.text, sample.completion, dict(task.tags), dict(task.meta)]
    return json_hash([judge, *texts, *images, *(hasher(image) for image in task.images)])


def json_hash(values: Sequence[Json]) -> str:
    """A hash of JSON values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
