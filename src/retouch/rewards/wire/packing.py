"""Samples as a batch document and the bytes of its pictures; each task and each picture once, however many samples share it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from PIL.Image import Image
from pydantic import ValidationError

from retouch.rewards.wire.pictures import Encoding, encode
from retouch.rewards.wire.schema import Batch, Item, PictureHead, TaskHead
from retouch.types import Sample, Task


@dataclass(slots=True)
class _Packing:
    """``kept``: the objects whose numbers were given out, since an id may be used again once its object is gone."""

    encoding: Encoding
    heads: list[PictureHead] = field(default_factory=list)
    blobs: list[bytes] = field(default_factory=list)
    tasks: list[TaskHead] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    kept: list[object] = field(default_factory=list)

    def picture(self, image: Image | None) -> int | None:
        if image is None:
            return None
        if id(image) not in self.numbers:
            head, blob = encode(image, self.encoding)
            self.heads.append(head)
            self.blobs.append(blob)
            self._number(image, len(self.heads) - 1)
        return self.numbers[id(image)]

    def task(self, task: Task) -> int:
        if id(task) not in self.numbers:
            numbers = [number for image in task.images if (number := self.picture(image)) is not None]
            self.tasks.append(
                TaskHead(
                    id=task.id,
                    instruction=task.instruction,
                    images=numbers,
                    mask=self.picture(task.mask),
                    reference=self.picture(task.reference),
                    target=self.picture(task.target),
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
    samples: Sequence[Sample], ids: Sequence[str], *, encoding: Encoding, rewards: Sequence[str] | None = None
) -> tuple[bytes, list[bytes]]:
    """The batch document as JSON, and the pictures' bytes by number. ValueError where a task's meta is not JSON."""
    packing = _Packing(encoding)
    try:
        items = [
            Item(id=name, task=packing.task(sample.task), picture=packing.picture(sample.image))
            for name, sample in zip(ids, samples, strict=True)
        ]
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"a task cannot be sent to a reward server: {place}: {first['msg']}; make its meta plain JSON") from None
    batch = Batch(tasks=packing.tasks, items=items, pictures=packing.heads, rewards=None if rewards is None else list(rewards))
    try:
        document = json.dumps(batch.model_dump(exclude_defaults=True), allow_nan=False).encode()
    except ValueError:
        raise ValueError("a task's meta holds NaN or an infinite number, which JSON does not have; write null or a text") from None
    return document, packing.blobs
