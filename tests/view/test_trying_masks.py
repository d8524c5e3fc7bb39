"""Trying an inpainting model with an IP-Adapter (server): the mask, the reference and the context of a request."""

import base64
import io
import json
import sys
from typing import Any

import numpy as np
import pytest
from conftest import TOKEN
from PIL import Image
from starlette.testclient import TestClient

import pictures
import tiny_sign_runs
from retouch.records.folder import RunFolder
from retouch_view.live.app import build_app
from retouch_view.live.trial_worker import SideBySide
from retouch_view.live.trying import trial_inputs
from warm_python import python

OWN = {"Origin": "http://127.0.0.1:8765"}
PLACE = "/api/runs/signs"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    tiny_sign_runs.make_run(root)
    return root


@pytest.fixture(scope="module")
def page(runs):
    """A browser on a page with ``--try``, with the token. Its worker does not import the libraries again."""
    with (
        pytest.MonkeyPatch.context() as patch,
        TestClient(build_app(runs, token=TOKEN, trying="cpu"), base_url="http://127.0.0.1:8765") as client,
    ):
        patch.setattr(sys, "executable", python())
        client.get(f"/?token={TOKEN}")
        yield client


def encoded(image, kind="PNG"):
    return base64.b64encode(pictures.encoded(image, kind)).decode()


def job(**changes):
    task = tiny_sign_runs.task()
    assert task.mask is not None
    assert task.reference is not None
    images = {"image": encoded(task.images[0]), "mask": encoded(task.mask), "reference": encoded(task.reference)}
    return {"instruction": task.instruction, **images, "step": 2, "seed": 3} | changes


def tried(page, **changes):
    reply = page.post(f"{PLACE}/try", json=job(**changes), headers=OWN)
    assert reply.status_code == 200, reply.text
    last: dict[str, Any] = json.loads([line for line in reply.text.splitlines() if line.strip()][-1])
    return last


@pytest.mark.slow
def test_try_uses_the_mask_the_reference_and_the_context(page, runs):
    pair, task, made = SideBySide(runs / "signs", device="cpu"), tiny_sign_runs.task(), []
    for context in (None, "reference"):
        done = tried(page, context=context)["done"]
        image = Image.open(io.BytesIO(base64.b64decode(done["trained"]["image"])))
        assert np.array_equal(image, pair.sample(task, step=2, seed=3, context=context).image)
        assert image.size == task.images[0].size
        made.append(done["trained"]["image"])
    other = tried(page, reference=encoded(Image.new("RGB", (24, 12), "red")))["done"]["trained"]["image"]
    part = tried(page, mask=encoded(Image.new("L", task.images[0].size, 255)))["done"]["trained"]["image"]
    assert len({*made, other, part}) == 4


def test_page_learns_which_images_the_model_reads(page, runs, tmp_path):
    assert page.get(f"{PLACE}/checkpoints").json() == {
        "steps": [1, 2],
        "inputs": {"mask": True, "reference": True, "context": True},
    }
    nothing = {"mask": False, "reference": False, "context": False}
    document = json.loads((runs / "signs" / "recipe.json").read_text())
    for number, change in enumerate(({"kind": "no-such-model"}, {"kind": "import", "class": "no_such:Model"}, [1])):
        document["recipe"]["policy"]["model"] = change
        folder = RunFolder(tmp_path / str(number))
        folder.root.mkdir()
        folder.recipe.write_text(json.dumps(document))
        assert trial_inputs(folder) == nothing
    for number, content in enumerate(("", "[]", '{"recipe": 3}', "\x00")):
        folder = RunFolder(tmp_path / f"damaged-{number}")
        folder.root.mkdir()
        folder.recipe.write_text(content)
        assert trial_inputs(folder) == nothing
    assert trial_inputs(RunFolder(tmp_path / "missing")) == nothing


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"mask": None}, "the model fills the masked part of an image; it needs a mask"),
        ({"reference": None}, "the IP-Adapter needs a reference image"),
        ({"mask": "no base64!"}, "the mask is not base64"),
        ({"reference": "no base64!"}, "the reference is not base64"),
        ({"mask": encoded(Image.new("1", (9000, 9000)))}, "the mask: 81000000 pixels, more than the 16777216"),
        ({"reference": encoded(Image.new("1", (9000, 9000)))}, "the reference: 81000000 pixels, more than the 16777216"),
        ({"mask": encoded(Image.new("L", (64, 32)), "BMP")}, "the mask: not a PNG, JPEG or WebP image"),
        ({"mask": encoded(Image.new("RGBA", (64, 32)))}, "the mask: a mask with transparent parts"),
        ({"mask": encoded(Image.new("L", (32, 64)))}, "the mask is 32x64 but its image 64x32"),
        ({"reference": encoded(Image.new("RGB", (4, 20))), "context": "reference"}, "is 4x20; crop it"),
    ],
    ids=["mask", "reference", "m64", "r64", "large-m", "large-r", "bitmap", "transparent", "size", "tall"],
)
def test_invalid_mask_or_reference_returns_an_error_with_the_reason(page, changes, why):
    assert why in tried(page, **changes)["error"]


def test_try_with_invalid_types_returns_409(page):
    for changes in ({"mask": 3}, {"reference": ["a"]}, {"context": "left"}, {"context": True}):
        reply = page.post(f"{PLACE}/try", json=job(**changes), headers=OWN)
        assert reply.status_code == 409
        assert next(iter(changes)) in reply.json()["error"]
