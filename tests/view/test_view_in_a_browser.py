"""The page in a real browser: Debian's Chromium, driven by Playwright, where both are installed."""

import json

import pytest
from conftest import TOKEN, WIDE_AND_PHONE, fits
from PIL import Image

from retouch.records.folder import RunFolder, SampleRecord
from retouch.types import Sample, Task

HOSTILE = "<b id=planted>bold</b><script>document.title='planted'</script>\u202egnp.terces " + "w" * 3000


def test_benchmark_chart_follows_the_held_out_chart_and_alarms_are_listed(write_run, tab, address):
    folder = write_run("one")
    for step, mean in ((0, 6.0), (4, 3.0)):
        cell = {"mean": mean, "low": mean - 1, "high": mean + 1, "n": 4}
        result = {"headline": "overall", "table": {"all": {"overall": cell}, "two edits": {"overall": cell}}, "missing": 1}
        folder.write_suite(step, "playground", result, alarm="the suite fell" if step else None)
    tab.goto(f"{address}/#/run/one")
    captions = tab.locator(".charts figure figcaption b")
    captions.nth(2).wait_for()
    assert captions.all_inner_texts()[:3] == ["reward/mean", "held-out share", "benchmark playground"]
    assert tab.get_by_role("heading", name="Alarms").count() == 1
    assert "after step 4: the suite fell" in tab.locator("section ul.warning").inner_text()
    table = tab.get_by_role("table").filter(has_text="playground after step 4")
    assert "1 images without a score" in table.inner_text()
    assert table.get_by_role("row").count() == 3
    assert fits(tab)


def test_empty_folder_shows_a_message_and_the_url_has_no_token(tab):
    tab.get_by_text("No runs here yet").wait_for()
    assert TOKEN not in tab.url


@WIDE_AND_PHONE
def test_pages_of_finished_runs_render_and_fit_the_window(write_run, tab, address):
    write_run("one")
    write_run("two", of=8)
    tab.goto(f"{address}/#/")
    tab.get_by_label("select one").check()
    tab.get_by_label("select two").check()
    assert fits(tab)
    tab.get_by_role("link", name="Compare 2 runs").click()
    tab.get_by_role("heading", name="Comparison").wait_for()
    tab.get_by_role("row", name="steps 4 8").wait_for()
    assert tab.get_by_text("make it red").count() == 1
    assert fits(tab)
    tab.goto(f"{address}/#/run/one")
    tab.get_by_role("img", name="reward/mean over steps").wait_for()
    assert fits(tab)
    tab.get_by_text("All metrics").click()
    tab.get_by_role("img", name="time/step over steps").wait_for()
    tab.get_by_role("link", name="Samples").click()
    tab.locator(".sample").first.click()
    tab.get_by_role("heading", name="make it red").wait_for()
    tab.get_by_label("difference").check()
    tab.get_by_text("step 0: 0").wait_for()
    assert fits(tab)


@WIDE_AND_PHONE
def test_a_failed_run_is_red_with_its_last_message(write_run, tab, address):
    write_run("one", steps=2, of=9).log().write_text("2026-01-01 00:00:00,000  TooManyMissing: 45% of the samples\n")
    tab.goto(f"{address}/#/")
    cell = tab.locator("tbody td[data-label=state]")
    cell.get_by_text("TooManyMissing: 45% of the samples").wait_for()
    assert cell.locator(".state.failed").inner_text() == "failed"
    assert fits(tab)
    tab.get_by_role("link", name="one", exact=True).click()
    tab.locator(".warning", has_text="TooManyMissing").wait_for()
    assert tab.get_by_role("progressbar").count() == 0
    tab.get_by_role("heading", name="Held-out tasks over training").wait_for()
    assert [" ".join(each.split()) for each in tab.locator(".task figcaption").all_inner_texts()] == [
        "source",
        "before 0.000",
        "step 2 0.500",
    ]
    assert fits(tab)


def scored_run(folder: RunFolder, scores):
    """The scores of held-out tasks at steps 0 and 4, and an image of each."""
    for step, values in ((0, [0.2] * len(scores)), (4, scores)):
        tasks = [f"task/{place}" for place in range(len(scores))]
        record = {"tasks": tasks, "rewards": values, "scores": {"share": values}}
        folder.evaluation(step).parent.mkdir(exist_ok=True)
        folder.evaluation(step).write_text(json.dumps(record))
        pixel = Image.new("RGB", (8, 8), "red")
        samples = [Sample(Task(task, task, images=(pixel,)), pixel) for task in tasks]
        rows = zip(samples, values, strict=True)
        folder.write_samples(
            step, "heldout",
            [SampleRecord(sample=each, group=n, slot=0, scores={}, reward=value) for n, (each, value) in enumerate(rows)],
        )  # fmt: skip


def test_a_comparison_begins_with_paired_differences_and_the_tasks_in_their_order(write_run, tab, address):
    for name, scores in (("one", [0.5] * 9), ("two", [0.5 + place / 20 for place in range(9)])):
        folder = write_run(name, steps=4, of=9)
        scored_run(folder, scores)
    tab.goto(f"{address}/#/compare/one,two")
    row = tab.get_by_role("row", name="two 9 0.500 0.700 +0.200")
    row.wait_for()
    assert row.locator("td.good").inner_text() == "+0.200"
    order = [text.split("\n")[0] for text in tab.locator(".compared > p").all_inner_texts()]
    assert order == [f"task/{place}" for place in reversed(range(9))]
    first = tab.locator(".compared").first
    assert first.locator("figcaption").all_inner_texts() == ["source", "one: 0.500", "two: 0.900"]
    assert first.locator("img").evaluate_all("images => images.map((image) => image.getBoundingClientRect().height)") == [200] * 3
    tab.goto(f"{address}/#/")
    held_out = tab.locator("tbody td[data-label=held-out]")
    held_out.get_by_text("0.200 → 0.500").wait_for()
    assert held_out.locator(".good").count() == 2


def test_page_of_a_training_run_updates_without_a_reload(write_run, tab, address):
    folder = write_run("one", steps=2, of=9)
    tab.goto(f"{address}/#/run/one")
    tab.get_by_text("2 of 9").wait_for()
    folder.append_metrics(3, "main", {"reward/mean": 0.75})
    tab.get_by_text("3 of 9").wait_for(timeout=5000)
    assert "last: reward/mean 0.75" in tab.get_by_role("img", name="reward/mean").get_attribute("aria-label")


def test_sample_is_opened_and_closed_with_the_keyboard(write_run, tab, address):
    write_run("one")
    tab.goto(f"{address}/#/samples/one")
    tab.locator(".sample").first.wait_for()
    tab.locator(".sample").first.focus()
    tab.keyboard.press("Enter")
    tab.get_by_role("heading", name="make it red").wait_for()
    tab.keyboard.press("Escape")
    tab.get_by_role("heading", name="make it red").wait_for(state="hidden")
    assert tab.evaluate("document.activeElement.className") == "sample"


def test_hostile_text_is_not_rendered_as_html(write_run, tab, address):
    write_run("one", instruction=HOSTILE)
    for place in ("#/samples/one", "#/compare/one,one"):
        tab.goto(f"{address}/{place}")
        tab.get_by_text("bold").first.wait_for()
        assert tab.locator("#planted").count() == 0
        assert tab.title() != "planted"
        assert fits(tab)


def test_run_with_a_damaged_recipe_shows_the_error(write_run, tab, address):
    folder: RunFolder = write_run("one")
    folder.recipe.write_text("{}")
    tab.goto(f"{address}/#/run/one")
    tab.get_by_text("was changed and holds no recipe").wait_for()


def test_unknown_run_returns_404(tab, address, write_run):
    write_run("one")
    tab.goto(f"{address}/#/")
    tab.get_by_role("link", name="one", exact=True).wait_for()
    reply = tab.request.get(f"{address}/api/runs/other")
    assert (reply.status, reply.json()) == (404, {"error": "there is no such run"})


@pytest.mark.parametrize(
    ("place", "marker"),
    [("#/", "2 of 2 runs"), ("#/run/one", "All metrics"), ("#/samples/one", "make it red"), ("#/compare/one,two", "make it red")],
)
def test_a_saved_page_shows_the_same_without_a_server(write_run, tab, address, place, marker, tmp_path):
    write_run("one", instruction=f"make it red {HOSTILE}")
    write_run("two", of=8)
    tab.goto(f"{address}/{place}")
    tab.get_by_text(marker).first.wait_for()
    shown = tab.locator("main").inner_text()
    with tab.expect_download() as download:
        tab.get_by_role("button", name="Save this page").click()
    file = tmp_path / "saved.html"
    download.value.save_as(file)
    content = file.read_text(encoding="utf-8")
    assert "<script" not in content.lower().replace("&lt;script", "")
    assert address not in content
    assert TOKEN not in content
    page = tab.context.new_page()
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.goto(file.as_uri())
    first = "2 of 2 runs" if place == "#/" else next(line for line in shown.splitlines() if line.strip())
    assert first in page.locator("main").inner_text()
    assert page.locator("#planted").count() == 0
    assert [url for url in requested if not url.startswith(("file:", "data:"))] == []
    if "samples" in place or "compare" in place:
        assert page.locator("img").first.evaluate("image => image.decode().then(() => image.naturalWidth)") > 0
    assert page.evaluate("getComputedStyle(document.body).maxWidth") == "1240px"
