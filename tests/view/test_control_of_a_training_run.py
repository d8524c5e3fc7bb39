"""The control buttons of the page, on a run that trains in a separate process."""

import json
import signal
import subprocess
import time

import pytest

import tiny_recipes
from retouch.records.control import read_requests
from retouch.records.folder import RunFolder
from warm_python import python

pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
STEPS = 2000


@pytest.fixture
def options(request):
    return {"control": getattr(request, "param", True)}


@pytest.fixture
def trainer(tmp_path):
    """`retouch train` of a run that takes longer than the test."""
    keys = {"out": str(tmp_path / "runs"), "device": "cpu", "trackers": [], "steps": STEPS, "samples": {"every": 0}}
    file = tmp_path / "small.json"
    file.write_text(json.dumps({**tiny_recipes.SMALL, **keys, "checkpoints": {"every": 0}}))
    command = [python(), "-m", "retouch", "train", str(file)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def opened(tab, address):
    """Open the page of the run once it has made a step."""
    tab.set_default_timeout(120_000)
    tab.goto(f"{address}/#/")
    tab.get_by_role("link", name="small", exact=True).click()
    tab.get_by_role("img", name="reward/mean over steps").wait_for()


@pytest.mark.slow
def test_training_run_executes_control_requests_at_the_end_of_a_step(trainer, tab, address, tmp_path):
    folder = RunFolder(tmp_path / "runs" / "small")
    opened(tab, address)

    def answered(press, words):
        """Make a request, and return the step at whose end the run answered it."""
        before = len(folder.read_metrics())
        press()
        tab.get_by_role("cell", name=words).wait_for()
        request = list(read_requests(folder).values())[-1]
        assert request.taken
        assert request.step is not None
        assert before <= request.step <= len(folder.read_metrics())
        return request.step

    assert not list(folder.checkpoints.glob("step-*"))
    saved = answered(tab.get_by_role("button", name="Save a checkpoint").click, "saved a checkpoint of step")
    assert [path.name for path in folder.checkpoints.glob("step-*")] == [f"step-{saved:06d}"]
    tab.get_by_label("steps between samples").fill("2")
    changed = answered(tab.get_by_role("button", name="Change").click, "samples are stored every 2 steps from now on")
    tab.on("dialog", lambda dialog: dialog.accept())
    stopped = answered(tab.get_by_role("button", name="Stop after this step").click, "stopped after step")
    assert trainer.wait(60) == 128 + signal.SIGTERM  # as after a signal: the run is not done
    assert len(folder.read_metrics()) == stopped < STEPS
    assert (folder.checkpoints / f"step-{stopped:06d}").is_dir()
    stored = [step for step in folder.sample_steps() if any(line["set"] == "group" for line in folder.read_samples(step))]
    assert stored == [step for step in range(changed, stopped + 1) if step % 2 == 0]
    tab.get_by_text("stopped", exact=True).wait_for()
    assert not tab.get_by_role("button", name="Stop after this step").is_visible()


@pytest.mark.slow
@pytest.mark.parametrize("options", [False], indirect=True)
def test_control_request_without_the_option_is_rejected_and_training_continues(trainer, tab, address, tmp_path):
    opened(tab, address)
    assert tab.get_by_role("heading", name="Control").count() == 0
    headers = {"Origin": address, "Content-Type": "application/json"}
    reply = tab.request.post(f"{address}/api/runs/small/control", headers=headers, data='{"action": "stop"}')
    assert reply.status == 405
    folder = RunFolder(tmp_path / "runs" / "small")
    assert not folder.control.exists()
    before = len(folder.read_metrics())
    deadline = time.monotonic() + 120
    while len(folder.read_metrics()) <= before + 1 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(folder.read_metrics()) > before + 1
    assert trainer.poll() is None
