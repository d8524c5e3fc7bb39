"""Damaged and hostile runs beside a good one: each shows its own fault, and the page, the report and the ledger go on."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from conftest import TOKEN
from starlette.testclient import TestClient

from damaged_runs import FORMS, whole_run
from retouch.records.files import strict_json
from retouch_view.ledger import LedgerView
from retouch_view.live.app import build_app
from retouch_view.report.page import run_page
from retouch_view.report.tables import comparison
from retouch_view.votes.log import logs_of
from retouch_view.votes.statistics import summarise
from slow_params import slow_except

SECONDS = 20.0
_FAST = ("digits", "fifo", "alarms", "deep: recipe", "a ledger", "a terabyte", "a step")
FAST = [form for form in FORMS if form.startswith(_FAST)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return whole_run(tmp_path_factory.mktemp("whole") / "good").root


def readers(good, root):
    """What the commands ``report``, ``compare``, ``ledger`` and ``votes`` read of a run."""
    return [
        lambda: run_page(root), lambda: comparison([good, root]), lambda: LedgerView.open(root),
        lambda: list(LedgerView.open(root).query("SELECT * FROM answers")), lambda: summarise(logs_of(root)),
    ]  # fmt: skip


@pytest.mark.parametrize("form", slow_except(FAST, FORMS))
def test_point_3_4_a_damaged_run_shows_its_fault_and_breaks_nothing_else(form, whole, tmp_path):
    good, bad = (Path(shutil.copytree(whole, tmp_path / "runs" / name)) for name in ("good", "bad"))
    FORMS[form](bad)
    began = time.monotonic()
    with TestClient(build_app(tmp_path / "runs", token=TOKEN), base_url="http://127.0.0.1:8765") as client:
        client.get(f"/?token={TOKEN}")
        for _ in range(2):
            rows = {row["name"]: row for row in client.get("/api/runs").json()["runs"]}
            assert (rows["good"]["state"], rows["good"]["step"], rows["good"]["faults"]) == ("alarm", 4, [])
            assert rows.get("bad", {"state": "no run"})["state"] in ("alarm", "stopped", "unreadable", "running", "no run")
        paths = ("", "/samples", "/answers?set=heldout&step=4", "/events?generation=9")
        for path in paths[: -1 if "bad" in rows else 0]:
            assert client.get(f"/api/runs/bad{path}").status_code in (200, 409)
        assert client.get("/thumbnails/bad/4/heldout-0000-000.png").status_code in (200, 404, 409)
        assert client.get("/api/votes/bad/results").status_code in (200, 404, 409)
        assert client.get("/api/runs/good").status_code == 200
    for read in readers(good, bad):
        with suppress(OSError, ValueError):  # what the commands print as a message
            read()
    assert time.monotonic() - began < SECONDS


@pytest.mark.parametrize(
    "text",
    ["NaN", "-Infinity", "1e999", "9" * 301, '{"a": 1, "a": 2}', "[" * 101 + "]" * 101, '{"a":' * 5000, b'"\xff"', "", "[1] 2"],
    ids=lambda text: repr(text)[:20],
)
def test_point_3_4_json_that_is_ambiguous_or_unbounded_is_refused(text):
    with pytest.raises(ValueError, match=r".+"):
        strict_json(text)
    assert strict_json("[" * 100 + "]" * 100)
    assert strict_json('{"a": [1.5e-300, -123456789012345678901, "\\ud800"]}')["a"][0] == 1.5e-300


@pytest.mark.slow
def test_point_3_4_sigterm_ends_the_page_while_a_reader_hangs(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "runs" / "good")
    script = (
        "import sys, time, retouch_view.live.runs as live\n"
        "live.LiveRun.overview = lambda run: time.sleep(600)\n"
        "from retouch_view.cli import view\nfrom pathlib import Path\n"
        "view(Path(sys.argv[1]), port=0, report=lambda line: print(line, flush=True))\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "runs")], stdout=subprocess.PIPE, text=True) as process:
        address = process.stdout.readline().split("open ")[1].strip()
        assert httpx.get(address, timeout=60).status_code == 303
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)
    assert time.monotonic() - began < 15
    assert process.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)


def test_point_3_4_the_page_of_all_runs_is_whole_next_to_every_damaged_run(whole, tmp_path, address, tab):
    shutil.copytree(whole, tmp_path / "runs" / "good")
    for number, change in enumerate(FORMS.values()):
        change(Path(shutil.copytree(whole, tmp_path / "runs" / f"damaged-{number:03d}")))
    tab.goto(address)
    tab.reload()
    tab.wait_for_selector("tbody tr:nth-child(100)", timeout=120_000)
    row = tab.locator("tbody tr", has_text="good")
    assert "4 of 9" in row.inner_text()
    assert "unreadable" in tab.locator("tbody").inner_text()
    if folder := os.environ.get("RETOUCH_SCREENSHOTS"):
        tab.screenshot(path=f"{folder}/damaged-runs.png")
    row.get_by_role("link").click()
    tab.wait_for_selector("h1:has-text('good')")
    assert tab.locator(".charts figure, .charts svg").count() > 0
    if folder:
        tab.screenshot(path=f"{folder}/good-run.png")
