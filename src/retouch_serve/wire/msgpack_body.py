"""The MessagePack form of a request body: the map ``{"batch": bytes, "pictures": [bytes, ...]}`` and nothing else.

It has its own parser, because a general parser would build any nested structure that a hostile body describes. The type codes are
from the MessagePack specification (github.com/msgpack/msgpack/blob/master/spec.md).
"""

from collections.abc import Sequence

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
