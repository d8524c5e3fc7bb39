"""What an open page costs a run: the time of its steps while Chromium shows the page and polls, and while it does not, in turn.

    python benchmarks/view/overhead.py [--steps 120] [--block 10]

A playground run trains on one core's threads; its page is opened and closed every ``--block`` steps. The first step after each
change is left out. Needs the packages `playwright` and `chromium`.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pages import viewing
from playwright.sync_api import Page, sync_playwright

from retouch.records.folder import RunFolder

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.jsonnet"
SMALL = (
    "tasks_per_step=2",
    "group_size=4",
    "eval.every=0",
    "eval.tasks=4",
    "samples.every=10",
    "checkpoints.every=0",
    "device=cpu",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--block", type=int, default=10)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        folder = RunFolder(Path(name) / "measured")
        words = [f"out={name}", "name=measured", f"steps={arguments.steps}", *SMALL]
        command = [sys.executable, "-m", "retouch", "train", str(RECIPE), *(part for word in words for part in ("--set", word))]
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as trainer:
            try:
                with viewing(Path(name)) as address:
                    page = browser.new_page(viewport={"width": 1200, "height": 800})
                    page.goto(address)
                    opened = follow(page, f"{address.partition('/?')[0]}/#/run/measured", folder, trainer, arguments.block)
            finally:
                trainer.kill()
        browser.close()
        report(folder, opened)
    return 0


def follow(page: Page, address: str, folder: RunFolder, trainer: "subprocess.Popen[bytes]", block: int) -> dict[int, bool]:
    """Open the page in every other block of steps until the run ends. Returns, for each step, whether the page was open."""
    opened: dict[int, bool] = {}
    before = None
    while trainer.poll() is None:
        step = len(folder.read_timings()) + 1
        showing = (step - 1) // block % 2 == 1
        if showing != before:
            page.goto(address if showing else "about:blank")
            if showing:
                page.locator(".facts").wait_for()
            before = showing
        else:  # a step in which the page changed counts for neither
            opened.setdefault(step + 1, showing)
        time.sleep(0.05)
    return opened


def report(folder: RunFolder, opened: dict[int, bool]) -> None:
    """Print the medians, and their ratio."""
    seconds = {line["step"]: line["time/step"] for line in folder.read_timings()}
    with_page = [value for step, value in seconds.items() if opened.get(step) is True]
    without = [value for step, value in seconds.items() if opened.get(step) is False]
    medians = statistics.median(with_page), statistics.median(without)
    print(f"a step with the page open: {medians[0]:.3f} s (median of {len(with_page)})")
    print(f"a step without it:         {medians[1]:.3f} s (median of {len(without)})")
    print(f"ratio of the medians: {medians[0] / medians[1]:.3f}")


if __name__ == "__main__":
    sys.exit(main())
