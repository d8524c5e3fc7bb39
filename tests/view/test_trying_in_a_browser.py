"""Trying on the page: an inpainting model with a mask that is drawn or uploaded and a reference image, and a writer of prompts."""

import base64
import io
import json
from typing import Any

import numpy as np
import pytest
from conftest import WIDE_AND_PHONE, fits
from PIL import Image, ImageDraw

import tiny_sign_runs
import tiny_writer_runs
from retouch.recipe.recipe import parse
from retouch.records.folder import RunFolder
from retouch.run.session import run
from retouch.types import Task
from retouch_view.live.trial_worker import SideBySide


@pytest.fixture
def options():
    return {"trying": "cpu"}


@pytest.fixture
def signs(tmp_path):
    """The folder of a run; its images are 64 x 32 px."""
    tiny_sign_runs.make_run(tmp_path / "runs")
    return tmp_path / "runs" / "signs"


@pytest.fixture
def files(tmp_path):
    task = tiny_sign_runs.task()
    found = {"source": task.images[0], "reference": task.reference, "mask": task.mask}
    for name, image in found.items():
        image.save(tmp_path / f"{name}.png")
    return {name: tmp_path / f"{name}.png" for name in found}


def drag(tab, start, end):
    """Drag the pointer over the drawing between two points, given as shares of its width and height."""
    drawing = tab.get_by_role("img", name="the drawn mask")
    drawing.scroll_into_view_if_needed()
    box = drawing.bounding_box()
    for number, (across, down) in enumerate((start, end)):
        tab.mouse.move(box["x"] + across * box["width"], box["y"] + down * box["height"])
        if number == 0:
            tab.mouse.down()
    tab.mouse.up()


def image_of(text):
    assert text is not None
    return Image.open(io.BytesIO(base64.b64decode(text)))


@pytest.mark.slow
@WIDE_AND_PHONE
def test_a_drawn_mask_and_a_reference_reach_the_model(signs, files, tab, address):
    tab.goto(f"{address}/#/try/signs")
    requests: list[dict[str, Any]] = []
    tab.on("request", lambda request: requests.append(json.loads(request.post_data)) if request.method == "POST" else None)
    make = tab.get_by_role("button", name="Make both images")
    tab.get_by_label("Prompt or instruction").fill("OAK")
    make.click()
    tab.get_by_text("This model needs a source image.").wait_for()
    tab.get_by_label("Source image:").set_input_files(files["source"])
    make.click()
    tab.get_by_text("Draw a mask, or choose a file.").wait_for()
    drag(tab, (0.75, 0.75), (0.25, 0.25))
    make.click()
    tab.get_by_text("This model needs a reference image.").wait_for()
    assert requests == []
    tab.get_by_label("Reference image:").set_input_files(files["reference"])
    tab.get_by_label("as context").check()
    make.click()
    tab.get_by_text("Both from the noise of seed 0.").wait_for(timeout=120_000)
    (sent,) = requests
    assert sent["context"] == "reference"
    rectangle = Image.new("L", (64, 32))
    ImageDraw.Draw(rectangle).rectangle((16, 8, 47, 23), fill=255)
    drawn = image_of(sent["mask"])
    assert drawn.size == rectangle.size
    assert set(np.unique(np.asarray(drawn.convert("RGB")))) == {0, 255}
    different = np.asarray(drawn.convert("L")) != np.asarray(rectangle)
    assert not different[10:22, 18:46].any()  # the edges may be off by a pixel
    assert different.sum() <= 2 * (32 + 16)
    opened = {name: Image.open(files[name]).convert("RGB") for name in ("source", "reference")}
    task = Task("any", "OAK", images=(opened["source"],), mask=drawn.convert("L"), reference=opened["reference"])
    expected = SideBySide(signs, device="cpu").sample(task, step=2, seed=0, context="reference").image
    shown = tab.get_by_role("img", name="after step 2").evaluate(
        "canvas => [...canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data]"
    )
    assert np.array_equal(np.array(shown, np.uint8).reshape(32, 64, 4)[..., :3], np.asarray(expected))
    assert fits(tab)


@pytest.mark.slow
def test_an_uploaded_mask_replaces_the_drawing_and_the_brush_can_be_undone(signs, files, tab, address):
    tab.goto(f"{address}/#/try/signs")
    requests: list[dict[str, Any]] = []

    def answer(route):
        requests.append(json.loads(route.request.post_data))
        route.fulfill(body=json.dumps({"error": f"answer {len(requests)}"}) + "\n")

    tab.route("**/try", answer)
    make = tab.get_by_role("button", name="Make both images")
    tab.get_by_label("Prompt or instruction").fill("OAK")
    tab.get_by_label("Source image:").set_input_files(files["source"])
    tab.get_by_label("Reference image:").set_input_files(files["reference"])
    tab.get_by_label("Draw with").select_option("brush")
    drag(tab, (0.1, 0.5), (0.9, 0.5))
    drag(tab, (0.5, 0.1), (0.5, 0.9))
    tab.get_by_role("button", name="Undo").click()
    make.click()
    tab.get_by_text("answer 1").wait_for()
    drawn = np.asarray(image_of(requests[-1]["mask"]).convert("L"))
    assert drawn[16, 8:56].all()
    assert not drawn[[2, 29]].any()
    tab.get_by_label("Mask:").set_input_files(files["mask"])
    make.click()
    tab.get_by_text("answer 2").wait_for()
    assert base64.b64decode(requests[-1]["mask"]) == files["mask"].read_bytes()
    tab.get_by_role("button", name="Remove the mask").click()
    make.click()
    tab.get_by_text("Draw a mask, or choose a file.").wait_for()
    assert len(requests) == 2
    assert requests[-1]["context"] is None


@pytest.fixture
def written(tmp_path):
    """Two steps of the playground's writer in front of its frozen editor, with steps so large that the text changes."""
    changes = {"policy__model": {"kind": "playground-writer"}, "rollout__max_new_tokens": 32, "learning_rate": 0.05}
    recipe = parse(tiny_writer_runs.recipe(tmp_path / "runs", tmp_path, **changes))
    assert run(recipe, fresh=False) == 0
    return RunFolder(recipe.folder)


@pytest.mark.slow
@WIDE_AND_PHONE
def test_try_shows_texts_and_images_before_and_after_training(written, tab, address):
    line = written.read_samples(0)[0]
    source = written.samples(0) / line["source"]
    tab.goto(f"{address}/#/try/written")
    tab.get_by_label("Prompt or instruction").fill(line["instruction"])
    tab.locator("input[type=file]").set_input_files(source)
    tab.get_by_role("button", name="Make both images").click()
    tab.get_by_text("Both from the noise of seed 0.").wait_for(timeout=120_000)
    assert [figure.split("\n")[0] for figure in tab.locator(".pairs figcaption").all_inner_texts()] == [
        "source",
        "before training",
        "after step 2",
    ]
    with Image.open(source) as image:
        task = Task("any", line["instruction"], images=(image.convert("RGB"),))
    pair = SideBySide(written.root, device="cpu")
    expected = [pair.sample(task, step=step, seed=0).text for step in (0, 2)]
    assert tab.locator(".pairs pre").all_inner_texts() == expected
    assert expected[0] != expected[1]
    for label in ("before training", "after step 2"):
        assert tab.get_by_role("img", name=label).evaluate("canvas => canvas.width") == task.images[0].width
    assert fits(tab)
