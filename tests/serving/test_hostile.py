"""Hostile payloads: each is rejected with a 4xx and a fixed text and costs little memory, and the server keeps working."""

import base64
import gzip
import json
import re
import resource
import socket
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest
from PIL import Image

from hostile_payloads import BROKEN_BODIES, DAMAGED_IMAGES, SIGNATURE, VALID_PNG, WRONG_DOCUMENTS, chunk
from live_server import body_of, encode, host, live, samples_of
from pictures import encoded, picture
from ray_server import ON_RAY, ray_server
from retouch_serve.requests import Limits, SingleScore
from retouch_serve.wire import ERRORS, encode_body
from served_rewards import Digest

LIMITS = Limits(window=0.0, max_items=64, max_pixels=2**20, max_total_pixels=2**22, max_body_bytes=8 * 2**20, body_seconds=1.0)


@pytest.fixture(scope="module", params=["own", pytest.param("ray", marks=ON_RAY)])
def server(request):
    if request.param == "ray":
        limits = [word for name in LIMITS.__slots__ for word in ("--limit", f"{name}={getattr(LIMITS, name)}")]
        with ray_server("served_rewards:Digest", "--vlm", "digest", *limits) as served:
            yield served
    else:
        with live(host(Digest()), limits=LIMITS, single_score=SingleScore(vlm="digest")) as live_server:
            yield live_server


def bomb(side, *, depth=8, colour=2):
    """A PNG of side x side black pixels."""
    rows = zlib.compressobj(9)
    channels = {0: 1, 2: 3}[colour]
    data = b"".join(rows.compress(bytes(1 + side * channels * depth // 8)) for _ in range(min(side, 64))) + rows.flush()
    header = struct.pack(">IIBBBBB", side, side, depth, colour, 0, 0, 0)
    return SIGNATURE + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def animated(format):
    return encoded(picture(0), format, save_all=True, append_images=[picture(1), picture(2)])


def endless_body():
    for _ in range(1000):
        yield bytes(2**20)


TEXT_BOMB = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(64 * 2**20), 9))


PICTURES: dict[str, bytes] = {
    "PNG bomb of 13000 x 13000": bomb(13000),
    "PNG bomb of 65535 x 65535": bomb(65535),
    "PNG that states 2^31 - 1 pixels a side": b"\x89PNG\r\n\x1a\n"
    + chunk(b"IHDR", struct.pack(">IIBBBBB", 2**31 - 1, 2**31 - 1, 8, 2, 0, 0, 0)),
    "PNG a little too large": encoded(Image.new("RGB", (1025, 1024))),
    "PNG with a text bomb": VALID_PNG[:33] + TEXT_BOMB + VALID_PNG[33:],
    "PNG with a flipped byte": encoded(picture(0))[:60] + b"\xff" + encoded(picture(0))[61:],
    "animated PNG": animated("PNG"),
    "animated WebP": animated("WEBP"),
    "WebP header alone": b"RIFF\x10\x00\x00\x00WEBPVP8L",
    "WebP that states a huge size": b"RIFF\x1a\0\0\0WEBPVP8L\x0d\0\0\0\x2f\xff\xff\xff\x0f" + bytes(8),
    "SVG": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) run\n",
    "PDF": b"%PDF-1.7\n1 0 obj <</Type /Catalog>> endobj",
    "HTML": b"<html><body>hello</body></html>",
    "pickle": b"\x80\x04\x95\x1e" + bytes(7) + b"\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94.",
    "ZIP": b"PK\x03\x04" + bytes(60),
    "ELF": b"\x7fELF" + bytes(60),
    "nothing": b"",
    "zeros": bytes(1000),
    "a path": b"/etc/passwd",
    "an address": b"http://169.254.169.254/latest/meta-data/",
}


def assert_rejected(response):
    """Assert that the reply is a 4xx with a fixed text, for the whole request or for every item."""
    assert 400 <= response.status_code < 500, (response.status_code, response.text[:300])
    assert not re.search(r"Traceback|File \"|0x[0-9a-f]{6,}|site-packages|\.py\b", response.text)
    answer = response.json()
    if "items" in answer:
        assert {code for item in answer["items"] for code in item["errors"].values()} == {"bad_picture"}
        assert all(item["scores"] == {} for item in answer["items"])
    else:
        assert answer == {"error": {"code": answer["error"]["code"], "message": ERRORS[answer["error"]["code"]][1]}}


def post(server, body, **headers):
    return server.client.post("/v1/score", content=body, headers=headers)


def batch(**changes):
    """A batch of one item whose picture is an encoded file."""
    whole = {
        "version": 1,
        "tasks": [{"id": "a", "instruction": "b"}],
        "items": [{"id": "x", "task": 0, "picture": 0}],
        "pictures": [{"form": "encoded"}],
    }
    return {**whole, **changes}


def send(server, document, *blobs):
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    body, kind = encode_body(text, blobs)
    return post(server, body, **{"Content-Type": kind})


@pytest.mark.parametrize("name", PICTURES)
def test_hostile_images_are_rejected(server, name):
    assert_rejected(send(server, batch(), PICTURES[name]))
    text = base64.b64encode(PICTURES[name]).decode()
    assert_rejected(server.client.post("/score", json={"image": text, "prompt": "x"}))


RAW = {"form": "raw", "mode": "RGB", "width": 4, "height": 4}
ITEM = {"id": "x", "task": 0, "picture": 0}
TASK = {"id": "a", "instruction": "b"}
DOCUMENTS: dict[str, object] = {
    "raw pixels of another size": batch(pictures=[RAW]),
    "raw pixels of a negative size": batch(pictures=[{**RAW, "width": -4}]),
    "raw pixels of a huge size": batch(pictures=[{**RAW, "width": 65535, "height": 65535}]),
    "an unknown mode": batch(pictures=[{**RAW, "mode": "I;16"}]),
    "a picture by address": batch(pictures=[{"form": "encoded", "url": "http://127.0.0.1/"}]),
    "a picture by path": batch(pictures=[{"form": "encoded", "path": "/etc/passwd"}]),
    "a picture number beyond the end": batch(items=[{**ITEM, "picture": 1}]),
    "a task number beyond the end": batch(items=[{**ITEM, "task": 9}]),
    "a task that nobody asks about": batch(tasks=[TASK, TASK]),
    "more pictures stated than sent": batch(pictures=[{"form": "encoded"}] * 2),
    "an id twice": batch(items=[ITEM, ITEM]),
    "an id of strange letters": batch(items=[{**ITEM, "id": "ü\u202e"}]),
    "an id with a line break": batch(items=[{**ITEM, "id": "a\nb"}]),
    "an id of great length": batch(items=[{**ITEM, "id": "a" * 129}]),
    "too many items": batch(items=[{**ITEM, "id": str(k)} for k in range(65)]),
    "an unknown key": batch(extra=1),
    "an unknown key in a task": batch(tasks=[{**TASK, "__class__": "os.system"}]),
    "an unknown reward": batch(rewards=["nobody"]),
    "a reward's name that is a path": batch(rewards=["../../etc/passwd"]),
    "another version": batch(version=2),
    "tags that are numbers": batch(tasks=[{**TASK, "tags": {"a": 1}}]),
    "a list": [],
    "null": None,
    "NaN": b'{"version": NaN}',
    "Infinity": json.dumps(batch()).encode().replace(b'"instruction": "b"', b'"instruction": "b", "meta": {"a": Infinity}'),
    "a number of 5000 digits": b'{"version": ' + b"9" * 5000 + b"}",
    "lists 100000 deep": b"[" * 100_000,
    "objects 50000 deep": b'{"a":' * 50_000,
    "a meta 5000 deep": json.dumps(batch()).encode().replace(b'"b"', b'"b", "meta": {"a": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
    "a million small objects": b"[" + b"{}," * 1_000_000 + b"{}]",
    "text that is no UTF-8": b'{"version": "\xff\xfe"}',
    "UTF-16": json.dumps(batch()).encode("utf-16"),
    "JSON cut off": json.dumps(batch()).encode()[:-9],
    "two documents": json.dumps(batch()).encode() * 2,
    "nothing": b"",
    "pickle": PICTURES["pickle"],
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_malformed_batch_documents_are_rejected(server, name):
    assert_rejected(send(server, DOCUMENTS[name], VALID_PNG))


M = "multipart/form-data; boundary=b"
JSON, MSGPACK = "application/json", "application/msgpack"
NAMED = b"--b\r\nContent-Disposition: form-data"
BODIES: dict[str, tuple[Callable[[], bytes | Iterator[bytes]], dict[str, str]]] = {
    name: (make if callable(make) else lambda made=make: made, {"Content-Type": kind, **dict(more)} if kind else {})
    for name, make, kind, *more in (
        ("no content type", b"x", None),
        ("pickle by type", PICTURES["pickle"], "application/octet-stream"),
        ("python by type", PICTURES["pickle"], "application/x-python-pickle"),
        ("a gzip bomb", lambda: gzip.compress(bytes(2**26)), JSON, ("Content-Encoding", "gzip")),
        ("an unknown encoding", b"{}", JSON, ("Content-Encoding", "br")),
        ("a body that says it is too long", lambda: bytes(9 * 2**20), M),
        ("a body that is too long without saying", endless_body, M),
        ("no boundary", b"--b\r\n", "multipart/form-data"),
        ("an empty boundary", b"--\r\n", "multipart/form-data; boundary="),
        ("another boundary", b"--c\r\n\r\n--c--", M),
        ("a part without an end", NAMED + b'; name="batch"\r\n\r\n{}', M),
        ("a part without a name", NAMED + b"\r\n\r\n{}\r\n--b--", M),
        ("a part of another name", NAMED + b'; name="file"\r\n\r\n{}\r\n--b--', M),
        ("a part with a long head", b"--b\r\n" + b"X: y\r\n" * 9999 + b"\r\n\r\n{}\r\n--b--", M),
        ("the batch twice", (NAMED + b'; name="batch"\r\n\r\n{}\r\n') * 2 + b"--b--", M),
        ("the picture 9999", lambda: encode_body(b"{}", [b"a"])[0].replace(b"picture-0", b"picture-9999"), M),
        ("a million boundaries", lambda: b"--b\r\n" * 1_000_000, M),
        ("msgpack of nested lists", b"\x91" * 100_000, MSGPACK),
        ("msgpack of a huge length", b"\x82\xa5batch\xc6\xff\xff\xff\xff", MSGPACK),
        ("msgpack of a huge map", b"\xdf\xff\xff\xff\xff", MSGPACK),
        ("msgpack with an extension", b"\x82\xa5batch\xc7\x10\x00", MSGPACK),
        ("msgpack with more behind", encode(b"{}", [], "msgpack")[0] + b"x", MSGPACK),
        ("msgpack cut off", encode(b"{}", [b"abc"], "msgpack")[0][:-1], MSGPACK),
        ("JSON without pictures", b'{"batch": {}}', JSON),
        ("JSON with base64 that is none", b'{"batch": {}, "pictures": ["&&&"]}', JSON),
        ("JSON with numbers as pictures", b'{"batch": {}, "pictures": [1]}', JSON),
        ("JSON of a million lists", lambda: b"[" + b"[]," * 1_000_000 + b"1]", JSON),
        ("a deadline in the past", b"{}", JSON, ("X-Deadline-Seconds", "-1")),
        ("a deadline that is no number", b"{}", JSON, ("X-Deadline-Seconds", "soon")),
        ("a deadline that is NaN", b"{}", JSON, ("X-Deadline-Seconds", "nan")),
    )
}


@pytest.mark.parametrize("name", BODIES)
def test_malformed_bodies_are_rejected(server, name):
    make, headers = BODIES[name]
    response = post(server, make(), **headers)
    assert_rejected(response)
    assert "too long" not in name or response.json()["error"]["code"] == "too_large"


def test_malformed_requests_to_the_single_score_page_and_to_unknown_paths_are_rejected(server):
    for document in (
        *(b"", b"[]", b"{}", b'{"image": 7, "prompt": "x"}'),
        *(b'{"image": "%%%", "prompt": "x"}', b'{"image": "", "prompt": "x", "y": 1}'),
    ):
        assert_rejected(server.client.post("/score", content=document))
    for method, path in (("GET", "/v1/score"), ("GET", "/../../etc/passwd"), ("POST", "/v1/reload"), ("PUT", "/score")):
        assert_rejected(server.client.request(method, path))


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{",
    ],
    ids=["TLS", "negative length", "two lengths", "bad chunk", "HTTP/9.9", "long path", "slow body"],
)
def test_malformed_http_requests_return_4xx(server, data):
    address = urlsplit(server.url)
    answer = b""
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        connection.sendall(data)
        while b"\r\n\r\n" not in answer and (part := connection.recv(65536)):
            answer += part
    assert answer.startswith(b"HTTP/1.1 4"), answer[:200]
    assert b"Traceback" not in answer


@pytest.mark.parametrize(
    ("series", "send_one"),
    [
        (DAMAGED_IMAGES, lambda server, damaged: send(server, batch(), damaged)),
        (WRONG_DOCUMENTS, lambda server, document: send(server, document, VALID_PNG)),
        (BROKEN_BODIES, lambda server, broken: post(server, broken[0], **broken[1])),
    ],
    ids=["damaged images", "wrong documents", "broken bodies"],
)
def test_every_generated_payload_is_rejected(server, series, send_one):
    assert len(series) > 50
    for payload in series.values():
        assert_rejected(send_one(server, payload))


def test_server_still_scores_with_bounded_memory_after_hostile_payloads(server):
    body, kind = body_of(samples_of(1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for image in PICTURES.values():
        send(server, batch(), image)
    for document in DOCUMENTS.values():
        send(server, document, VALID_PNG)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * (1 if sys.platform == "darwin" else 1024) < 100e6
    assert post(server, body, **kind).status_code == 200
