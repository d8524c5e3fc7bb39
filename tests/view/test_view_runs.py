"""The API for runs that are finished, running, stopped or damaged; samples; and lines that a trainer appends."""

import io
import json
import os
import sqlite3

import httpx
import pytest
from conftest import TOKEN
from PIL import Image

from retouch import cli
from retouch.records.folder import RunFolder
from retouch.records.ownership import Owner
from retouch.rewards.ledger.database import Database, read_usage
from retouch_judge.cache import AnswerCache, JudgeCall
from retouch_view.live.runs import LineTail, LiveRun, UsageTail
from retouch_view.report.page import run_page


def test_all_runs_of_a_folder_are_listed_with_their_state(write_run, browser, tmp_path):
    write_run("finished")
    words = {
        "stopped": "stopped after step 2; run the same command to continue",
        "failed": "KeyError: 'a'\nTraceback (most recent call last):\n  File",
        "refused": "ValueError: the reward returned 3 scores for 4 images",
    }
    for name, last in words.items():
        text = f"2026-01-01 00:00:00,000  step\n2026-01-01 00:00:00,000  {last}\n"
        write_run(name, steps=0 if name == "refused" else 2).log().write_text(text)
    write_run("alarm", steps=3).write_alarm({"step": 3, "back_to": None, "alarms": [{"rule": "gap", "text": "a rule's words"}]})
    running = write_run("running", steps=3)
    (tmp_path / "runs" / "not-a-run").mkdir()
    owner = Owner(running.root)
    try:
        found = {run["name"]: run for run in browser.get("/api/runs").json()["runs"]}
    finally:
        owner.close()
    assert {name: run["state"] for name, run in found.items()} == {
        **{name: name for name in ("alarm", "finished", "running", "stopped", "failed")},
        "refused": "failed",
    }
    assert found["finished"]["rewards"] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert (found["finished"]["step"], found["finished"]["steps"]) == (4, 4)
    assert (found["running"]["seconds_per_step"], found["running"]["seconds_left"]) == (2.0, 2.0)
    assert found["stopped"]["seconds_left"] is None
    assert [found[name]["reason"] for name in words] == [words["stopped"], "KeyError: 'a'", words["refused"]]
    assert found["alarm"]["reason"] == "a rule's words"
    assert found["finished"]["summary"]["gap_closed"] is None


def test_total_steps_are_summed_over_phases_or_read_from_the_summary(write_run):
    folder = write_run("one")
    for phases, total in (([{"steps": 1}, {"steps": 3}], 4), ([{"steps": 2}, {"steps": 3}], 5), ([{"steps": None}], 4)):
        folder.write_recipe({"name": "one", "steps": None, "phases": phases})
        found = LiveRun(folder.root).overview()
        assert (found["steps"], found["state"]) == (total, "finished" if total == 4 else "stopped")
    folder.summary.unlink()
    assert LiveRun(folder.root).overview()["steps"] is None


def test_catalogue_of_a_single_run_folder_lists_that_run(write_run):
    from retouch_view.live.runs import Catalogue

    assert list(Catalogue(write_run("only").root).runs()) == ["only"]


def test_run_endpoint_returns_metrics_evals_sample_steps_recipe_benchmark_results_and_alarms(write_run, browser):
    folder = write_run("one")
    table = {"all": {"overall": {"mean": 6.0, "low": 5.0, "high": 7.0, "n": 4}}}
    for step in (0, 4):
        folder.write_suite(
            step, "playground", {"headline": "overall", "table": table, "missing": 0}, alarm="it fell" if step else None
        )
    with folder.suites.open("a") as file:
        file.write('{"step": 5, "suite": "playground", "table": 3}\n{"step": 6}\n')
    found = browser.get("/api/runs/one").json()
    assert [line["step"] for line in found["metrics"]] == [1, 2, 3, 4]
    assert found["metrics"][0]["policy/loss"] is None
    assert [line["step"] for line in found["evals"]] == found["sample_steps"] == [0, 4]
    assert found["recipe"]["group_size"] == 3
    suites = [(line["step"], line["alarm"], line["table"]["all"]["overall"]["mean"]) for line in found["suites"]]
    assert suites == [(0, None, 6.0), (4, "it fell", 6.0)]
    assert browser.get("/api/runs/other").status_code == 404


def test_live_run_returns_appended_lines_and_starts_over_after_truncation(write_run):
    folder = write_run("one", steps=2)
    run = LiveRun(folder.root)
    first = run.since(0, 0, 0)
    assert [line["step"] for line in first["metrics"]] == [1, 2]
    folder.append_metrics(3, "main", {"reward/mean": 0.5})
    new = run.since(first["generation"], 2, 2)
    assert ([line["step"] for line in new["metrics"]], new["timings"]) == ([3], [])
    assert (new["run"]["step"], new["run"]["reward"]) == (3, 0.5)
    folder.truncate_after(1)  # the run resumed from an earlier checkpoint
    again = run.since(first["generation"], 3, 2)
    assert again["generation"] != first["generation"]
    assert [line["step"] for line in again["metrics"]] == [1]


def test_event_stream_sends_only_new_lines(write_run, address):
    """Over a real server, because older test clients of Starlette wait for the end of the response."""
    write_run("one")
    events = "/api/runs/one/events?generation=0&metrics=3&timings=4"
    with httpx.Client(base_url=address) as client:
        client.get(f"/?token={TOKEN}")
        with client.stream("GET", events) as reply:
            content_type = reply.headers["content-type"]
            line = next(line for line in reply.iter_lines() if line.startswith("data: "))
    assert content_type.startswith("text/event-stream")
    found = json.loads(line.removeprefix("data: "))
    assert ([each["step"] for each in found["metrics"]], found["timings"]) == ([4], [])


def test_judge_usage_follows_the_ledger_and_is_kept_if_the_ledger_is_damaged(write_run):
    folder = write_run("one")
    run = LiveRun(folder.root)
    assert run.overview()["judges"] is None
    paid = {"image": "", "judge": "j", "scores": None, "rubric": "r", "input_tokens": 1000, "output_tokens": 10}
    database = Database(folder.root / "ledger.sqlite")
    assert run.overview()["judges"] is None
    AnswerCache(database).record([JudgeCall(content="a", **paid)])
    assert run.overview()["judges"] == {
        **{"requests": 1, "retries": 0, "input_tokens": 1000, "output_tokens": 10, "cost": None, "unpriced": 1}
    }
    AnswerCache(database).record([JudgeCall(content="b", cost=0.25, **paid), JudgeCall(content="c", cost=0.5, attempts=3, **paid)])
    found = run.overview()["judges"]
    assert (found["requests"], found["retries"], found["cost"], found["unpriced"]) == (5, 2, 0.75, 1)
    database.close()
    assert run.overview()["judges"] == found
    (folder.root / "ledger.sqlite").write_bytes(b"damaged" * 1000)
    assert run.overview()["judges"] == found
    (folder.root / "ledger.sqlite").unlink()
    assert run.overview()["judges"] is None


def test_locked_ledger_is_read_again_at_the_next_update(tmp_path, monkeypatch):
    database = Database(tmp_path / "ledger.sqlite")
    AnswerCache(database).record([JudgeCall(content="a", image="", judge="j", rubric="r", scores=None)])
    database.close()
    tail, reading = UsageTail(tmp_path / "ledger.sqlite"), read_usage

    def locked(*_, **__):
        raise sqlite3.OperationalError("database is locked")

    monkeypatch.setattr("retouch_view.live.runs.read_usage", locked)
    assert tail.update().requests == 0
    monkeypatch.setattr("retouch_view.live.runs.read_usage", reading)
    assert [tail.update().requests for _ in range(2)] == [1, 1]


def test_a_line_that_is_being_written_is_read_when_it_is_complete(tmp_path):
    path = tmp_path / "lines.jsonl"
    tail = LineTail(path)
    assert (tail.update(), tail.lines) == (False, [])
    path.write_text('{"a": 1}\n{"a": ')
    assert (tail.update(), tail.lines) == (False, [{"a": 1}])
    with path.open("a") as file:
        file.write('2}\nnot json\n[1]\n{"a": 3}\n')
    tail.update()
    assert (tail.lines, tail.damaged) == ([{"a": 1}, {"a": 2}, {"a": 3}], 2)
    path.write_text('{"a": 9}\n')
    assert (tail.update(), tail.lines, tail.damaged) == (True, [{"a": 9}], 0)
    path.unlink()
    assert (tail.update(), tail.lines) == (True, [])


def test_samples_are_filtered_sorted_and_paged(write_run, browser):
    write_run("one", instruction="Make it RED")
    for query, total in (
        ("", 2), ("set=group", 0), ("search=red", 2), ("search=blue", 0), ("task=task/1&limit=99999999999999", 2),
    ):  # fmt: skip
        assert browser.get(f"/api/runs/one/samples?{query}").json()["total"] == total
    for query, steps in (
        ("step=4", [4]), ("sort=share:desc", [4, 0]), ("sort=missing:desc", [0, 4]), ("sort=share:desc&offset=1&limit=1", [0]),
    ):  # fmt: skip
        assert [line["step"] for line in browser.get(f"/api/runs/one/samples?{query}").json()["samples"]] == steps


def test_images_and_thumbnails_are_served_as_png(write_run, browser):
    write_run("one")
    (line,) = browser.get("/api/runs/one/samples?step=4").json()["samples"]
    whole, small = (browser.get(f"/{kind}/one/4/{line['image']}") for kind in ("images", "thumbnails"))
    assert whole.headers["content-type"] == small.headers["content-type"] == "image/png"
    sizes = []
    for reply in (whole, small):
        with Image.open(io.BytesIO(reply.content)) as image:
            sizes.append(image.size)
    assert sizes == [(300, 200), (192, 128)]


@pytest.mark.parametrize(
    "file", ["recipe.json", "metrics.jsonl", "timings.jsonl", "evals.jsonl", "summary.json", "alarm.json", "preflight.json"]
)
@pytest.mark.parametrize(
    "damage",
    [b"", b"\0\xff{", b"[" * 100_000, b'"text"\n', b'{"step": "x"}\n', None],
    ids=["empty", "binary", "deep", "text", "type", "gone"],
)
def test_damaged_run_files_do_not_break_the_page(write_run, browser, file, damage):
    folder = write_run("one")
    if damage is None:
        (folder.root / file).unlink(missing_ok=True)
    else:
        (folder.root / file).write_bytes(damage)
    (line,) = browser.get("/api/runs/one/samples?step=4").json()["samples"]
    (folder.samples(4) / line["image"]).write_bytes(b"not an image")
    assert browser.get("/api/runs").json()["runs"][0]["name"] == "one"
    assert browser.get("/api/runs/one").status_code == 200
    assert browser.get(f"/thumbnails/one/4/{line['image']}").status_code == 404


def test_new_and_renamed_runs_are_listed(browser, write_run, tmp_path):
    assert browser.get("/api/runs").json()["runs"] == []
    write_run("later", steps=0)
    (run,) = browser.get("/api/runs").json()["runs"]
    assert (run["name"], run["state"], run["step"], run["rewards"]) == ("later", "waiting", 0, [])
    os.rename(tmp_path / "runs" / "later", tmp_path / "runs" / "renamed")
    assert browser.get("/api/runs/later").status_code == 404
    assert [each["name"] for each in browser.get("/api/runs").json()["runs"]] == ["renamed"]


def test_reading_a_run_does_not_modify_its_files(write_run, browser):
    folder = write_run("one")

    def state():
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.root.rglob("*")}

    before = state()
    for address in ("/api/runs", "/api/runs/one", "/api/runs/one/samples"):
        assert browser.get(address).status_code == 200
    assert state() == before
    assert isinstance(RunFolder(folder.root).read_recipe(), dict)


def test_report_writes_the_page_and_rejects_a_folder_that_is_no_run(write_run, tmp_path, capsys):
    folder = write_run("one")
    assert cli.main(["report", str(folder.root)]) == 0
    assert capsys.readouterr().out.strip() == str(folder.report)
    assert folder.report.read_text(encoding="utf-8") == run_page(folder.root)
    assert cli.main(["report", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
