"""The bodies of requests: multipart, JSON and msgpack.

The body of a request: the batch document and the bytes of its images, in one of three encodings.

- ``multipart/form-data``: a part ``batch`` (JSON) and parts ``picture-0``, ``picture-1``, ... (binary). The default.
- ``application/msgpack``: a map with ``batch`` (the JSON, as bytes) and ``pictures`` (a list of bytes).
- ``application/json``: an object with ``batch`` and ``pictures`` (a list of base64 strings).

Decoding takes memory in proportion to the size of the body: the number of JSON values is bounded before a document is parsed.

The MessagePack form of a request body: the map ``{"batch": bytes, "pictures": [bytes, ...]}`` and nothing else.

It has its own parser, because a general parser would build any nested structure that a hostile body describes. The type codes are
from the MessagePack specification (github.com/msgpack/msgpack/blob/master/spec.md).
"""

import base64
import binascii
import re
import secrets
from collections.abc import Sequence
from typing import Literal, TypeAlias

from retouch.records.shapes import strict_json
from retouch_serve.wire.errors import RequestError

_MAP_OF_TWO = 0x82
_BINARY = {0xC4: 1, 0xC5: 2, 0xC6: 4}  # type code: number of bytes of the length that follows
_SHORT_TEXT, _SHORT_ARRAY, _ARRAY_16 = 0xA0, 0x90, 0xDC


def encode_msgpack(document: bytes, images: Sequence[bytes]) -> bytes:
    """Encode the batch document (JSON) and the bytes of the images as a body."""
    parts = [bytes([_MAP_OF_TWO]), _text("batch"), _binary(document), _text("pictures")]
    parts += [bytes([_ARRAY_16]), len(images).to_bytes(2, "big"), *map(_binary, images)]
    return b"".join(parts)


def decode_msgpack(body: bytes) -> tuple[memoryview, list[memoryview]]:
    """Views of the document and of the images' bytes, without a copy. Raises RequestError for any other structure."""
    reader = _Reader(body)
    if reader.byte() != _MAP_OF_TWO:
        raise RequestError("bad_body")
    document: memoryview | None = None
    images: list[memoryview] | None = None
    for _ in range(2):
        key = reader.text()
        if key == b"batch" and document is None:
            document = reader.binary()
        elif key == b"pictures" and images is None:
            images = [reader.binary() for _ in range(reader.array())]
        else:
            raise RequestError("bad_body")
    if document is None or images is None or not reader.done():
        raise RequestError("bad_body")
    return document, images


class _Reader:
    def __init__(self, body: bytes) -> None:
        self._view = memoryview(body)
        self._offset = 0

    def done(self) -> bool:
        return self._offset == len(self._view)

    def take(self, count: int) -> memoryview:
        if self._offset + count > len(self._view):
            raise RequestError("bad_body")
        self._offset += count
        return self._view[self._offset - count : self._offset]

    def byte(self) -> int:
        return self.take(1)[0]

    def text(self) -> bytes:
        code = self.byte()
        if code & 0xE0 != _SHORT_TEXT:
            raise RequestError("bad_body")
        return bytes(self.take(code & 0x1F))

    def binary(self) -> memoryview:
        width = _BINARY.get(self.byte())
        if width is None:
            raise RequestError("bad_body")
        return self.take(int.from_bytes(self.take(width), "big"))

    def array(self) -> int:
        code = self.byte()
        if code & 0xF0 == _SHORT_ARRAY:
            return code & 0x0F
        if code != _ARRAY_16:
            raise RequestError("bad_body")
        return int.from_bytes(self.take(2), "big")


def _text(text: str) -> bytes:
    return bytes([_SHORT_TEXT | len(text)]) + text.encode()


def _binary(data: bytes) -> bytes:
    return b"\xc6" + len(data).to_bytes(4, "big") + data


BodyForm: TypeAlias = Literal["multipart", "msgpack", "json"]
Blob: TypeAlias = bytes | memoryview

_MAX_IMAGES = 4096
_MAX_NODES = 200_000
_MAX_PART_HEAD = 1024
_BOUNDARY = re.compile(r"""boundary="?([0-9A-Za-z'()+_,./:=?-]{1,70})"?\s*(?:;|$)""")
_PART_NAME = re.compile(
    rb"""^content-disposition:\s*form-data;(?:[^\r\n]*;)?\s*name="(batch|picture-(\d{1,4}))"(?:;|\s*$)""", re.I | re.M
)


def encode_body(document: bytes, images: Sequence[bytes], form: BodyForm) -> tuple[bytes, str]:
    """Encode the batch document (JSON) and the bytes of the images. Returns the body and its content type."""
    if form == "multipart":
        boundary = secrets.token_hex(24)
        parts: list[bytes] = []
        for name, kind, data in [
            ("batch", "application/json", document),
            *((f"picture-{number}", "application/octet-stream", blob) for number, blob in enumerate(images)),
        ]:
            head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\nContent-Type: {kind}\r\n\r\n'
            parts += [head.encode(), data, b"\r\n"]
        return b"".join([*parts, f"--{boundary}--\r\n".encode()]), f"multipart/form-data; boundary={boundary}"
    if form == "msgpack":
        return encode_msgpack(document, images), "application/msgpack"
    texts = ",".join(f'"{base64.b64encode(blob).decode()}"' for blob in images)
    return b'{"batch":%b,"pictures":[%b]}' % (document, texts.encode()), "application/json"


def decode_body(body: bytes, content_type: str) -> tuple[object, list[Blob]]:
    """Decode a body into the parsed document, not yet checked against the schema, and the bytes of the images. Raises RequestError
    if the body cannot be read."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        document, images = _decode_multipart(body, content_type)
        return parse_json(document), images
    if kind in ("application/msgpack", "application/x-msgpack"):
        inner, binaries = decode_msgpack(body)
        return parse_json(inner), [*binaries]
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
