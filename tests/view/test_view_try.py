"""Trying a checkpoint on the page: both images from the same noise, one job at a time, in a process that can be stopped."""

import base64
import gc
import io
import json
import os
import sys
import time
from pathlib import Path

import anyio
import pytest
from conftest import TOKEN
from PIL import Image
from starlette.testclient import TestClient

import pictures
import tiny_recipes
from retouch.recipe.recipe import parse
from retouch.records.folder import RunFolder
from retouch.run.session import run
from retouch.types import Task
from retouch_view.live.app import build_app
from retouch_view.live.trial_worker import SideBySide
from retouch_view.live.trying import MOST_BYTES, MOST_CHARACTERS, TrialWorker
from warm_python import python

OWN = {"Origin": "http://127.0.0.1:8765"}
PLACE = "/api/runs/small/try"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run of two steps."""
    root = tmp_path_factory.mktemp("runs")
    keys = {"out": str(root), "device": "cpu", "trackers": (), "learning_rate": 0.05, "checkpoints": {"every": 1}}
    assert run(parse({**tiny_recipes.SMALL, **keys}), fresh=False) == 0
    return root


@pytest.fixture(scope="module")
def page(runs):
    """A browser on a page with ``--try``, with the token. Its worker does not import the libraries again."""
    with (
        pytest.MonkeyPatch.context() as patch,
        TestClient(build_app(runs, token=TOKEN, trying="auto"), base_url="http://127.0.0.1:8765") as client,
    ):
        patch.setattr(sys, "executable", python())
        client.get(f"/?token={TOKEN}")
        yield client


def encoded(image, kind="PNG"):
    return base64.b64encode(pictures.encoded(image, kind)).decode()


def source():
    return Image.new("RGB", (64, 64), "white")


def tried(page, **asked):
    job = {"instruction": "add a red circle", "image": encoded(source()), "step": 2, "seed": 3} | asked
    reply = page.post(PLACE, json=job, headers=OWN)
    assert reply.status_code == 200, reply.text
    return [json.loads(line) for line in reply.text.splitlines() if line.strip()]


def test_try_returns_images_of_the_untrained_policy_and_the_checkpoint(page, runs):
    inputs = {"mask": False, "reference": False, "context": False}
    assert page.get("/api/runs/small/checkpoints").json() == {"steps": [1, 2], "inputs": inputs}
    events = tried(page)
    assert [event["stage"] for event in events if event.get("calls") == 0] == ["base", "trained"]
    done = events[-1]["done"]
    made = {name: Image.open(io.BytesIO(base64.b64decode(done[name]["image"]))) for name in ("base", "trained")}
    pair = SideBySide(runs / "small")
    task = Task("any", "add a red circle", images=(source(),))
    for name, step in (("trained", 2), ("base", 0), ("trained", 2)):
        assert pair.sample(task, step=step, seed=3).image.tobytes() == made[name].tobytes()
    assert made["base"].tobytes() != made["trained"].tobytes()
    again = tried(page, step=1)
    assert "loading" not in [event.get("stage") for event in again]  # the model is still there
    assert again[-1]["done"]["base"] == done["base"]


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"image": "no base64!"}, "not base64"),
        ({"image": base64.b64encode(b"no image").decode()}, "not a PNG, JPEG or WebP image"),
        ({"image": encoded(Image.new("1", (9000, 9000)))}, "81000000 pixels, more than the 16777216"),
        ({"image": encoded(source(), "BMP")}, "not a PNG, JPEG or WebP image"),
        ({"image": None}, "needs a source image"),
        ({"mask": encoded(Image.new("L", (64, 64), 255))}, "the model reads no mask; remove it"),
        ({"reference": encoded(source())}, "the model reads no reference image; remove it"),
        ({"context": "reference"}, "context: this policy fills no masked part of an image"),
    ],
    ids=["no base64", "no image", "too large", "bitmap", "none", "mask", "reference", "context"],
)
def test_invalid_source_image_returns_an_error_with_the_reason(page, asked, why):
    assert why in tried(page, **asked)[-1]["error"]


def test_try_with_invalid_fields_returns_409(page):
    for asked in (
        {"instruction": ""}, {"instruction": " \n\t "}, {"instruction": None}, {"instruction": "x" * (MOST_CHARACTERS + 1)},
        {"image": 3}, {"step": 7}, {"step": "../2"}, {"step": True}, {"seed": -1}, {"seed": 2**31}, {"seed": 0.5},
    ):  # fmt: skip
        reply = page.post(PLACE, json={"instruction": "add", "image": None, "step": 2, "seed": 0} | asked, headers=OWN)
        assert reply.status_code == 409, asked
        assert reply.json()["error"]


def test_try_is_rejected_from_other_origins_and_without_the_flag(page, runs):
    job = {"instruction": "add", "image": None, "step": 2, "seed": 0}
    assert page.post(PLACE, json=job).status_code == 403
    assert page.post(PLACE, json=job, headers={"Origin": "http://127.0.0.1:1"}).status_code == 403
    large = page.post(PLACE, content=b"x" * (MOST_BYTES + 1), headers={**OWN, "Content-Type": "application/json"})
    assert large.status_code == 413
    with TestClient(build_app(runs, token=TOKEN, control=True), base_url="http://127.0.0.1:8765") as other:
        other.get(f"/?token={TOKEN}")
        assert other.post(PLACE, json=job, headers=OWN).status_code in (404, 405)


class Client:
    """A request whose client is connected, or has disconnected."""

    def __init__(self, *, left):
        self.left = left

    async def is_disconnected(self):
        return self.left


def test_cancelled_try_frees_the_worker_and_leaves_no_process(runs):
    folder = RunFolder(runs / "small")
    job = {"instruction": "add", "image": None, "mask": None, "reference": None, "context": None, "step": 2, "seed": 0}

    async def try_twice():
        bench = TrialWorker("cpu")
        with anyio.move_on_after(0.1) as scope:
            async for _ in bench.events(folder, job, Client(left=False)):
                pass
        assert scope.cancelled_caught
        found = [line async for line in bench.events(folder, job, Client(left=True))]
        await bench.stop()
        return found

    before = children()
    assert anyio.run(try_twice) == []
    assert children() <= before
    gc.collect()  # a pipe of a killed process that is still open would raise a ResourceWarning here


@pytest.mark.slow
def test_worker_process_ends_with_the_server(runs):
    with TestClient(build_app(runs, token=TOKEN, trying="cpu"), base_url="http://127.0.0.1:8765") as client:
        client.get(f"/?token={TOKEN}")
        before = children()
        assert "done" in tried(client)[-1]
        assert len(children() - before) == 1
    deadline = time.monotonic() + 20
    while children() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert children() <= before


def children():
    """The processes of workers that this process has started."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            line = (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == os.getpid() and b"trial_worker" in line:
            found.add(int(path.parent.name))
    return found
