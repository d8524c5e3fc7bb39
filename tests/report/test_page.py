"""The report of a complete run, of a run that has just started, and of runs with hostile text."""

import base64
import hashlib
import io
import json
import math
import re
import shutil

import pytest
from PIL import Image

from fake_run import write_new_run, write_run
from html_check import assert_self_contained, read
from retouch.records.folder import RunFolder, SampleRecord, Summary
from retouch.records.ownership import Owner
from retouch.types import Sample, Task
from retouch_view.report.page import write_report

HOSTILE = [
    "</title><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "\"'><script src=https://evil.example/x.js></script>",
    "</style></pre><!-- ]]> <svg/onload=alert(1)>", "&lt;already&gt; &amp; &#60;",
    "half \ud83d, nul \x00, escape \x1b[31m, \u202e turned, \u2028 line", "天空 العربية " + "a" * 500,
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "whole", steps=12, tasks=15, every=6)


@pytest.fixture
def started(tmp_path):
    return write_new_run(tmp_path / "started")


def charts_of(page):
    return [json.loads(figure["data-chart"]) for figure in page.all("figure", "chart")]


def page_of(folder):
    return write_report(folder.root).read_text(encoding="utf-8")


def test_a_report_is_one_self_contained_file_with_all_sections(run, tmp_path):
    path = write_report(run.root)
    assert path == run.root / "report.html"
    content = path.read_text(encoding="utf-8")
    page = read(content)
    assert_self_contained(page)
    titles = [title for title in page.text["h2"] if title]
    assert titles == [
        *("Reward", "Held-out tasks over training", "Held-out scores", "Training groups", "Metrics", "Time"),
        *("Checks before the first step", "Recipe", "Versions"),
    ]
    (policy,) = (meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    script = content.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    shutil.copytree(run.root, tmp_path / "copy")
    assert page_of(RunFolder(tmp_path / "copy")) == content, "equal folders have equal reports"


def test_the_images_of_the_report_equal_the_stored_samples(run):
    page = read(page_of(run))
    shown = [base64.b64decode((image["src"] or "").partition(",")[2]) for image in page.all("img")]
    for step in run.sample_steps():
        if step in (0, 1, 6, 12):
            for line in run.read_samples(step):
                assert (run.samples(step) / line["image"]).read_bytes() in shown
    assert all(image["class"] == "pixelated" for image in page.all("img"))
    assert all(Image.open(io.BytesIO(content)).size == (24, 24) for content in shown)
    assert len(page.all("article", "card")) == 15
    assert len(page.all("article", "strip")) == 2 * 4


def test_the_headline_and_the_table_show_the_values_of_the_files(run):
    summary = run.read_summary()
    words = read(page_of(run)).words
    assert f"from {summary.before:.2f} to {summary.after:.2f}" in words
    assert summary.gap_closed is not None
    assert f"{100 * summary.gap_closed:.0f} % of the gap to the ceiling of 9.70" in words
    first, *_, last = run.read_evals()
    for row in ("all", "complexity=3"):
        for column, decimals in (("overall", 2), ("exact", 3)):
            before, after = first["table"][row][column], last["table"][row][column]
            assert f"{before:.{decimals}f} →" in words
            assert f"{after:.{decimals}f}" in words
    assert "4 of 5 passed" in words
    assert "KL has a gradient" in words


def test_group_samples_are_sorted_by_reward_with_missing_scores_last(run):
    content = page_of(run)
    latest = content[content.index("<h2>Training groups") : content.index("<details><summary>The same at step 1")]
    for strip in latest.split('<article class="strip">')[1:]:
        figures = re.findall(r'<figcaption><b(?: class="quiet")?>(.*?)</b>', strip)
        rewards = [float(figure) for figure in figures if figure != "no score"]
        assert len(figures) == 10
        assert rewards == sorted(rewards, reverse=True)
        assert figures[len(rewards) :] == ["no score"] * (10 - len(rewards))
    assert latest.count("no score</b>") == 1
    assert latest.count("all equal, so all advantages are 0") >= 1


def test_the_report_of_an_unfinished_run_says_that_it_has_just_started_or_shows_the_steps_so_far(started):
    page = read(page_of(started))
    assert_self_contained(page)
    assert "has just started" in page.words
    assert page.all("img") == charts_of(page) == []
    missing = ("No steps.", "No evaluation on held-out tasks.", "No images of training samples are stored.", "No timings.")
    assert [words for words in missing if words not in page.words] == []
    started.append_metrics(1, "rl", {"reward/mean": 0.5, "policy/approx_kl": math.nan})
    started.write_eval(0, "heldout", table={"all": {"overall": 5.0, "n": 10}}, ci95={})
    page = read(page_of(started))
    assert "step 1 of 120" in page.words
    reward, evaluations, kl = (each["options"] for each in charts_of(page))
    captions = [each["caption"] for each in (reward, evaluations, kl)]
    assert captions == ["Training reward over steps", "Evaluations over steps", "policy/approx_kl"]
    assert reward["help"] == "training reward: mean of each step's samples"
    assert kl["help"].startswith("no value; ")
    assert (page.text["strong"], "after step 1 of 120." in page.words) == (["Stopped"], True), "no process owns the folder"
    owner = Owner(started.root)
    assert "in progress: step 1 of 120" in read(page_of(started)).words
    owner.close()
    started.log().write_text("2026-01-01 00:00:00,000  step 1/120\n2026-01-01 00:00:01,000  TooManyMissing: <b> are missing\n")
    page = read(page_of(started))
    assert "after step 1 of 120: TooManyMissing: <b> are missing" in page.words
    assert (page.text["strong"], len(page.all("strong", "bad"))) == (["Failed"], 1)


def test_a_metric_that_is_0_at_every_step_and_the_loss_of_a_policy_gradient_have_no_chart(started):
    record = started.read_recipe()
    for kind, losses in (("policy_gradient", 0), ("nft", 1)):
        started.write_recipe(record["recipe"] | {"objective": {"kind": kind}})
        started.metrics.unlink(missing_ok=True)
        for step in (1, 2):
            started.append_metrics(
                step, "rl", {"reward/mean": 0.5 * step, "policy/loss": 0.1, "missing/IF": 0.0, "group/size": 3.0}
            )
        page = read(page_of(started))
        assert "0 at every step: missing/IF." in page.words
        labels = [each["options"]["caption"] for each in charts_of(page)]
        assert [sum(name in label for label in labels) for name in ("group/size", "policy/loss", "missing")] == [1, losses, 0]


@pytest.mark.parametrize("part", ["metrics", "timings", "evals", "summary", "preflight", "samples"])
def test_a_report_is_written_if_a_part_of_the_run_folder_is_missing(run, part, tmp_path):
    copy = RunFolder(tmp_path / "copy")
    shutil.copytree(run.root, copy.root)
    where = copy.root / "samples" if part == "samples" else getattr(copy, part)
    shutil.rmtree(where) if where.is_dir() else where.unlink()
    assert_self_contained(read(page_of(copy)))
    copy.recipe.unlink()
    with pytest.raises(ValueError, match=r"has no recipe\.json"):
        write_report(copy.root)


def test_missing_damaged_or_outside_images_do_not_break_the_report(run, tmp_path):
    copy = RunFolder(tmp_path / "copy")
    shutil.copytree(run.root, copy.root)
    (tmp_path / "secret.png").write_bytes((copy.samples(0) / "heldout-0000-000.png").read_bytes())
    (copy.samples(0) / "heldout-0000-000.png").unlink()
    (copy.samples(0) / "heldout-0001-000.png").write_bytes(b"not a picture")
    (copy.samples(0) / "heldout-0002-000.png").write_bytes((copy.samples(0) / "heldout-0003-000.png").read_bytes()[:60])
    lines = copy.samples(0) / "samples.jsonl"
    lines.write_text(lines.read_text().replace("heldout-0004-000.png", "../../../secret.png"))
    words = read(page_of(copy)).words
    assert (words.count("file not found"), words.count("not readable"), words.count("no image")) == (1, 2, 1)


def hostile_run(root, word):
    """A run in which every text of external origin is ``word``."""
    folder = write_new_run(root, name=word)
    big = Image.linear_gradient("L").resize((500, 300)).convert("RGB")
    for step in (0, 1):
        task = Task(id=word, instruction=word, images=(big,), tags={word: word})
        item = SampleRecord(sample=Sample(task, big), group=0, slot=0, scores={word: 1.0}, reward=1.0, advantage=0.5)
        folder.write_samples(step, "heldout", [item])
        folder.write_samples(step, "group", [item])
        folder.write_eval(step, word, table={"all": {word: 1.0, "n": 30}, f"{word}={word}": {word: 1.0}}, ci95={})
    folder.append_metrics(1, word, {f"reward/{word}": 1.0, "reward/mean": 1.0})
    folder.append_metrics(2, "other", {word: 1.0})
    folder.append_timings(1, {f"time/{word}": 1.0})
    folder.write_preflight([{"name": word, "ok": False, "value": word, "limit": word, "text": word}])
    folder.write_summary(Summary(column=word, on=word, before=1.0, after=2.0, steps=1, cost={word: word}))
    return folder


@pytest.fixture(scope="module")
def plain_page(tmp_path_factory):
    return read(page_of(hostile_run(tmp_path_factory.mktemp("plain_page"), "plain")))


@pytest.mark.parametrize("word", HOSTILE)
def test_hostile_text_adds_no_elements_to_the_page(word, plain_page, tmp_path):
    page = read(page_of(hostile_run(tmp_path / "hostile", word)))
    assert_self_contained(page)
    assert [name for name, _ in page.elements] == [name for name, _ in plain_page.elements]
    printable = re.sub(r"[\x00-\x1f\ud83d]", "", word).split(",")[0]
    if printable:
        assert any(printable.strip() in text for text in page.text["p"])


def test_large_images_are_reduced(plain_page):
    page = plain_page
    sizes = {Image.open(io.BytesIO(base64.b64decode((image["src"] or "").partition(",")[2]))).size for image in page.all("img")}
    assert sizes == {(384, 230), (208, 125)}
    assert {(image["width"], image["height"]) for image in page.all("img")} == {("500", "300")}


@pytest.mark.parametrize(
    ("interval", "needed", "advised"),
    [((-0.2, 0.6), 48, True), ((0.2, 0.6), 48, False), ((-0.2, 0.6), 9000, False), ((-0.2, 0.6), None, False)],
)
def test_a_gain_that_may_be_chance_comes_with_the_number_of_tasks_that_would_be_enough(interval, needed, advised, started):
    summary = Summary(
        **{"column": "overall", "on": "tasks", "before": 5.0, "after": 5.2, "steps": 1},
        **{"gain_ci95": interval, "independent_tasks": 10, "needed_tasks": needed},
    )
    started.write_summary(summary)
    words = read(page_of(started)).words
    assert ("would be significant with about 48 independent tasks (here: 10;" in words) == advised
    assert ("independent tasks" in words) == advised


@pytest.mark.parametrize(
    ("interval", "lower_is_better", "said", "style"),
    [
        ((0.5, 1.5), False, "rose", "good"), ((-1.5, -0.5), False, "fell", "bad"), ((1.0, 1.0), False, "changed", ""),
        ((-0.5, 1.5), False, "statistically significant", ""), (None, False, "changed", ""),
        ((-0.6, -0.4), True, "fell", "good"), ((0.4, 0.6), True, "rose", "bad"),
    ],
)  # fmt: skip
def test_the_headline_says_rose_or_fell_only_if_the_interval_excludes_0(interval, lower_is_better, said, style, started):
    gain = 0.0 if interval is None else sum(interval) / 2
    kept = {"column": "overall", "on": "tasks", "before": 5.0, "after": 5.0 + gain, "steps": 1, "lower_is_better": lower_is_better}
    started.write_summary(Summary(**kept, gain_ci95=interval))
    page = read(page_of(started))
    assert said in page.words
    assert [len(page.all("strong", each)) for each in ("good", "bad")] == [style == "good", style == "bad"]


def test_the_chart_shows_reference_levels_only_for_the_same_tasks(started):
    summary = Summary(column="overall", on="compound tasks", before=5.0, after=6.0, steps=1, ceiling=9.7, best_of_k=7.0)
    started.write_summary(summary)
    for step, value in ((0, 5.0), (1, 6.0)):
        started.write_eval(step, "heldout", table={"all": {"overall": value + 2}, "headline": {"overall": value}}, ci95={})
    page = read(page_of(started))
    (chart,) = charts_of(page)
    assert chart["options"]["levels"] == [[9.7, "ceiling"], [7.0, "best of k, base"]]
    assert chart["series"][0] == {
        "name": "held-out overall",
        "points": [[0, 5, None, None], [1, 6, None, None]],
        "count": 2,
        "dots": True,
    }
    for step, value in ((0, 5.0), (1, 6.0)):
        started.write_eval(step, "heldout", table={"all": {"overall": value + 2}}, ci95={})
    assert charts_of(read(page_of(started)))[0]["options"]["levels"] == []


def test_a_signal_and_a_reward_that_equals_a_score_column_are_shown_once(started):
    for reward, titles in ((5.0, ["tasks", "overall", "IF"]), (5.5, ["tasks", "reward", "overall", "IF"])):
        started.write_eval(0, "heldout", table={"all": {"reward": reward, "overall": 5.0, "IF": 3.0}}, ci95={})
        assert read(page_of(started)).text["th"][: len(titles)] == titles
    started.append_metrics(1, "rl", {"reward/mean": 0.5, "reward/fault_fraction": 0.1, "reward/overall": 0.5})
    words = read(page_of(started)).words
    assert (words.count("reward/fault_fraction"), words.count("reward/overall")) == (1, 0), "the second equals the mean reward"


def test_a_decrease_beyond_both_intervals_is_shown_as_a_warning(started):
    for step, value in ((0, 9.0), (1, 8.0)):
        table = {"all": {"overall": value, "n": 99}, "complexity=1": {"IP": value, "n": 50}, "kind=rare": {"IP": value, "n": 3}}
        ci95 = {row: {"IP": (value - 0.2, value + 0.2)} for row in ("complexity=1", "kind=rare")}
        started.write_eval(step, "heldout", table=table, ci95={**ci95, "all": {"overall": (value - 0.6, value + 0.6)}})
    page = read(page_of(started))
    assert len(page.all("p", "warning")) == 1
    assert "IP (complexity 1) 9.00 to 8.00." in page.text["p"]


def test_an_increase_of_a_lower_is_better_score_is_shown_as_worse(started):
    for step, value in ((0, 1.0), (1, 2.0)):
        means, ends = ({"extra": each, "good": each} for each in (value, (value - 0.2, value + 0.2)))
        started.write_eval(step, "heldout", table={"all": {**means, "n": 99}}, ci95={"all": ends}, lower_is_better=["extra"])
    page = read(page_of(started))
    assert "extra 1.00 to 2.00." in page.text["p"]
    assert len(page.all("span", "bad")) == len(page.all("span", "good")) == 1
