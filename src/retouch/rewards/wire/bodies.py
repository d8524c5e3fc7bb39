"""The three forms of a request's body: the batch document and the pictures' bytes, put together and taken apart.

- ``multipart/form-data``: a part ``batch`` (JSON) and parts ``picture-0``, ``picture-1``, ... (binary). The default.
- ``application/msgpack``: a map of ``batch`` (the JSON, as bytes) and ``pictures`` (a list of bytes).
- ``application/json``: an object of ``batch`` and ``pictures`` (a list of base64 texts).

Taking apart costs memory in proportion to the body, whatever the body says: what a document can blow up into is counted first.
"""

import base64
import binascii
import json
import re
import secrets
from collections.abc import Sequence
from typing import Literal, NoReturn, TypeAlias

from retouch.rewards.wire.msgpack_form import from_msgpack, to_msgpack
from retouch.rewards.wire.refusals import Refused

BodyForm: TypeAlias = Literal["multipart", "msgpack", "json"]
Blob: TypeAlias = bytes | memoryview

MAX_PICTURES = 4096
_MAX_NODES = 200_000
_MAX_PART_HEAD = 1024
_BOUNDARY = re.compile(r"""boundary="?([0-9A-Za-z'()+_,./:=?-]{1,70})"?\s*(?:;|$)""")
_PART_NAME = re.compile(
    rb"""^content-disposition:\s*form-data;(?:[^\r\n]*;)?\s*name="(batch|picture-(\d{1,4}))"(?:;|\s*$)""", re.I | re.M
)


def put_together(document: bytes, pictures: Sequence[bytes], form: BodyForm) -> tuple[bytes, str]:
    """The body and its content type."""
    if form == "multipart":
        boundary = secrets.token_hex(24)
        parts: list[bytes] = []
        for name, kind, data in [
            ("batch", "application/json", document),
            *((f"picture-{number}", "application/octet-stream", blob) for number, blob in enumerate(pictures)),
        ]:
            head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\nContent-Type: {kind}\r\n\r\n'
            parts += [head.encode(), data, b"\r\n"]
        return b"".join([*parts, f"--{boundary}--\r\n".encode()]), f"multipart/form-data; boundary={boundary}"
    if form == "msgpack":
        return to_msgpack(document, pictures), "application/msgpack"
    texts = ",".join(f'"{base64.b64encode(blob).decode()}"' for blob in pictures)
    return b'{"batch":%b,"pictures":[%b]}' % (document, texts.encode()), "application/json"


def take_apart(body: bytes, content_type: str) -> tuple[object, list[Blob]]:
    """The parsed document, which still has to be checked against the schema, and the pictures' bytes. Refused where unreadable."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        document, pictures = _from_multipart(body, content_type)
        return parse_json(document), pictures
    if kind in ("application/msgpack", "application/x-msgpack"):
        inner, binaries = from_msgpack(body)
        return parse_json(inner), [*binaries]
    if kind == "application/json":
        whole = parse_json(body)
        if not isinstance(whole, dict) or whole.keys() != {"batch", "pictures"} or not isinstance(whole["pictures"], list):
            raise Refused("bad_batch")
        return whole["batch"], [from_base64(text) for text in whole["pictures"]]
    raise Refused("unsupported")


def parse_json(text: Blob) -> object:
    """Strict JSON: UTF-8, no NaN or Infinity, of bounded depth and number of values. Refused otherwise."""
    data = bytes(text)
    if data.count(b",") + data.count(b"[") + data.count(b"{") > _MAX_NODES:
        raise Refused("too_large")
    try:
        parsed: object = json.loads(data.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise Refused("bad_body") from None
    return parsed


def from_base64(text: object) -> bytes:
    """The bytes of a base64 text. Refused where it is none."""
    if not isinstance(text, str):
        raise Refused("bad_batch")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Refused("bad_body") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _from_multipart(body: bytes, content_type: str) -> tuple[Blob, list[Blob]]:
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise Refused("bad_body")
    mark = b"--" + found[1].encode()
    if not body.startswith(mark):
        raise Refused("bad_body")
    view = memoryview(body)
    document: Blob | None = None
    pictures: dict[int, Blob] = {}
    place = len(mark)
    while body[place : place + 2] == b"\r\n":
        head_end = body.find(b"\r\n\r\n", place, place + _MAX_PART_HEAD)
        stop = -1 if head_end < 0 else body.find(b"\r\n" + mark, head_end + 2)
        named = None if stop < 0 else _PART_NAME.search(body[place + 2 : head_end].replace(b"\r\n", b"\n"))
        if named is None or len(pictures) > MAX_PICTURES:
            raise Refused("bad_body")
        data = view[head_end + 4 : stop]
        if named[2] is not None:
            if pictures.setdefault(int(named[2]), data) is not data:
                raise Refused("bad_body")
        elif document is not None:
            raise Refused("bad_body")
        else:
            document = data
        place = stop + 2 + len(mark)
    if document is None or body[place : place + 2] != b"--" or sorted(pictures) != list(range(len(pictures))):
        raise Refused("bad_body")
    return document, [pictures[number] for number in range(len(pictures))]
