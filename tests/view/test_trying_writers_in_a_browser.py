"""Trying a prompt-writing policy: the page shows the texts and the images of the untrained and the trained policy."""

import pytest
from PIL import Image

import tiny_writer_runs
from retouch.inference.sampling import SideBySide
from retouch.recipe.recipe import parse
from retouch.records.folder import RunFolder
from retouch.run.session import run
from retouch.types import Task

pytest.importorskip("playwright.sync_api", reason="needs the package playwright")


@pytest.fixture
def options():
    return {"trying": "cpu"}


@pytest.fixture
def written(tmp_path):
    """Two steps of the playground's writer in front of its frozen editor, with steps so large that the text changes."""
    changes = {"policy__model": {"kind": "playground-writer"}, "rollout__max_new_tokens": 32, "learning_rate": 0.05}
    recipe = parse(tiny_writer_runs.recipe(tmp_path / "runs", tmp_path, **changes))
    assert run(recipe, fresh=False) == 0
    return RunFolder(recipe.folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tab", [{}, {"viewport": {"width": 390, "height": 800}, "color_scheme": "dark"}], indirect=True, ids=["wide", "phone"]
)
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
    assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
