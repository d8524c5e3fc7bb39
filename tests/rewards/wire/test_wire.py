"""The wire format: samples arrive bitwise as they were sent, in every form; unreadable bodies are rejected."""

import json
from dataclasses import replace

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from live_server import BodyForm, body_of, encode
from pictures import picture
from retouch.types import Sample, Task
from retouch_serve.requests import Limits, decode
from retouch_serve.wire import ImageEncoding, RequestError, decode_body, pack

FORMS: list[BodyForm] = ["multipart", "msgpack", "json"]
ENCODINGS: list[ImageEncoding] = ["webp", "raw"]


def full_task():
    return Task(
        id="photos/ü 17",
        instruction='make "it" 😀 red\n',
        images=(picture(0), picture(1, size=(9, 31))),
        mask=picture(2, mode="L"),
        reference=picture(3),
        target=picture(4),
        text="open",
        tags={"complexity": "2"},
        meta={"scene": [1, 2.5, None, {"a": True}], "name": "é"},
    )


def round_trip(samples, form, encoding):
    body, headers = body_of(samples, form=form, encoding=encoding)
    return decode(body, headers["Content-Type"], Limits())


def same(a, b):
    if a is None or b is None:
        return a is b
    return a.mode == b.mode and a.size == b.size and bool((np.asarray(a) == np.asarray(b)).all())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_all_fields_of_a_sample_arrive_bitwise(form, encoding):
    task = full_task()
    sent = [Sample(task, picture(5)), Sample(task, None), Sample(Task(id="bare", instruction=""), picture(6, mode="L"))]
    decoded = round_trip(sent, form, encoding)
    assert decoded.ids == ("0", "1", "2")
    for before, after in zip(sent, decoded.samples, strict=True):
        assert isinstance(after, Sample)
        assert same(before.image, after.image)
        for name in ("id", "instruction", "text", "tags", "meta"):
            assert getattr(before.task, name) == getattr(after.task, name), name
        for name in ("mask", "reference", "target"):
            assert same(getattr(before.task, name), getattr(after.task, name)), name
        assert len(before.task.images) == len(after.task.images)
        assert all(map(same, before.task.images, after.task.images))
    first, second, _ = decoded.samples
    assert first.task is second.task  # sent and decoded once


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_other_image_modes_arrive_converted_to_rgb_and_rotation_or_width_change_no_pixel(encoding):
    rotated = picture(0, size=(8, 4))
    rotated.info["exif"] = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06" + bytes(6)
    rotated.info["icc_profile"] = b"profile"
    too_wide_for_webp = picture(0, size=(16400, 1))
    for image in (rotated, too_wide_for_webp, *map(picture(0).convert, ("RGBA", "P", "1", "LA", "CMYK"))):
        (sample,) = round_trip([Sample(Task(id="a", instruction="b"), image)], "multipart", encoding).samples
        assert isinstance(sample, Sample)
        assert same(sample.image, image.convert("RGB"))


def test_a_group_sends_its_source_once():
    task = replace(full_task(), mask=None, reference=None, target=None)
    _, blobs = pack([Sample(task, picture(k)) for k in range(8)], [str(k) for k in range(8)], encoding="raw")
    assert len(blobs) == 8 + 2


@pytest.mark.parametrize(("meta", "says"), [({"x": float("nan")}, "NaN or infinity"), ({"x": (1, 2)}, r"meta\.x: .*plain JSON")])
def test_meta_that_is_not_json_raises(meta, says):
    with pytest.raises(ValueError, match=says):
        pack([Sample(Task(id="a", instruction="b", meta=meta), None)], ["0"], encoding="raw")


@settings(max_examples=60)
@given(document=st.dictionaries(st.text(), st.integers()), blobs=st.lists(st.binary(max_size=70000), max_size=20))
def test_any_bytes_round_trip_in_every_body_form(document, blobs):
    for form in FORMS:
        body, kind = encode(json.dumps(document).encode(), blobs, form)
        parsed, pictures = decode_body(body, kind)
        assert parsed == document
        assert [bytes(blob) for blob in pictures] == blobs


@settings(max_examples=300)
@given(form=st.sampled_from(FORMS), data=st.data())
def test_corrupted_bodies_are_decoded_or_raise_a_request_error(form, data):
    body, kind = encode(b'{"a": 1}', [b"12", b"3" * 300], form)
    place = data.draw(st.integers(0, len(body)))
    changed = body[:place] + data.draw(st.binary(max_size=6)) + body[data.draw(st.integers(place, len(body))) :]
    try:
        document, blobs = decode_body(changed, kind)
    except RequestError:
        return
    assert isinstance(blobs, list)
    json.dumps(document)


def test_bodies_are_compatible_with_the_msgpack_package_and_with_httpx():
    files = {"batch": (None, b'{"x":1}', "application/json"), "picture-0": ("a.png", b"\r\n--\x00", "image/png")}
    request = httpx.Request("POST", "http://localhost/", files=files)
    document, pictures = decode_body(request.read(), request.headers["content-type"])
    assert (document, [bytes(blob) for blob in pictures]) == ({"x": 1}, [b"\r\n--\x00"])
    msgpack = pytest.importorskip("msgpack")
    blobs = [b"", b"a" * 200, b"b" * 70000]
    body, kind = encode(b'{"x":1}', blobs, "msgpack")
    assert msgpack.unpackb(body) == {"batch": b'{"x":1}', "pictures": blobs}
    document, pictures = decode_body(msgpack.packb({"pictures": blobs, "batch": b'{"x":1}'}), kind)
    assert (document, [bytes(blob) for blob in pictures]) == ({"x": 1}, blobs)
