"""Generates invalid requests to a reward server: damaged image files, wrong values of every field of a batch, and broken bodies."""

import json
import struct
import zlib
from collections.abc import Iterator

from PIL import Image

from live_server import encode
from pictures import encoded, picture

SIGNATURE = b"\x89PNG\r\n\x1a\n"
BATCH = {
    "version": 1,
    "tasks": [{"id": "a", "instruction": "b"}],
    "items": [{"id": "x", "task": 0, "picture": 0}],
    "pictures": [{"form": "encoded"}],
}
VALID_PNG = encoded(picture(0))
VALUES: dict[str, object] = {
    **{"null": None, "true": True, "minus one": -1, "half": 0.5, "1e999": float("inf"), "2^70": 2**70},
    **{"a text": "~ü", "an empty text": "", "a list": [[]], "an empty list": [], "an object": {"a": {}}, "an empty object": {}},
}
FIELDS: dict[str, tuple[str, ...]] = {  # the path of each field, and the values of ``VALUES`` that are valid for it
    "version": (),
    "tasks": (),
    "items": (),
    "pictures": (),
    "rewards": ("null",),
    "tasks.0": (),
    "tasks.0.id": ("a text", "an empty text"),
    "tasks.0.instruction": ("a text", "an empty text"),
    "tasks.0.images": ("an empty list",),
    "tasks.0.mask": ("null",),
    "tasks.0.reference": ("null",),
    "tasks.0.target": ("null",),
    "tasks.0.text": ("null", "a text", "an empty text"),
    "tasks.0.tags": ("an empty object",),
    "tasks.0.meta": ("an object", "an empty object"),
    "items.0": (),
    "items.0.id": (),
    "items.0.task": (),
    "items.0.picture": (),
    "pictures.0": (),
    "pictures.0.form": (),
    "pictures.0.mode": (),
    "pictures.0.width": ("null",),
    "pictures.0.height": ("null",),
}


def chunk(kind: bytes, data: bytes, *, checksum: int | None = None) -> bytes:
    """Make a chunk of a PNG."""
    right = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", right if checksum is None else checksum)


def header(width: int = 4, height: int = 4, depth: int = 8, colour: int = 2, *rest: int) -> bytes:
    """Make the first chunk of a PNG."""
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, *(rest or (0, 0, 0))))


def saved(format: str) -> bytes:
    """Return the bytes of a valid image in this format."""
    return encoded(picture(0).convert("1" if format in ("XBM", "MSP") else "RGB"), format)


def damaged_images() -> Iterator[tuple[str, bytes]]:
    """Yield files that are cut off, files in formats that are not accepted, and PNGs with wrong chunks."""
    for format in ("PNG", "JPEG", "WEBP"):
        whole = saved(format)
        for share in (1, 2, 5, 10, 20, 30, 40, 50, 60, 70, 80):
            yield f"the first {share} % of a {format}", whole[: len(whole) * share // 100]
    for format in ("GIF", "BMP", "DIB", "TIFF", "ICO", "PPM", "TGA", "PCX", "SGI", "JPEG2000", "XBM", "MSP", "DDS", "PDF", "EPS"):
        if Image.SAVE.get(format) is not None or (Image.init() and format in Image.SAVE):
            yield f"{format} instead of PNG", saved(format)
    pixels = chunk(b"IDAT", zlib.compress((b"\0" + bytes(12)) * 4))
    end = chunk(b"IEND", b"")
    for depth, colour in ((0, 2), (3, 2), (7, 0), (16, 3), (1, 2), (4, 6), (255, 2), (8, 1), (8, 5), (8, 255)):
        yield f"PNG of depth {depth} and colour type {colour}", SIGNATURE + header(4, 4, depth, colour) + pixels + end
    for width, height in ((0, 4), (4, 0), (2**31, 4), (4, 2**32 - 1), (65536, 65536), (2**20, 2), (1, 2**21)):
        yield f"PNG of {width} x {height}", SIGNATURE + header(width, height) + pixels + end
    yield "PNG without pixels", SIGNATURE + header() + end
    yield "PNG whose pixels are not compressed data", SIGNATURE + header() + chunk(b"IDAT", b"hello") + end
    yield "PNG with too few pixels", SIGNATURE + header() + chunk(b"IDAT", zlib.compress(b"\0" * 5)) + end
    yield "PNG without a header", SIGNATURE + pixels + end
    yield "PNG with a short header", SIGNATURE + chunk(b"IHDR", bytes(5)) + pixels + end
    yield "PNG with a wrong checksum", SIGNATURE + chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 8, 2, 0, 0, 0), checksum=1) + pixels
    yield "PNG with a chunk of 2 GB", SIGNATURE + header() + struct.pack(">I", 2**31 - 1) + b"IDAT" + bytes(9)
    yield "PNG with an unknown filter", SIGNATURE + header() + chunk(b"IDAT", zlib.compress((b"\xff" + bytes(12)) * 4)) + end
    yield "PNG in PNG", SIGNATURE + VALID_PNG
    yield "GIF with a PNG's name in it", b"GIF89a" + VALID_PNG
    yield "RIFF that is not WebP", b"RIFF" + struct.pack("<I", 100) + b"WAVEfmt " + bytes(92)
    yield "WebP with a wrong length field", saved("WEBP")[:4] + b"\xff\xff\xff\x7f" + saved("WEBP")[8:40]
    yield "JPEG without tables", b"\xff\xd8\xff\xc0\x00\x11\x08\x00\x10\x00\x10\x03\x01\x11\x00\x02\x11\x01\x03\x11\x01\xff\xd9"
    yield "JPEG that contains only markers", b"\xff\xd8" + b"\xff\xe0\x00\x02" * 20_000
    yield "JPEG of 65535 x 65535", b"\xff\xd8\xff\xc0\x00\x0b\x08\xff\xff\xff\xff\x01\x01\x11\x00\xff\xd9"


def wrong_documents() -> Iterator[tuple[str, object]]:
    """Yield batches in which one field has a value that is not allowed."""
    for field, allowed in FIELDS.items():
        for name, value in VALUES.items():
            if name not in allowed and not (field == "items.0.picture" and name == "null"):
                whole = json.loads(json.dumps(BATCH))
                *path, last = field.split(".")
                place = whole
                for key in path:
                    place = place[int(key) if key.isdigit() else key]
                place[int(last) if last.isdigit() else last] = value
                yield f"{field} is {name}", json.dumps(whole).encode()


def broken_bodies() -> Iterator[tuple[str, bytes, dict[str, str]]]:
    """Yield bodies that are cut off, or that do not match their content type."""
    document = json.dumps(BATCH).encode()
    for form in ("multipart", "msgpack", "json"):
        body, kind = encode(document, [VALID_PNG], form)
        for share in (0, 1, 3, 10, 25, 50, 75, 90, 99):
            yield f"the first {share} % of a {form} body", body[: len(body) * share // 100], {"Content-Type": kind}
        for other in (
            *("multipart/form-data; boundary=zzz", "application/msgpack", "application/json", "text/plain", "image/png"),
            *("*/*",),
        ):
            if other != kind.partition(";")[0]:
                yield f"{form} as {other}", body, {"Content-Type": other}
        yield f"{form} twice", body * 2, {"Content-Type": kind}
        yield f"{form} after a byte order mark", b"\xef\xbb\xbf" + body, {"Content-Type": kind}
        yield f"{form} in capitals", body.upper(), {"Content-Type": kind}
        yield f"{form} declared as gzip", body, {"Content-Type": kind, "Content-Encoding": "gzip"}
        for deadline in ("0", "-1", "1e999", "NaN", "1,5", "", "0x10", "1 2"):
            yield f"{form} with a deadline of {deadline!r}", body, {"Content-Type": kind, "X-Deadline-Seconds": deadline}


DAMAGED_IMAGES = dict(damaged_images())
WRONG_DOCUMENTS = dict(wrong_documents())
BROKEN_BODIES = {name: (body, headers) for name, body, headers in broken_bodies()}
