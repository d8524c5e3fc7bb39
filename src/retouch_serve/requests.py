"""Decodes requests to samples, within limits of their headers, sizes and numbers of pixels.

``POST /v1/score`` has a batch; ``POST /score`` has one image, and three scores (vlm_score, ocr_confidence, combined_score) in its
reply, for clients of existing scoring servers. An error is reported by its HTTP status, never as a score.
"""

import math
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from retouch.data.images import EncodedImage, load_image, load_mask, read_header
from retouch.data.rows import quoted as quoted_text
from retouch.types import Sample, Task
from retouch_serve.front import BYTES_PER_PIXEL, DECODING_BYTES, FrontLimits, MemoryBudget
from retouch_serve.wire import (
    BatchDocument,
    Blob,
    ErrorCode,
    LimitsInfo,
    PictureHead,
    RequestError,
    TaskHead,
    decode_base64,
    decode_body,
    parse_json,
)

_CHANNELS = {"RGB": 3, "L": 1}
_FILE, _MASK = PictureHead(form="encoded"), PictureHead(form="encoded", mode="L")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(FrontLimits):
    """Sizes are in bytes and pixels, times in seconds. The limits of connections and bodies are those of ``FrontLimits``.

    ``max_batch``: samples per call of a reward. A call waits up to ``window`` for a full batch, and up to a fifth of the last
    call's time (at most 100 ms) while more requests are arriving or expected. ``max_queue``: samples of all callers that wait or
    are in progress. ``max_requests``: requests in progress, from the end of their bodies on. ``max_memory_bytes``: bodies and
    decoded images of all requests together. ``deadline_seconds``: time limit of a request; a replica is replaced if a call of a
    reward takes longer. ``stall_seconds``: duration of a call after which the server is not ready, if a request has missed its
    deadline and recent calls took less than a quarter of the time. ``drain_seconds``: time to complete the requests in progress
    before shutting down.

    Raises ValueError if a limit is not above 0 (``window`` may be 0), a batch is larger than the queue, or a request is larger than
    the memory.
    """

    max_body_bytes: int = 64 * 2**20
    max_items: int = 256
    max_pixels: int = 4096 * 4096
    max_total_pixels: int = 4 * 4096 * 4096
    max_batch: int = 32
    window: float = 0.005
    max_queue: int = 1024
    max_requests: int = 128
    stall_seconds: float = 10.0
    deadline_seconds: float = 300.0
    drain_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if not (value >= 0 if name == "window" else value > 0):
                raise ValueError(f"{name} {value}: must be above 0")
        if self.max_batch > self.max_queue:
            raise ValueError(f"max_batch {self.max_batch} is larger than max_queue {self.max_queue}: no batch would ever be full")
        largest = 4 * self.max_body_bytes + BYTES_PER_PIXEL * self.max_total_pixels + DECODING_BYTES * self.max_pixels
        if largest > self.max_memory_bytes:
            raise ValueError(f"max_memory_bytes {self.max_memory_bytes} is less than one request may take, {largest}")

    def info(self) -> LimitsInfo:
        """The limits in ``GET /v1/info``."""
        return LimitsInfo(
            max_body_bytes=self.max_body_bytes,
            max_items=min(self.max_items, self.max_queue),
            max_pixels=self.max_pixels,
            max_total_pixels=self.max_total_pixels,
        )


def read_deadline(request: Request, *, longest: float) -> float:
    """The time in seconds until the request's deadline: ``X-Deadline-Seconds``, at most ``longest``, which is also the
    default. Raises RequestError if the header is not a positive number."""
    stated = request.headers.get("x-deadline-seconds")
    if stated is None:
        return longest
    try:
        seconds = float(stated)
    except ValueError:
        raise RequestError("bad_deadline") from None
    if not math.isfinite(seconds) or seconds <= 0:
        raise RequestError("bad_deadline")
    return min(seconds, longest)


@dataclass(frozen=True, slots=True)
class Decoded:
    """A request's items in order: each is a sample, or an error code. ``rewards``: the rewards that the request asks for, None for
    all."""

    ids: Sequence[str]
    samples: Sequence[Sample | ErrorCode]
    rewards: Sequence[str] | None


def decode(body: bytes, content_type: str, limits: Limits, memory: MemoryBudget | None = None) -> Decoded:
    """Decode the samples of a request. ``memory``: the budget that counts the images until their last use. Raises RequestError if
    the request as a whole is invalid; an invalid image fails only the items that use it."""
    document, blobs = decode_body(body, content_type)
    try:
        batch = BatchDocument.model_validate(document)
    except ValidationError:
        raise RequestError("bad_batch") from None
    if len(batch.items) > limits.info().max_items or len(batch.tasks) > len(batch.items):
        raise RequestError("too_many")
    used = [number for item in batch.items if (number := item.picture) is not None]
    for task in batch.tasks:
        used += [*task.images, *(number for number in (task.mask, task.reference, task.target) if number is not None)]
    # Every number must refer to an image or a task, and every image and task must be used.
    if (
        len(batch.pictures) != len(blobs)
        or set(used) != set(range(len(blobs)))
        or {item.task for item in batch.items} != set(range(len(batch.tasks)))
        or len({item.id for item in batch.items}) != len(batch.items)
    ):
        raise RequestError("bad_batch")
    masks = {task.mask for task in batch.tasks}
    images = decode_images(batch.pictures, blobs, limits, memory, masks=masks)
    tasks = [_task(head, images) for head in batch.tasks]
    samples: list[Sample | ErrorCode] = []
    for item in batch.items:
        owner, image = tasks[item.task], None if item.picture is None else images[item.picture]
        if isinstance(owner, str) or isinstance(image, str):
            samples.append(owner if isinstance(owner, str) else str(image))
        else:
            samples.append(Sample(owner, image))
    return Decoded(tuple(item.id for item in batch.items), tuple(samples), batch.rewards)


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
        found = None if number is None else images[number]
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


_DATA_ADDRESS = re.compile(r"^data:image/[\w.+-]+;base64,")


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleScore:
    """The columns that are returned as ``vlm_score`` and ``ocr_confidence``. combined_score = vlm_weight * vlm_score + ocr_weight *
    ocr_confidence."""

    vlm: str
    ocr: str | None = None
    vlm_weight: float = 1.0
    ocr_weight: float = 0.0

    def check(self, columns: Mapping[str, object]) -> None:
        """Raise ValueError if a column does not exist, or if ``ocr_weight`` is given without ``ocr``."""
        for name in (self.vlm, self.ocr):
            if name is not None and name not in columns:
                raise ValueError(f"there is no column {name!r}; the columns are {', '.join(columns)}")
        if self.ocr is None and self.ocr_weight:
            raise ValueError("--ocr-weight needs --ocr COLUMN")

    def numbers(self, scores: Mapping[str, float | None]) -> dict[str, float | None]:
        """The three scores. Raises RequestError if the score of a column is missing."""
        vlm, ocr = scores.get(self.vlm), None if self.ocr is None else scores.get(self.ocr)
        if vlm is None or (self.ocr is not None and ocr is None):
            raise RequestError("reward_failed")
        combined = self.vlm_weight * vlm + self.ocr_weight * (ocr or 0.0)
        return {"vlm_score": vlm, "ocr_confidence": ocr, "combined_score": combined}


class SingleScoreRequest(BaseModel):
    """The request. Images are PNG, JPEG or WebP files in base64, also as ``data:`` addresses. Other keys are ignored.

    ``text``: the text that the image should show; the default is the quoted text of the prompt, as in prompt lists. ``mask``:
    another name of ``mask_image``. ``timestep``: the denoising timestep; it is accepted and does not change the scores.
    """

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    image: str
    prompt: Annotated[str, Field(max_length=100_000)]
    source_image: str | None = None
    mask_image: str | None = None
    reference_image: str | None = None
    mask: str | None = None
    timestep: float | None = None
    text: Annotated[str, Field(max_length=100_000)] | None = None


class SingleScoreReply(BaseModel):
    """The reply."""

    vlm_score: float
    ocr_confidence: float | None
    combined_score: float


def decode_single_score(body: bytes, limits: Limits, memory: MemoryBudget, *, needs_text: bool = False) -> Sample:
    """Decode the sample of a request; its images count against ``memory``. ``needs_text``: a reward needs the text of the task.
    Raises RequestError if the request cannot be read, or if the text is needed and missing."""
    try:
        asked = SingleScoreRequest.model_validate(parse_json(body))
    except ValidationError:
        raise RequestError("bad_batch") from None
    text = asked.text or quoted_text(asked.prompt)
    if needs_text and not (text or "").strip():
        raise RequestError("no_text")
    if asked.mask is not None and asked.mask_image is not None:
        raise RequestError("bad_batch")
    given = {
        "image": (_FILE, asked.image),
        "source": (_FILE, asked.source_image),
        "mask": (_MASK, asked.mask_image or asked.mask),
        "reference": (_FILE, asked.reference_image),
    }
    encoded = {
        name: (head, decode_base64(_DATA_ADDRESS.sub("", text, count=1)))
        for name, (head, text) in given.items()
        if text is not None
    }
    decoded = decode_images([head for head, _ in encoded.values()], [blob for _, blob in encoded.values()], limits, memory)
    images = {}
    for name, image in zip(encoded, decoded, strict=True):
        if isinstance(image, str):
            raise RequestError(image)
        images[name] = image
    task = Task(
        id="score",
        instruction=asked.prompt,
        images=(images["source"],) if "source" in images else (),
        mask=images.get("mask"),
        reference=images.get("reference"),
        text=text,
    )
    return Sample(task, images["image"])
