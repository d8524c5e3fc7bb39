"""A body in MessagePack: the map ``{"batch": bytes, "pictures": [bytes, ...]}`` and nothing else that the format could say.

It is read by hand, since a general parser builds whatever nest of lists a hostile body describes. Codes are those of the
MessagePack specification.
"""

from collections.abc import Sequence

from retouch.rewards.wire.refusals import Refused

_MAP_OF_TWO = 0x82
_BINARY = {0xC4: 1, 0xC5: 2, 0xC6: 4}  # code to the width of the length that follows
_SHORT_TEXT, _SHORT_ARRAY, _ARRAY_16 = 0xA0, 0x90, 0xDC


def to_msgpack(document: bytes, pictures: Sequence[bytes]) -> bytes:
    """The body."""
    parts = [bytes([_MAP_OF_TWO]), _text("batch"), _binary(document), _text("pictures")]
    parts += [bytes([_ARRAY_16]), len(pictures).to_bytes(2, "big"), *map(_binary, pictures)]
    return b"".join(parts)


def from_msgpack(body: bytes) -> tuple[memoryview, list[memoryview]]:
    """The document and the pictures' bytes, without a copy. Refused where the body is anything else."""
    reader = _Reader(body)
    if reader.byte() != _MAP_OF_TWO:
        raise Refused("bad_body")
    document: memoryview | None = None
    pictures: list[memoryview] | None = None
    for _ in range(2):
        key = reader.text()
        if key == b"batch" and document is None:
            document = reader.binary()
        elif key == b"pictures" and pictures is None:
            pictures = [reader.binary() for _ in range(reader.array())]
        else:
            raise Refused("bad_body")
    if document is None or pictures is None or not reader.done():
        raise Refused("bad_body")
    return document, pictures


class _Reader:
    def __init__(self, body: bytes) -> None:
        self._view = memoryview(body)
        self._place = 0

    def done(self) -> bool:
        return self._place == len(self._view)

    def take(self, count: int) -> memoryview:
        if self._place + count > len(self._view):
            raise Refused("bad_body")
        self._place += count
        return self._view[self._place - count : self._place]

    def byte(self) -> int:
        return self.take(1)[0]

    def text(self) -> bytes:
        code = self.byte()
        if code & 0xE0 != _SHORT_TEXT:
            raise Refused("bad_body")
        return bytes(self.take(code & 0x1F))

    def binary(self) -> memoryview:
        width = _BINARY.get(self.byte())
        if width is None:
            raise Refused("bad_body")
        return self.take(int.from_bytes(self.take(width), "big"))

    def array(self) -> int:
        code = self.byte()
        if code & 0xF0 == _SHORT_ARRAY:
            return code & 0x0F
        if code != _ARRAY_16:
            raise Refused("bad_body")
        return int.from_bytes(self.take(2), "big")


def _text(text: str) -> bytes:
    return bytes([_SHORT_TEXT | len(text)]) + text.encode()


def _binary(data: bytes) -> bytes:
    return b"\xc6" + len(data).to_bytes(4, "big") + data
