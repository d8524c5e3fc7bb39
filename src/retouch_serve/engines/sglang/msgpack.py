"""Reads MessagePack, the format of the server's responses: maps, lists, texts, bytes, numbers, booleans and nil.

Source: the MessagePack specification (github.com/msgpack/msgpack, spec.md). Extension types raise ValueError.
"""

import struct
from typing import Any

_DEEPEST = 32
_NUMBERS = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_SIZED = {
    0xC4: (">B", "bytes"),
    0xC5: (">H", "bytes"),
    0xC6: (">I", "bytes"),
    0xD9: (">B", "text"),
    0xDA: (">H", "text"),
    0xDB: (">I", "text"),
    0xDC: (">H", "list"),
    0xDD: (">I", "list"),
    0xDE: (">H", "map"),
    0xDF: (">I", "map"),
}


def unpack(body: bytes) -> Any:
    """Parse the single value in ``body``; bytes are views of it. Raises ValueError if ``body`` is anything else."""
    reader = _Reader(memoryview(body))
    value = reader.value(_DEEPEST)
    if reader.place != len(body):
        raise ValueError("more than one value")
    return value


class _Reader:
    def __init__(self, body: memoryview) -> None:
        self.body = body
        self.place = 0

    def value(self, depth: int) -> Any:
        """Read the value at ``place``, and move ``place`` to its end. ``depth``: how deeply lists and maps may be nested."""
        code = self.take(1)[0]
        if code <= 0x7F:
            return code
        if code >= 0xE0:
            return code - 0x100
        if code in _CONSTANTS:
            return _CONSTANTS[code]
        if code in _NUMBERS:
            return self.number(_NUMBERS[code])
        if code <= 0x8F:
            return self.sized("map", code & 0x0F, depth)
        if code <= 0x9F:
            return self.sized("list", code & 0x0F, depth)
        if code <= 0xBF:
            return self.sized("text", code & 0x1F, depth)
        if code not in _SIZED:
            raise ValueError(f"unknown type {code:#x}")
        size, form = _SIZED[code]
        return self.sized(form, self.number(size), depth)

    def sized(self, form: str, size: int, depth: int) -> Any:
        if form == "bytes":
            return self.take(size)
        if form == "text":
            return str(self.take(size), "utf-8")
        if depth == 0:
            raise ValueError("lists and maps are nested too deeply")
        if form == "list":
            return [self.value(depth - 1) for _ in range(size)]
        found = {}
        for _ in range(size):
            key = self.value(depth - 1)
            if not isinstance(key, str):
                raise ValueError("a key that is not text")
            found[key] = self.value(depth - 1)
        return found

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def take(self, size: int) -> memoryview:
        if size > len(self.body) - self.place:
            raise ValueError("it ends too early")
        self.place += size
        return self.body[self.place - size : self.place]
