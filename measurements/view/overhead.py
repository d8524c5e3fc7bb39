"""How much an open page slows a run: step times while Chromium shows the page and polls, and while it does not, in turn.

    python measurements/view/overhead.py [--steps 120] [--block 10] [--page run|vote]

During a playground run, a page is opened and closed every ``--block`` steps: the page of the run, or the voting page. On the voting
page, a vote is given every second, and the page polls when no pair is left. The step in which the page changes is left out. Needs
the packages `playwright` and `chromium`.
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
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from retouch.records.folder import RunFolder
from retouch.types import Task
from retouch_view.votes.queue import VoteQueue

RECIPE = Path(__file__).parents[2] / "recipes" / "playground" / "grpo.jsonnet"
SMALL = (
    "tasks_per_step=2",
    "group_size=4",
    "eval.every=0",
    "eval.tasks=4",
    "samples.every=10",
    "checkpoints.every=0",
    "device=cpu",
)
PAIRS = 40
SHOWS = {"run": ("#/run/measured", ".facts"), "vote": ("#/vote/measured,live", ".vote-bar")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--block", type=int, default=10)
    parser.add_argument("--page", choices=tuple(SHOWS), default="run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        folder = RunFolder(Path(name) / "measured")
        words = [f"out={name}", "name=measured", f"steps={arguments.steps}", *SMALL]
        command = [sys.executable, "-m", "retouch", "train", str(RECIPE), *(part for word in words for part in ("--set", word))]
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as trainer:
            try:
                with viewing(Path(name), "--vote") as address:
                    page = browser.new_page(viewport={"width": 1200, "height": 800})
                    page.goto(address)
                    page.evaluate("localStorage.setItem('retouch voter', 'benchmark')")
                    while not folder.read_timings():
                        time.sleep(0.5)
                    put_pairs(VoteQueue(folder.root / "queue"))
                    opened = follow(page, address.partition("/?")[0], folder, trainer, arguments)
            finally:
                trainer.kill()
        browser.close()
        report(folder, opened)
    return 0


def put_pairs(queue: VoteQueue) -> None:
    """Put `PAIRS` pairs of images into the queue."""
    for number in range(PAIRS):
        images = [Image.effect_noise((64, 64), 30 + side).convert("RGB") for side in range(2)]
        queue.put(Task(f"task {number}", "make it red", images=(Image.new("RGB", (64, 64), "white"),)), images, pairs=1)


def follow(
    page: Page, base: str, folder: RunFolder, trainer: "subprocess.Popen[bytes]", arguments: argparse.Namespace
) -> dict[int, bool | None]:
    """Open the page in every other block of steps until the run ends.

    Returns, for each step, whether the page was open; None for a step in which it was opened or closed.
    """
    opened: dict[int, bool | None] = {}
    before = None
    place, sign = SHOWS[arguments.page]
    voted = time.monotonic()
    while trainer.poll() is None:
        step = len(folder.read_timings()) + 1
        showing = (step - 1) // arguments.block % 2 == 1
        if showing != before:
            page.goto(f"{base}/{place}" if showing else "about:blank")
            if showing:
                page.locator(sign).wait_for()
            before = showing
            opened[step] = None
        else:
            opened.setdefault(step + 1, showing)
        if showing and arguments.page == "vote" and time.monotonic() - voted > 1:
            page.keyboard.press("ArrowLeft")
            voted = time.monotonic()
        time.sleep(0.05)
    return opened


def report(folder: RunFolder, opened: dict[int, bool | None]) -> None:
    """Print the median step times with and without the page, and their ratio."""
    seconds = {line["step"]: line["time/step"] for line in folder.read_timings()}
    with_page = [value for step, value in seconds.items() if opened.get(step) is True]
    without = [value for step, value in seconds.items() if opened.get(step) is False]
    medians = statistics.median(with_page), statistics.median(without)
    print(f"a step with the page open: {medians[0]:.3f} s (median of {len(with_page)})")
    print(f"a step without it:         {medians[1]:.3f} s (median of {len(without)})")
    print(f"ratio of the medians: {medians[0] / medians[1]:.3f}")


if __name__ == "__main__":
    sys.exit(main())
