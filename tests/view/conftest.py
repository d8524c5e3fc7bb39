"""Fixtures: run folders as a trainer writes them, a client with the page's token, and the page in Debian's Chromium."""

import shutil
import threading
import time

import pytest
import uvicorn
from PIL import Image
from starlette.testclient import TestClient

from retouch.records.folder import RunFolder, SampleRecord, Summary
from retouch.records.ownership import Owner
from retouch.types import Sample, Task
from retouch_serve.front import bounded_config
from retouch_view.live.app import LIMITS, build_app

TOKEN = "a-token-of-the-tests"
WIDE_AND_PHONE = pytest.mark.parametrize(
    "tab", [{}, {"viewport": {"width": 390, "height": 800}, "color_scheme": "dark"}], indirect=True, ids=["wide", "phone"]
)


def fits(page):
    """Whether the page is no wider than its window."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))


@pytest.fixture
def write_run(tmp_path):
    def write(name, *, steps=4, of=4, instruction="make it red"):
        folder = RunFolder(tmp_path / "runs" / name)
        folder.write_recipe({"name": name, "steps": of, "tasks_per_step": 2, "group_size": 3})
        for step in range(1, steps + 1):
            folder.append_metrics(step, "main", {"reward/mean": 0.1 * step, "policy/loss": float("nan")})
            folder.append_timings(step, {"time/step": 2.0, "time/rollout": 1.5})
        for step in {0, steps}:
            task = Task("task/1", instruction, images=(Image.new("RGB", (300, 200), "white"),))
            record = SampleRecord(
                sample=Sample(task, Image.new("RGB", (300, 200), "red")), group=0, slot=0,
                scores={"share": 0.25 * step, "missing": float("nan")}, reward=0.25 * step,
            )  # fmt: skip
            folder.write_samples(step, "heldout", [record])
            folder.write_eval(step, "heldout", table={"all": {"n": 1, "share": 0.25 * step}}, ci95={})
        if steps == of:
            folder.write_summary(Summary(column="share", on="held-out tasks", before=0.0, after=1.0, steps=of))
        return folder

    return write


@pytest.fixture
def running(write_run):
    folder = write_run("one", steps=2, of=9)
    owner = Owner(folder.root)
    yield folder
    owner.close()


@pytest.fixture
def anonymous(tmp_path):
    """A browser that was not given the token."""
    (tmp_path / "runs").mkdir(exist_ok=True)
    with TestClient(build_app(tmp_path / "runs", token=TOKEN, poll_seconds=0.02), base_url="http://127.0.0.1:8765") as client:
        yield client


@pytest.fixture
def browser(anonymous):
    assert anonymous.get(f"/?token={TOKEN}").status_code == 200
    return anonymous


@pytest.fixture(scope="module")
def chromium():
    """Debian's Chromium, driven by Playwright; the tests are skipped where one of them is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("needs chromium: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def options():
    """Options of the page, passed to ``build_app``; test files that need others override this fixture."""
    return {}


@pytest.fixture
def address(tmp_path, options):
    """A server of the page."""
    (tmp_path / "runs").mkdir(exist_ok=True)
    app = build_app(tmp_path / "runs", token=TOKEN, poll_seconds=0.1, **options)
    server = uvicorn.Server(bounded_config(app, LIMITS, port=0, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(timeout=30)


@pytest.fixture
def tab(chromium, address, request):
    """A tab that has the token. Any error in the page fails the test."""
    context = chromium.new_context(**{"viewport": {"width": 1200, "height": 800}, **getattr(request, "param", {})})
    page = context.new_page()
    page.set_default_timeout(10_000)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(f"{address}/?token={TOKEN}")
    yield page
    context.close()
    assert errors == []
