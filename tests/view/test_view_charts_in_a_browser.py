"""Charts in a browser: confidence bands, the axes of a comparison, judge cost, and SVG and PNG files for a paper."""

from xml.etree import ElementTree

import pytest
from conftest import WIDE_AND_PHONE
from PIL import Image

from retouch.records.folder import RunFolder, Summary
from retouch.rewards.ledger.database import Database
from retouch_judge.cache import AnswerCache, JudgeCall
from retouch_view.report.page import write_report

SVG = "{http://www.w3.org/2000/svg}"


def judged_run(write_run, name, *, cost):
    """A run with bands, whose judge took 10 requests a step. ``cost``: of a step, None without prices."""
    folder: RunFolder = write_run(name, steps=0)
    for step in range(1, 5):
        folder.append_metrics(step, "main", {"reward/mean": 0.1 * step, "reward/std": 0.2, "reward/ci95": 0.16})
        totals = {"judge/requests": 10 * step, "judge/input_tokens": 1000 * step}
        priced = {"judge/unpriced_requests": 10 * step} if cost is None else {"judge/cost": cost * step}
        folder.append_timings(step, {"time/step": 2.0, **totals, **priced})
    for step in (0, 4):
        folder.write_eval(step, "heldout", table={"all": {"n": 1, "share": 0.2 * step}}, ci95={"all": {"share": (0.1, 0.9)}})
    database = Database(folder.root / "ledger.sqlite")
    call = {"image": "", "judge": "j", "rubric": "r", "scores": None, "attempts": 40, "input_tokens": 4000}
    AnswerCache(database).record([JudgeCall(content="a", cost=None if cost is None else 4 * cost, **call)])
    database.close()
    return folder


def test_chart_bands_are_95_percent_confidence_intervals(write_run, tab, address):
    judged_run(write_run, "one", cost=0.5)
    tab.goto(f"{address}/#/run/one")
    chart = tab.locator("figure", has_text="held-out share").first
    chart.locator("svg").hover()
    assert chart.locator(".readout").inner_text() in ("0 (0.1 to 0.9) at 0", "0.8 (0.1 to 0.9) at 4")
    assert chart.locator("path.band").count() == 1
    assert tab.locator("figure", has_text="reward/mean").first.locator("path.band").count() == 0


def test_runs_are_compared_over_judge_cost(write_run, tab, address):
    judged_run(write_run, "one", cost=0.5)
    judged_run(write_run, "two", cost=0.25)
    tab.goto(f"{address}/#/compare/one,two")
    tab.get_by_role("combobox", name="Over").select_option("cost")
    reward = tab.locator("figure", has_text="reward/mean").first
    reward.get_by_role("img", name="reward/mean over dollars paid to judges").wait_for()
    assert tab.locator("figure", has_text="held-out share").locator("path.band").count() == 2
    assert reward.locator(".tick.middle").all_text_contents() == ["0", "0.5", "1.0", "1.5", "2.0"]
    assert tab.get_by_text("Not over").count() == 0


def test_images_axis_counts_the_images_of_each_phase_and_refilled_groups(write_run, tab, address):
    sampled = [{"name": "first", "tasks_per_step": 5}, {"name": "second", "group_size": 10}]
    for name in ("one", "two"):
        folder: RunFolder = write_run(name, steps=0)
        folder.write_recipe({"name": name, "tasks_per_step": 2, "group_size": 3, "phases": sampled})
        folder.append_metrics(1, "supervised", {"policy/loss": 1.0})
        for step, phase, refilled in ((2, "first", {}), (3, "first", {"refill/samples": 45}), (4, "second", {})):
            folder.append_metrics(step, phase, {"reward/mean": 0.5, **refilled})
    tab.goto(f"{address}/#/compare/one,two")
    tab.get_by_role("combobox", name="Over").select_option("samples")
    reward = tab.locator("figure", has_text="reward/mean").first
    reward.get_by_role("img", name="reward/mean over images made").wait_for()
    assert reward.locator(".tick.middle").all_text_contents() == ["0", "20", "40", "60", "80"]  # 15, 60 and 80


def test_axis_that_a_run_lacks_is_disabled_with_the_reason(write_run, tab, address):
    judged_run(write_run, "one", cost=0.5)
    judged_run(write_run, "unpriced", cost=None)
    write_run("exact")
    tab.goto(f"{address}/#/compare/one,unpriced")
    tab.get_by_text("Not over dollars paid to judges: unpriced has a judge without prices.").wait_for()
    options = tab.get_by_role("combobox", name="Over").locator("option")
    assert [options.nth(place).is_disabled() for place in range(5)] == [False, False, False, True, False]
    tab.get_by_role("combobox", name="Over").select_option("requests")
    tab.get_by_role("img", name="reward/mean over requests to judges").wait_for()
    tab.goto(f"{address}/#/compare/one,exact")
    tab.get_by_text("Not over dollars paid to judges or requests to judges: exact asked no judge.").wait_for()


@WIDE_AND_PHONE
def test_table_of_runs_shows_judge_cost(write_run, tab, address):
    judged_run(write_run, "one", cost=0.5)
    judged_run(write_run, "unpriced", cost=None)
    write_run("exact")
    tab.goto(f"{address}/#/")
    tab.locator("td.cost", has_text="$2.00").wait_for()
    if tab.viewport_size["width"] > 600:
        tab.get_by_role("button", name="cost so far").click()
        assert tab.locator("td.cost").all_inner_texts() == ["–", "40 requests, 4K tokens", "$2.00"]
    tab.goto(f"{address}/#/run/one")
    tab.get_by_text("All metrics").click()
    tab.get_by_role("img", name="judge/cost over steps").wait_for()
    assert "judges so far\n$2.00" in tab.locator(".facts").last.inner_text()


def test_lines_are_smoothed_and_a_click_enlarges_a_chart(write_run, tab, address):
    folder: RunFolder = write_run("one", steps=0, of=40)
    for step in range(1, 41):
        folder.append_metrics(step, "main", {"reward/mean": step % 2, "missing/share": 0.0, "policy/grad_norm": 0.5})
    tab.goto(f"{address}/#/run/one")
    chart = tab.locator("figure", has_text="reward/mean").first
    chart.locator("path.line.raw").wait_for()
    assert "mean of 5 steps" in chart.inner_text()
    tab.get_by_role("slider", name="Smoothing").fill("2")
    tab.get_by_text("the strong line is the mean of 2 steps").wait_for()
    heights = {point.split()[1] for point in (chart.locator("path.line").nth(1).get_attribute("d") or "")[1:].split("L")}
    assert len(heights) == 1, "the mean of two steps is always 0.5"
    chart.locator("svg").click()
    assert (tab.get_by_role("dialog", name="reward/mean").locator("svg").bounding_box() or {})["width"] > 900
    tab.keyboard.press("Escape")
    assert tab.get_by_role("dialog").count() == 0
    tab.get_by_text("All metrics").click()
    tab.get_by_text("0 or unknown at every step: missing/share.").wait_for()
    assert tab.get_by_role("img", name="policy/grad_norm over steps").count() == 1
    assert tab.get_by_role("img", name="missing/share").count() == 0


def test_axes_of_one_evaluation_and_of_close_values_have_distinct_whole_steps(write_run, tab, address):
    folder: RunFolder = write_run("one", steps=0, of=3)
    folder.write_eval(
        0, "heldout", table={"all": {"n": 9, "reward": 9.8, "overall": 9.8}}, ci95={"all": {"overall": (9.801, 9.803)}}
    )
    tab.goto(f"{address}/#/run/one")
    chart = tab.locator("figure", has_text="held-out overall")
    chart.wait_for()
    assert chart.locator(".tick.middle").all_text_contents() == ["0", "1"]
    heights = chart.locator(".tick.end").all_text_contents()
    assert len(set(heights)) == len(heights) > 1
    assert tab.locator("figure", has_text="held-out reward").count() == 0, "the reward is the same column"


@pytest.mark.parametrize("tab", [{}, {"color_scheme": "dark"}], indirect=True, ids=["light", "dark"])
def test_chart_is_saved_as_svg_and_png(write_run, tab, address, tmp_path):
    judged_run(write_run, "one", cost=0.5)
    judged_run(write_run, "<b>two", cost=0.25)
    tab.goto(f"{address}/#/compare/one,%3Cb%3Etwo")
    chart = tab.locator("figure", has_text="reward/mean").first
    chart.hover()
    saved = {}
    for kind in ("SVG", "PNG"):
        with tab.expect_download() as download:
            chart.get_by_role("button", name=kind).click()
        saved[kind] = tmp_path / download.value.suggested_filename
        download.value.save_as(saved[kind])
    assert [file.name for file in saved.values()] == ["reward-mean.svg", "reward-mean.png"]
    root = ElementTree.parse(saved["SVG"]).getroot()
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert words[0] == "reward/mean"
    assert words[-3:] == ["steps", "one", "<b>two"]
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {"svg", "g", "rect", "line", "path", "text", "title"}
    assert not any("class" in element.attrib or "style" in element.attrib for element in root.iter())
    strokes = {element.get("stroke") for element in root.iter(f"{SVG}path")}
    assert {"rgb(37, 99, 168)", "rgb(180, 80, 11)"} <= strokes  # the light colours, in both schemes
    with Image.open(saved["PNG"]) as image:
        _, _, width, height = (float(number) for number in root.attrib["viewBox"].split())
        assert image.size == (4 * width, 4 * height)
        colours = {colour for count, colour in image.convert("RGB").getcolors(1 << 20) if count > 200}
    assert {(255, 255, 255), (37, 99, 168), (180, 80, 11)} <= colours
    assert tab.locator(".paper").count() == 0


def test_the_report_draws_its_charts_without_a_server(chromium, write_run):
    folder: RunFolder = write_run("one", steps=0)
    for step in range(1, 501):
        folder.append_metrics(step, "first" if step <= 250 else "second", {"reward/mean": 0.01 * step, "policy/clip_fraction": 0.1})
    for step in (0, 500):
        folder.write_eval(step, "heldout", table={"all": {"n": 9, "share": 0.01 * step}}, ci95={"all": {"share": (0.1, 4.9)}})
    folder.write_summary(Summary(column="share", on="tasks", before=0.0, after=5.0, steps=500, ceiling=9.7, best_of_k=None))
    page = chromium.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text))
    page.goto(write_report(folder.root).as_uri())
    charts = page.locator("figure.chart")
    assert charts.locator("b").all_inner_texts() == ["Reward over steps", "policy/clip_fraction"]
    assert charts.first.locator(".mark text").all_text_contents() == ["first", "second", "ceiling 9.7"]
    assert charts.first.locator("path.band").count() == 1
    charts.first.locator("svg").hover()
    assert charts.first.locator(".readout").inner_text().startswith("training reward 2.42 at 241.5 · held-out share")
    charts.last.locator("svg").click()
    assert page.locator("dialog svg").is_visible()
    assert errors == []
