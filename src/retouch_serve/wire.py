"""The wire format of reward servers, shared by the server and its client: errors, documents, bodies of requests, checks of replies.

``POST /v1/score`` takes a batch document and the bytes of its images. In a batch, a task or an image that several items share is
listed once and referred to by its number. Keys that are not in the schema are rejected. The body has one of three encodings:

- ``multipart/form-data``: a part ``batch`` (JSON) and parts ``picture-0``, ``picture-1``, ... (binary). Retouch sends this.
- ``application/msgpack``: a map with ``batch`` (the JSON, as bytes) and ``pictures`` (a list of bytes).
- ``application/json``: an object with ``batch`` and ``pictures`` (a list of base64 strings).

The reply is ``{"judges": {reward: [fingerprint]}, "items": [{"id", "scores": {column: number}, "errors": {reward: code}}]}``.
Null means "could not be judged". A column is absent only if its reward has an error for the item. Items may be in any order.

Reading takes memory in proportion to what was sent or requested: the number of values is bounded before anything is parsed.
"""

import base64
import binascii
import io
import ipaddress
import json
import re
import secrets
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeAlias
from urllib.parse import urlsplit

from PIL.Image import Image
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from retouch.records.files import png, strict_json
from retouch.types import Column, Sample, Task

# Errors. Messages are constants: they contain no part of the request and no message of a library, so they reveal nothing about the
# server or about other callers.

ErrorCode: TypeAlias = str
ERRORS: dict[str, tuple[int, str]] = {
    "bad_request": (400, "this is not a valid HTTP request"),
    "headers_too_large": (431, "the headers are larger or more numerous than this server accepts"),
    "wrong_host": (421, "this server answers only to its own addresses; name others with --allow-host"),
    "bad_body": (400, "the body does not have the format of its content type"),
    "bad_batch": (422, "the batch does not follow the schema in /openapi.json"),
    "no_text": (422, "OCR needs the text that the image should show: send `text`, or put it in quotation marks in the prompt"),
    "unsupported": (415, "send multipart/form-data, application/msgpack or application/json, without a content encoding"),
    "too_large": (413, "the body is larger than /v1/info allows; send fewer or smaller images per request"),
    "too_many": (413, "more items or images than /v1/info allows; send fewer per request"),
    "too_slow": (408, "the request did not arrive in time; send it again"),
    "unauthorized": (401, "this server needs its token: Authorization: Bearer TOKEN"),
    "not_found": (404, "no such page; see /openapi.json"),
    "bad_method": (405, "this page needs another HTTP method; see /openapi.json"),
    "bad_deadline": (400, "X-Deadline-Seconds must be a number of seconds above 0"),
    "not_configured": (404, "/score is not configured: start the server with --vlm COLUMN"),
    "busy": (429, "the queue is full; try again after Retry-After seconds"),
    "draining": (503, "this server is shutting down; use another one"),
    "stalled": (503, "the reward has not answered within a request's deadline; use another server"),
    "deadline": (504, "the deadline passed before the scores were ready"),
    "internal": (500, "the server failed; see its log under this request id"),
    "bad_picture": (
        422,
        "an image is not a PNG, JPEG or WebP of one frame, not raw pixels of its size, or larger than /v1/info allows",
    ),
    "reward_failed": (500, "the reward failed on this item; see the server's log"),
    "reward_disagrees": (500, "the reward returned other columns than it declares, or a value outside a declared range"),
}


class RequestError(ValueError):
    """The reason why a request, or one item of it, is not scored. ``status``: the HTTP status. ``text``: the message."""

    def __init__(self, code: ErrorCode) -> None:
        self.code = code
        self.status, self.text = ERRORS[code]
        super().__init__(self.text)


def is_loopback(host: str) -> bool:
    """Whether a server at this address can be reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_from_own_host(hosts: Sequence[str], origins: Sequence[str], accepts: Callable[[str], bool]) -> bool:
    """Whether a request has exactly one ``Host`` header and at most one ``Origin`` header, all with accepted host names.

    A web page of another origin can send requests to a server on its visitor's machine; with DNS rebinding, it can do so under its
    own host name. ``accepts``: returns whether a host name, without its port, is accepted.
    """
    if len(hosts) != 1 or len(origins) > 1:
        return False
    try:
        return all(accepts(urlsplit(url).hostname or "") for url in (f"http://{hosts[0]}", *origins))
    except ValueError:
        return False


# The JSON documents

VERSION: Literal[1] = 1
NAME = r"^[A-Za-z0-9_.-]{1,64}$"
SERVICE: Literal["retouch"] = "retouch"
LARGEST = 1e9
"""The largest absolute value of a score: far above any scale in use, and its square is still finite in float32."""

Form: TypeAlias = Literal["encoded", "raw"]
Id: TypeAlias = Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,128}$")]
Name: TypeAlias = Annotated[str, Field(pattern=NAME)]
Number: TypeAlias = Annotated[int, Field(ge=0)]
Side: TypeAlias = Annotated[int, Field(ge=1, le=65535)]
Bound: TypeAlias = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]
Limit: TypeAlias = Annotated[int, Field(ge=1, le=2**62)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class PictureHead(_Part):
    """The format of an image's bytes: a PNG, JPEG or WebP file, or raw pixels, row by row from the top, one byte per channel."""

    form: Form
    mode: Literal["RGB", "L"] = "RGB"
    width: Side | None = None
    """Raw pixels only."""
    height: Side | None = None
    """Raw pixels only."""


class TaskHead(_Part):
    """A task, with the numbers of its images. It has the fields of ``retouch.types.Task``."""

    id: str
    instruction: str
    images: list[Number] = []
    mask: Number | None = None
    reference: Number | None = None
    target: Number | None = None
    text: str | None = None
    tags: dict[str, str] = {}
    meta: dict[str, JsonValue] = {}


class BatchItem(_Part):
    """One sample: the numbers of its task and of its image, null if the policy made no image. ``id`` is returned with the
    scores."""

    id: Id
    task: Number
    picture: Number | None


class BatchDocument(_Part):
    """The samples to score. ``rewards``: the names of the rewards to ask; null for all rewards of the server."""

    version: Annotated[int, Field(ge=VERSION, le=VERSION)] = VERSION
    tasks: Annotated[list[TaskHead], Field(min_length=1)]
    items: Annotated[list[BatchItem], Field(min_length=1)]
    pictures: list[PictureHead] = []
    rewards: Annotated[list[Name], Field(min_length=1)] | None = None


class _InfoPart(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class ColumnInfo(_InfoPart):
    """A column, with the fields of ``retouch.types.Column``. Its range is finite and within ``LARGEST``."""

    low: Bound
    high: Bound
    diagnostic: bool = False
    higher_is_better: bool = True

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"the range {self.low} to {self.high} is empty")
        return self


class RewardInfo(_InfoPart):
    """A hosted reward. ``kind``: its class. ``fingerprint``: a hash that changes with its code, its arguments and its rubric."""

    name: Name
    kind: Annotated[str, Field(max_length=512)]
    fingerprint: Annotated[str, Field(min_length=1, max_length=128)]
    columns: Annotated[dict[Annotated[str, Field(min_length=1, max_length=256)], ColumnInfo], Field(min_length=1, max_length=256)]


class LimitsInfo(_InfoPart):
    """The largest request that the server accepts."""

    max_body_bytes: Limit
    max_items: Limit
    max_pixels: Limit
    max_total_pixels: Limit


class ServerInfo(_InfoPart):
    """The reply of ``GET /v1/info``: what a client needs to know before its first request."""

    service: Literal["retouch"]
    version: Annotated[str, Field(max_length=64)]
    rewards: Annotated[list[RewardInfo], Field(min_length=1, max_length=256)]
    limits: LimitsInfo

    @model_validator(mode="after")
    def _names_once(self) -> Self:
        names = [each.name for each in self.rewards]
        columns = [column for each in self.rewards for column in each.columns]
        if len(set(names)) < len(names) or len(set(columns)) < len(columns):
            raise ValueError("a reward or a column has the name of another one")
        return self


# Samples to a batch document

ImageEncoding: TypeAlias = Literal["webp", "raw"]
_MAX_WEBP_SIDE = 16383


def pack(
    samples: Sequence[Sample], ids: Sequence[str], *, encoding: ImageEncoding, rewards: Sequence[str] | None = None
) -> tuple[bytes, list[bytes]]:
    """The batch document as JSON, and the bytes of the images in the order of their numbers. ``ids``: one for each sample.
    ``rewards``: the names of the rewards to ask, None for all. Raises ValueError if a task's ``meta`` is not JSON."""
    tasks: list[TaskHead] = []
    heads: list[PictureHead] = []
    blobs: list[bytes] = []
    # Keyed by id(); the object is kept too, because the id of a freed object is given to another one.
    numbers: dict[int, tuple[int, object]] = {}

    def picture(image: Image | None) -> int | None:
        if image is None:
            return None
        if id(image) not in numbers:
            head, blob = encode_image(image, encoding)
            heads.append(head)
            blobs.append(blob)
            numbers[id(image)] = len(heads) - 1, image
        return numbers[id(image)][0]

    def task_number(task: Task) -> int:
        if id(task) not in numbers:
            images = [number for image in task.images if (number := picture(image)) is not None]
            mask, reference, target = picture(task.mask), picture(task.reference), picture(task.target)
            shared: dict[str, Any] = {"images": images, "mask": mask, "reference": reference, "target": target}
            shared |= {"text": task.text, "tags": dict(task.tags), "meta": dict(task.meta)}
            tasks.append(TaskHead(id=task.id, instruction=task.instruction, **shared))
            numbers[id(task)] = len(tasks) - 1, task
        return numbers[id(task)][0]

    try:
        items = [
            BatchItem(id=name, task=task_number(sample.task), picture=picture(sample.image))
            for name, sample in zip(ids, samples, strict=True)
        ]
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"a task cannot be sent to a reward server: {place}: {first['msg']}; use plain JSON in meta") from None
    asked = None if rewards is None else list(rewards)
    batch = BatchDocument(tasks=tasks, items=items, pictures=heads, rewards=asked)
    try:
        document = json.dumps(batch.model_dump(exclude_defaults=True), allow_nan=False).encode()
    except ValueError:
        raise ValueError("a task's meta contains NaN or infinity, which JSON does not have; write null or a text") from None
    return document, blobs


def encode_image(image: Image, encoding: ImageEncoding) -> tuple[PictureHead, bytes]:
    """The description and the bytes of an image. Modes other than RGB and L are converted to RGB; colour profiles and EXIF data are
    removed."""
    plain = image if image.mode in ("RGB", "L") else image.convert("RGB")
    mode: Literal["RGB", "L"] = "L" if plain.mode == "L" else "RGB"
    if encoding == "raw":
        return PictureHead(form="raw", mode=mode, width=plain.width, height=plain.height), plain.tobytes()
    if max(plain.size) > _MAX_WEBP_SIDE:
        return PictureHead(form="encoded", mode=mode), png(plain)
    buffer = io.BytesIO()
    plain.save(buffer, "WEBP", lossless=True, quality=0, method=0, exif=b"", icc_profile=b"", xmp=b"")
    return PictureHead(form="encoded", mode=mode), buffer.getvalue()


# Bodies of requests

Blob: TypeAlias = bytes | memoryview

_MAX_IMAGES = 4096
_MAX_NODES = 200_000
_MAX_PART_HEAD = 1024
_BOUNDARY = re.compile(r"""boundary="?([0-9A-Za-z'()+_,./:=?-]{1,70})"?\s*(?:;|$)""")
_PART_NAME = re.compile(
    rb"""^content-disposition:\s*form-data;(?:[^\r\n]*;)?\s*name="(batch|picture-(\d{1,4}))"(?:;|\s*$)""", re.I | re.M
)


def encode_body(document: bytes, images: Sequence[bytes]) -> tuple[bytes, str]:
    """Encode the batch document (JSON) and the bytes of the images as multipart. Returns the body and its content type."""
    boundary = secrets.token_hex(24)
    parts: list[bytes] = []
    for name, kind, data in [
        ("batch", "application/json", document),
        *((f"picture-{number}", "application/octet-stream", blob) for number, blob in enumerate(images)),
    ]:
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\nContent-Type: {kind}\r\n\r\n'
        parts += [head.encode(), data, b"\r\n"]
    return b"".join([*parts, f"--{boundary}--\r\n".encode()]), f"multipart/form-data; boundary={boundary}"


def decode_body(body: bytes, content_type: str) -> tuple[object, Sequence[Blob]]:
    """Decode a body into the parsed document, not yet checked against the schema, and the bytes of the images. Raises RequestError
    if the body cannot be read."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        document, images = _decode_multipart(body, content_type)
        return parse_json(document), images
    if kind in ("application/msgpack", "application/x-msgpack"):
        try:
            packed = unpack(body, most=2**16)
        except ValueError:
            raise RequestError("bad_body") from None
        if not isinstance(packed, dict) or packed.keys() != {"batch", "pictures"} or not isinstance(packed["pictures"], list):
            raise RequestError("bad_body")
        if not all(isinstance(each, memoryview) for each in (packed["batch"], *packed["pictures"])):
            raise RequestError("bad_body")
        return parse_json(packed["batch"]), packed["pictures"]
    if kind == "application/json":
        whole = parse_json(body)
        if not isinstance(whole, dict) or whole.keys() != {"batch", "pictures"} or not isinstance(whole["pictures"], list):
            raise RequestError("bad_batch")
        return whole["batch"], [decode_base64(text) for text in whole["pictures"]]
    raise RequestError("unsupported")


def parse_json(text: Blob) -> object:
    """Parse ``strict_json`` with a bounded number of values. Raises RequestError for any other text."""
    data = bytes(text)
    if data.count(b",") + data.count(b"[") + data.count(b"{") > _MAX_NODES:
        raise RequestError("too_large")
    try:
        return strict_json(data)
    except ValueError:
        raise RequestError("bad_body") from None


def decode_base64(text: object) -> bytes:
    """The bytes of a base64 string. Raises RequestError for any other value."""
    if not isinstance(text, str):
        raise RequestError("bad_batch")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError("bad_body") from None


def _decode_multipart(body: bytes, content_type: str) -> tuple[Blob, list[Blob]]:
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise RequestError("bad_body")
    mark = b"--" + found[1].encode()
    if not body.startswith(mark):
        raise RequestError("bad_body")
    view = memoryview(body)
    document: Blob | None = None
    images: dict[int, Blob] = {}
    start = len(mark)
    while body[start : start + 2] == b"\r\n":
        head_end = body.find(b"\r\n\r\n", start, start + _MAX_PART_HEAD)
        stop = -1 if head_end < 0 else body.find(b"\r\n" + mark, head_end + 2)
        named = None if stop < 0 else _PART_NAME.search(body[start + 2 : head_end].replace(b"\r\n", b"\n"))
        if named is None or len(images) > _MAX_IMAGES:
            raise RequestError("bad_body")
        data = view[head_end + 4 : stop]
        if named[2] is not None:
            if images.setdefault(int(named[2]), data) is not data:
                raise RequestError("bad_body")
        elif document is not None:
            raise RequestError("bad_body")
        else:
            document = data
        start = stop + 2 + len(mark)
    if document is None or body[start : start + 5] not in (b"--", b"--\r\n") or sorted(images) != list(range(len(images))):
        raise RequestError("bad_body")
    return document, [images[number] for number in range(len(images))]


_DEEPEST = 32
_NUMBERS = dict(zip(range(0xCA, 0xD4), (">f", ">d", ">B", ">H", ">I", ">Q", ">b", ">h", ">i", ">q"), strict=True))
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_SIZED = {  # type code: the length that follows, and what is so long
    **{0xC4: (">B", "bytes"), 0xC5: (">H", "bytes"), 0xC6: (">I", "bytes")},
    **{0xD9: (">B", "text"), 0xDA: (">H", "text"), 0xDB: (">I", "text")},
    **{0xDC: (">H", "list"), 0xDD: (">I", "list"), 0xDE: (">H", "map"), 0xDF: (">I", "map")},
}


def unpack(body: bytes, *, most: int) -> Any:
    """Parse the single MessagePack value in ``body``, of at most ``most`` values in all; its bytes are views of ``body``.

    Raises ValueError if ``body`` is anything else, repeats a key, or has an extension type. Source: the MessagePack specification
    (github.com/msgpack/msgpack, spec.md).
    """
    view, place = memoryview(body), 0

    def take(size: int) -> memoryview:
        nonlocal place
        if size > len(view) - place:
            raise ValueError("it ends too early")
        place += size
        return view[place - size : place]

    def number(form: str) -> Any:
        return struct.unpack(form, take(struct.calcsize(form)))[0]

    def value(depth: int) -> Any:
        nonlocal most
        most -= 1
        if most < 0:
            raise ValueError("too many values")
        code = take(1)[0]
        if code <= 0x7F:
            return code
        if code >= 0xE0:
            return code - 0x100
        if code in _CONSTANTS:
            return _CONSTANTS[code]
        if code in _NUMBERS:
            return number(_NUMBERS[code])
        if code <= 0x8F:
            return sized("map", code & 0x0F, depth)
        if code <= 0x9F:
            return sized("list", code & 0x0F, depth)
        if code <= 0xBF:
            return sized("text", code & 0x1F, depth)
        if code not in _SIZED:
            raise ValueError(f"unknown type {code:#x}")
        size, form = _SIZED[code]
        return sized(form, number(size), depth)

    def sized(form: str, size: int, depth: int) -> Any:
        if form == "bytes":
            return take(size)
        if form == "text":
            return str(take(size), "utf-8")
        if depth == 0:
            raise ValueError("lists and maps are nested too deeply")
        if form == "list":
            return [value(depth - 1) for _ in range(size)]
        found: dict[str, Any] = {}
        for _ in range(size):
            key = value(depth - 1)
            if not isinstance(key, str) or key in found:
                raise ValueError("a key that is not text, or that is repeated")
            found[key] = value(depth - 1)
        return found

    result = value(_DEEPEST)
    if place != len(view):
        raise ValueError("more than one value")
    return result


# Replies

_NODES, _NODES_OF_ITEM = 1000, 16  # JSON values per reply and per item, plus two per item for each column and reward


class InvalidReply(ValueError):
    """A reply that failed a check; the message is a short code for logs and metrics."""


@dataclass(frozen=True, slots=True)
class ExpectedReply:
    """What a valid reply contains. ``judges``: the fingerprint of each reward. ``owner``: the reward of each column."""

    columns: Mapping[str, Column]
    owner: Mapping[str, str]
    judges: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ItemScores:
    """The scores of one item, NaN if a column could not be judged or its reward failed. ``failed``: the rewards that failed."""

    scores: Mapping[str, float]
    failed: frozenset[str]


def read_reply(body: bytes, ids: Collection[str], expected: ExpectedReply) -> dict[str, ItemScores]:
    """The scores by id. Raises InvalidReply if any check fails: a reply with a single error is rejected as a whole."""
    wanted = _NODES_OF_ITEM + 2 * (len(expected.columns) + len(expected.judges))
    if body.count(b",") + body.count(b"[") + body.count(b"{") > _NODES + len(ids) * wanted:
        raise InvalidReply("too_many_values")
    try:
        reply = strict_json(body)
    except ValueError:
        raise InvalidReply("not_json") from None
    if not isinstance(reply, dict):
        raise InvalidReply("wrong_shape")
    judges, items = reply.get("judges"), reply.get("items")
    if judges != {name: [fingerprint] for name, fingerprint in expected.judges.items()}:
        raise InvalidReply("other_judge")
    if not isinstance(items, list) or len(items) != len(ids):
        raise InvalidReply("wrong_count")
    scores: dict[str, ItemScores] = {}
    for item in items:
        if not isinstance(item, dict) or not isinstance(item.get("id"), str):
            raise InvalidReply("wrong_shape")
        if item["id"] in scores:
            raise InvalidReply("repeated_id")
        scores[item["id"]] = _item_scores(item, expected)
    if scores.keys() != set(ids):
        raise InvalidReply("unknown_id")
    return scores


def _item_scores(item: Mapping[str, object], expected: ExpectedReply) -> ItemScores:
    scores, errors = item.get("scores"), item.get("errors", {})
    if not isinstance(scores, dict) or not isinstance(errors, dict) or not errors.keys() <= expected.judges.keys():
        raise InvalidReply("wrong_shape")
    if scores.keys() != {name for name in expected.columns if expected.owner[name] not in errors}:
        raise InvalidReply("wrong_columns")
    found = dict.fromkeys(expected.columns, float("nan"))
    for name, column in expected.columns.items():
        value = scores.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidReply("no_number")
        if not abs(value) <= LARGEST or not column.contains(value):
            raise InvalidReply("out_of_range")
        found[name] = float(value)
    return ItemScores(found, frozenset(errors))
