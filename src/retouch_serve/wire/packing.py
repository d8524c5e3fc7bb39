"""Convert samples into a batch document and the bytes of its images. A task or an image that several samples share is sent once.

Images are sent without loss: as WebP to another machine, as raw pixels on the same machine. Lossless WebP at its fastest setting is
smaller than PNG and is written several times as fast. JPEG would change the pixels that the judge receives.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from PIL.Image import Image
from pydantic import ValidationError

from retouch.types import Sample, Task
from retouch_serve.wire.schema import BatchDocument, BatchItem, PictureHead, TaskHead

ImageEncoding: TypeAlias = Literal["webp", "raw"]
_MAX_WEBP_SIDE = 16383


@dataclass(slots=True)
class _Packing:
    """The parts of a batch document.

    ``numbers``: the number of each object, by its ``id()``. ``kept``: references to these objects, so that their ids are not
    reused.
    """

    encoding: ImageEncoding
    heads: list[PictureHead] = field(default_factory=list)
    blobs: list[bytes] = field(default_factory=list)
    tasks: list[TaskHead] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    kept: list[object] = field(default_factory=list)

    def image(self, image: Image | None) -> int | None:
        if image is None:
            return None
        if id(image) not in self.numbers:
            head, blob = encode_image(image, self.encoding)
            self.heads.append(head)
            self.blobs.append(blob)
            self._number(image, len(self.heads) - 1)
        return self.numbers[id(image)]

    def task(self, task: Task) -> int:
        if id(task) not in self.numbers:
            numbers = [number for image in task.images if (number := self.image(image)) is not None]
            self.tasks.append(
                TaskHead(
                    id=task.id,
                    instruction=task.instruction,
                    images=numbers,
                    mask=self.image(task.mask),
                    reference=self.image(task.reference),
                    target=self.image(task.target),
                    text=task.text,
                    tags=dict(task.tags),
                    meta=dict(task.meta),
                )
            )
            self._number(task, len(self.tasks) - 1)
        return self.numbers[id(task)]

    def _number(self, thing: object, number: int) -> None:
        self.numbers[id(thing)] = number
        self.kept.append(thing)


def pack(
    samples: Sequence[Sample], ids: Sequence[str], *, encoding: ImageEncoding, rewards: Sequence[str] | None = None
) -> tuple[bytes, list[bytes]]:
    """The batch document as JSON, and the bytes of the images in the order of their numbers.

    ``ids``: one for each sample. ``rewards``: the names of the rewards to ask, None for all. Raises ValueError if a task's ``meta``
    is not JSON.
    """
    packing = _Packing(encoding)
    try:
        items = [
            BatchItem(id=name, task=packing.task(sample.task), picture=packing.image(sample.image))
            for name, sample in zip(ids, samples, strict=True)
        ]
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"a task cannot be sent to a reward server: {place}: {first['msg']}; use plain JSON in meta") from None
    asked = None if rewards is None else list(rewards)
    batch = BatchDocument(tasks=packing.tasks, items=items, pictures=packing.heads, rewards=asked)
    try:
        document = json.dumps(batch.model_dump(exclude_defaults=True), allow_nan=False).encode()
    except ValueError:
        raise ValueError("a task's meta contains NaN or infinity, which JSON does not have; write null or a text") from None
    return document, packing.blobs


def encode_image(image: Image, encoding: ImageEncoding) -> tuple[PictureHead, bytes]:
    """The description and the bytes of an image. Modes other than RGB and L are converted to RGB; colour profiles and EXIF data are
    removed."""
    plain = image if image.mode in ("RGB", "L") else image.convert("RGB")
    mode: Literal["RGB", "L"] = "L" if plain.mode == "L" else "RGB"
    if encoding == "raw":
        return PictureHead(form="raw", mode=mode, width=plain.width, height=plain.height), plain.tobytes()
    buffer = io.BytesIO()
    if max(plain.size) <= _MAX_WEBP_SIDE:
        plain.save(buffer, "WEBP", lossless=True, quality=0, method=0, exif=b"", icc_profile=b"", xmp=b"")
    else:
        plain.save(buffer, "PNG", compress_level=1, exif=b"", icc_profile=None)
    return PictureHead(form="encoded", mode=mode), buffer.getvalue()
