"""Measures how fast the pages of `retouch view` are with 200 runs and 50 000 samples, in Debian's Chromium.

    python measurements/view/pages.py [--runs 200] [--samples 50000]

Needs the packages `playwright` and `chromium`. Times include the browser's requests, layout and painting.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from retouch.records.folder import RunFolder

STEPS = 500
SAMPLES_PER_STEP = 1000
READING_SECONDS = 5  # the time that a user needs to open the printed address
SEES_A_SAMPLE = """() => [...document.querySelectorAll('.sample')].some((each) => {
  const { top } = each.getBoundingClientRect(); return top > -240 && top < 400; })"""


def write_runs(root: Path, count: int) -> None:
    """Write ``count`` run folders with ``STEPS`` steps of 21 metrics each."""
    for number in range(count):
        folder = RunFolder(root / f"run-{number:03d}")
        folder.write_recipe({"name": folder.name, "steps": STEPS, "tasks_per_step": 8, "group_size": 8})
        metrics = [
            {"step": step, "phase": "main", "reward/mean": 0.01 * step, **{f"policy/metric{k}": 0.1 * step for k in range(20)}}
            for step in range(1, STEPS + 1)
        ]
        _write_lines(folder.metrics, metrics)
        _write_lines(folder.timings, [{"step": step, "time/step": 1.0} for step in range(1, STEPS + 1)])


def write_samples(folder: RunFolder, count: int) -> None:
    """Write ``count`` samples, ``SAMPLES_PER_STEP`` per step; the samples of a step share an image of 512 x 512 px."""
    for start in range(0, count, SAMPLES_PER_STEP):
        step = start // SAMPLES_PER_STEP * 10
        folder.samples(step).mkdir(parents=True)
        Image.effect_noise((512, 512), 60).convert("RGB").save(folder.samples(step) / "image.png")
        common = {"step": step, "set": "heldout", "slot": 0, "image": "image.png", "source": None, "target": None, "tags": {}}
        lines = [
            {"task": f"task {k}", "instruction": f"make image {k} red", "group": k, "scores": {"share": k / 1000}, "reward": 0.1}
            for k in range(min(SAMPLES_PER_STEP, count - start))
        ]
        _write_lines(folder.samples(step) / "samples.jsonl", [{**common, "advantage": None, **line} for line in lines])


def _write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@contextmanager
def viewing(root: Path, *options: str) -> Iterator[str]:
    """Start `retouch view` on the folder ``root``. Gives the address that the command prints."""
    command = [sys.executable, "-m", "retouch", "view", str(root), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split("open ")[1].strip()
        finally:
            process.terminate()


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def measure(page: Page, address: str, samples: int) -> None:
    """Time the table of runs, the first samples, and jumps among all samples; print the times."""
    base = address.partition("/?")[0]

    def open_runs() -> None:
        page.goto(address)
        page.locator("tbody tr").first.wait_for()

    def open_samples() -> None:
        page.goto(f"{base}/#/samples/run-000")
        page.locator(".sample").first.wait_for()

    def scroll(pixels: int) -> None:
        page.evaluate(f"window.scrollTo(0, {pixels})")
        page.wait_for_function(SEES_A_SAMPLE)

    print(f"the table of runs: {seconds(open_runs):.2f} s, again {seconds(open_runs):.2f} s")
    print(f"the first samples: {seconds(open_samples):.2f} s")
    page.get_by_label("Step").select_option("")
    page.get_by_text(f"{samples} samples").wait_for()
    height = int(page.evaluate("document.documentElement.scrollHeight"))
    times = [seconds(lambda pixels=height * part // 40: scroll(pixels)) for part in range(1, 39)]  # type: ignore[misc]
    median, longest = 1000 * statistics.median(times), 1000 * max(times)
    print(f"a jump to another place among {samples} samples: median {median:.0f} ms, at most {longest:.0f} ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--samples", type=int, default=50_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        root = Path(name)
        write_runs(root, arguments.runs)
        write_samples(RunFolder(root / "run-000"), arguments.samples)
        with viewing(root) as address:
            time.sleep(READING_SECONDS)
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            measure(browser.new_page(viewport={"width": 1200, "height": 800}), address, arguments.samples)
            browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
