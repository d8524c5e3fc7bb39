"""Decodes a request's body into samples. The size of every image is read from its header before any pixel is decoded."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from PIL import Image
from pydantic import ValidationError

from retouch.data.images import EncodedImage, load_image, load_mask, read_header
from retouch.types import Sample, Task
from retouch_serve.front.memory import BYTES_PER_PIXEL, DECODING_BYTES, MemoryBudget
from retouch_serve.server.requests.limits import Limits
from retouch_serve.wire.bodies import Blob, decode_body
from retouch_serve.wire.errors import ErrorCode, RequestError
from retouch_serve.wire.schema import BatchDocument, BatchItem, PictureHead, TaskHead

_CHANNELS = {"RGB": 3, "L": 1}


@dataclass(frozen=True, slots=True)
class Decoded:
    """A request's items in order: each is a sample, or an error code. ``rewards``: the rewards that the request asks for, None for
    all."""

    ids: tuple[str, ...]
    samples: tuple[Sample | ErrorCode, ...]
    rewards: tuple[str, ...] | None


def decode(body: bytes, content_type: str, limits: Limits, memory: MemoryBudget | None = None) -> Decoded:
    """Decode the samples of a request. ``memory``: the budget that counts the images until their last use.

    Raises RequestError if the request as a whole is invalid; an invalid image fails only the items that use it.
    """
    document, blobs = decode_body(body, content_type)
    try:
        batch = BatchDocument.model_validate(document)
    except ValidationError:
        raise RequestError("bad_batch") from None
    if len(batch.items) > limits.info().max_items or len(batch.tasks) > len(batch.items):
        raise RequestError("too_many")
    _check_numbers(batch, len(blobs))
    masks = {task.mask for task in batch.tasks}
    images = decode_images(batch.pictures, blobs, limits, memory, masks=masks)
    tasks = [_task(head, images) for head in batch.tasks]
    samples = tuple(_sample(item, tasks, images) for item in batch.items)
    return Decoded(tuple(item.id for item in batch.items), samples, None if batch.rewards is None else tuple(batch.rewards))


def decode_images(
    heads: Sequence[PictureHead],
    blobs: Sequence[Blob],
    limits: Limits,
    memory: MemoryBudget | None = None,
    *,
    masks: Container[int | None] | None = None,
) -> list[Image.Image | ErrorCode]:
    """Decode the images; an image that cannot be decoded gives an error code. ``masks``: the numbers of those that are masks, which
    are read as in a data set; None for all greyscale images.

    Raises RequestError if all images together have too many pixels, or if the memory budget does not suffice.
    """
    sizes = [_size(head, blob, limits) for head, blob in zip(heads, blobs, strict=True)]
    pixels = [size[0] * size[1] if isinstance(size, tuple) else 0 for size in sizes]
    if sum(pixels) > limits.max_total_pixels:
        raise RequestError("too_large")
    memory = MemoryBudget(limits.max_memory_bytes) if memory is None else memory
    left = BYTES_PER_PIXEL * sum(pixels)
    memory.hold(left)
    images: list[Image.Image | ErrorCode] = []
    try:
        with memory.holding(DECODING_BYTES * max(pixels, default=0)):
            for number, (head, blob, size, count) in enumerate(zip(heads, blobs, sizes, pixels, strict=True)):
                is_mask = head.mode == "L" and (masks is None or number in masks)
                image = _pixels(head, blob, size, limits, is_mask=is_mask) if isinstance(size, tuple) else size
                if isinstance(image, Image.Image):
                    memory.release_with(image, BYTES_PER_PIXEL * count)
                    left -= BYTES_PER_PIXEL * count
                images.append(image)
    finally:
        memory.release(left)
    return images


def _check_numbers(batch: BatchDocument, blobs: int) -> None:
    """Check the references between items, tasks and images.

    Raises RequestError if a number refers to no image or task, an id is repeated, or no item uses an image or a task.
    """
    used = [number for item in batch.items if (number := item.picture) is not None]
    for task in batch.tasks:
        used += [*task.images, *(number for number in (task.mask, task.reference, task.target) if number is not None)]
    used_tasks = {item.task for item in batch.items}
    if (
        len(batch.pictures) != blobs
        or set(used) != set(range(blobs))
        or used_tasks != set(range(len(batch.tasks)))
        or len({item.id for item in batch.items}) != len(batch.items)
    ):
        raise RequestError("bad_batch")


def _size(head: PictureHead, blob: Blob, limits: Limits) -> tuple[int, int] | ErrorCode:
    """Return (width, height), from the document or the file's header, or an error code."""
    if head.form == "raw":
        if head.width is None or head.height is None or len(blob) != head.width * head.height * _CHANNELS[head.mode]:
            return "bad_picture"
        size = head.width, head.height
    elif head.width is not None or head.height is not None:
        return "bad_picture"
    else:
        try:
            size = read_header(EncodedImage("picture", bytes(blob)), max_pixels=limits.max_pixels).size
        except ValueError:
            return "bad_picture"
    return size if size[0] * size[1] <= limits.max_pixels else "bad_picture"


def _pixels(head: PictureHead, blob: Blob, size: tuple[int, int], limits: Limits, *, is_mask: bool) -> Image.Image | ErrorCode:
    if head.form == "raw":
        return Image.frombytes(head.mode, size, bytes(blob))
    try:
        image = (load_mask if is_mask else load_image)(EncodedImage("picture", bytes(blob)), max_pixels=limits.max_pixels)
    except ValueError:
        return "bad_picture"
    # A greyscale file is loaded as RGB with equal channels; converting it to L gives the same grey values.
    return image if head.mode == image.mode else image.convert(head.mode)


def _task(head: TaskHead, images: Sequence[Image.Image | ErrorCode]) -> Task | ErrorCode:
    def image_of(number: int | None) -> Image.Image | None:
        if number is None:
            return None
        found = images[number]
        if isinstance(found, str):
            raise RequestError(found)
        return found

    try:
        return Task(
            id=head.id,
            instruction=head.instruction,
            images=tuple(image for number in head.images if (image := image_of(number)) is not None),
            mask=image_of(head.mask),
            reference=image_of(head.reference),
            target=image_of(head.target),
            text=head.text,
            tags=dict(head.tags),
            meta=dict(head.meta),
        )
    except RequestError as error:
        return error.code


def _sample(item: BatchItem, tasks: Sequence[Task | ErrorCode], images: Sequence[Image.Image | ErrorCode]) -> Sample | ErrorCode:
    task, image = tasks[item.task], None if item.picture is None else images[item.picture]
    if isinstance(task, str):
        return task
    return image if isinstance(image, str) else Sample(task, image)
