"""Measures a stream of a million rows: time to the first step, memory, rows across kills, and how long a step waits for its tasks.

    python measurements/data/streams.py start --rows 1000000     # seconds to the first step, and memory
    python measurements/data/streams.py kills --rows 1000000     # a pass that is killed six times: is each row drawn once?
    python measurements/data/streams.py wait                     # 1024 px on two cores: the wait of a step for its tasks
    python measurements/data/streams.py check --rows 3000        # the first and the second check of a folder

The rows are synthetic, in parquet files: an instruction with the number of the row, and a small JPEG (``wait``: two of 1024 x 1024
px). They are written to ``--folder`` if it does not exist. No model is loaded: a step only draws its tasks.
"""

import argparse
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROWS_PER_FILE, ROWS_PER_GROUP = 20_000, 1000
COUNT = 64
"""Tasks per step, except in ``wait``."""
HELD_OUT = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("start", "kills", "wait", "check", "_start", "_read"))
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--steps", type=int, default=200, help="in `start`: steps after the first one; in `wait`: all steps")
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of a simulated step in `wait`")
    arguments = parser.parse_args()
    pixels = 1024 if arguments.what == "wait" else 32
    rows = 256 if arguments.what == "wait" else arguments.rows
    folder = arguments.folder or Path(tempfile.gettempdir()) / f"retouch-stream-{rows}-{pixels}"
    if not folder.exists():
        write(folder, rows=rows, pixels=pixels, pictures=arguments.what == "check")
    {"start": start, "kills": kills, "wait": wait, "check": check, "_start": _start, "_read": _read}[arguments.what](
        folder, arguments
    )


def jpeg(seed: int, pixels: int) -> bytes:
    """A JPEG with the detail of a photograph: smooth colours and some noise."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)).resize((pixels, pixels), Image.Resampling.BICUBIC)
    noisy = np.asarray(coarse, dtype=np.int16) + rng.integers(-12, 12, (pixels, pixels, 3))
    out = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=90)
    return out.getvalue()


def write(folder: Path, *, rows: int, pixels: int, pictures: bool) -> None:
    """Write parquet files or, if ``pictures`` is True, a folder of images with ``metadata.jsonl``."""
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(parents=True)
    if pictures:
        lines = []
        for number in range(rows):
            (folder / f"{number:06}.jpg").write_bytes(jpeg(number, 384))
            lines.append(json.dumps({"file_name": f"{number:06}.jpg", "instruction": f"edit {number}"}) + "\n")
        (folder / "metadata.jsonl").write_text("".join(lines))
        return
    images = [jpeg(seed, pixels) for seed in range(64)]
    for first in range(0, rows, ROWS_PER_FILE):
        numbers = range(first, min(first + ROWS_PER_FILE, rows))
        columns: dict[str, list[Any]] = {
            "id": [str(number) for number in numbers],
            "instruction": [f"edit {number}" for number in numbers],
            # The bytes after a JPEG's end make each file another one: rows that share a file would be held out together.
            "image": [{"bytes": images[number % 64] + b"%d" % number, "path": None} for number in numbers],
        }
        if pixels >= 1024:
            columns["target"] = [{"bytes": images[(number + 1) % 64] + b"%d" % number, "path": None} for number in numbers]
        group = ROWS_PER_GROUP if pixels < 1024 else 16
        pyarrow.parquet.write_table(
            pyarrow.table(columns),
            folder / f"train-{first // ROWS_PER_FILE:05}.parquet",
            row_group_size=group,
            use_dictionary=False,
        )


def stream(folder: Path, *, size: int | None = None) -> Any:
    """Open the stream of training tasks of a folder. ``size``: px to which images are resized; None keeps their size."""
    from retouch.data.base import DataContext
    from retouch.data.sources.stream import StreamData

    return StreamData(path=str(folder), held_out=HELD_OUT).build(DataContext(size=None if size is None else (size, size))).train


def memory() -> tuple[float, float]:
    """The memory (proportional set size) of this process and of its children, in MB."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    each = []
    for process in ("self", *children):
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        each.append(next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024)
    return each[0], sum(each[1:])


def own_words(what: str, folder: Path, arguments: argparse.Namespace) -> list[str]:
    """The command that starts this script in a new process with another subcommand."""
    words = [what, "--rows", str(arguments.rows), "--folder", str(folder), "--steps", str(arguments.steps)]
    return [sys.executable, "-W", "ignore", __file__, *words]


def start(folder: Path, arguments: argparse.Namespace) -> None:
    subprocess.run([*own_words("_start", folder, arguments)], env={**os.environ, "BEGUN": str(time.time())}, check=True)


def _start(folder: Path, arguments: argparse.Namespace) -> None:
    begun = float(os.environ["BEGUN"])
    tasks = stream(folder)
    imported = time.time() - begun
    tasks.at_step(0, count=COUNT, places=range(COUNT))
    first = time.time() - begun
    before = memory()
    print(
        f"{arguments.rows} rows: {imported:.1f} s until the stream is open, {first:.1f} s until the first {COUNT} tasks are loaded"
    )
    print(f"memory after the first step: {before[0]:.0f} MB, and {before[1]:.0f} MB in the process that reads ahead")
    began = time.perf_counter()
    for step in range(1, arguments.steps + 1):
        tasks.at_step(step, count=COUNT, places=range(COUNT))
    seconds = time.perf_counter() - began
    after = memory()
    speed = arguments.steps * COUNT / seconds
    print(f"after {arguments.steps} more steps: {after[0]:.0f} MB and {after[1]:.0f} MB; {speed:.0f} tasks/s")
    print(f"state in a checkpoint: {len(json.dumps(tasks.state()))} bytes")
    tasks.close()


def kills(folder: Path, arguments: argparse.Namespace) -> None:
    """Read one pass in a process that is killed at random moments and continues from the state that it stored last."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as place:
        words = [*own_words("_read", folder, arguments)]
        environment = {**os.environ, "STORED": place}
        began, killed = time.perf_counter(), 0
        while True:
            child = subprocess.Popen(words, env=environment)
            limit = rng.uniform(15, 60) if killed < arguments.kills else None
            try:
                if child.wait(limit) == 0:
                    break
                raise SystemExit("the reading process failed")
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGKILL)
                child.wait()
                killed += 1
        parts = []
        for file in sorted(Path(place).glob("*.npz")):
            with np.load(file) as found:
                parts.append(found["rows"])
    drawn = np.concatenate(parts)
    counts = np.bincount(drawn, minlength=arguments.rows)[HELD_OUT:]
    neighbours = (np.diff(drawn) == 1).mean()
    print(f"{len(drawn)} rows of one pass in {time.perf_counter() - began:.0f} s with {killed} kills, {HELD_OUT} rows held out")
    print(f"{(counts > 1).sum()} rows repeated, {(counts == 0).sum()} lost; {neighbours:.2%} of the rows follow their neighbour")


def _read(folder: Path, arguments: argparse.Namespace) -> None:
    """Make steps until the end of the pass. After every 100 steps, store the rows and the position in the stream, like a
    checkpoint."""
    place = Path(os.environ["STORED"])
    stored = sorted(place.glob("*.npz"))
    tasks, step = stream(folder), 0
    if stored:
        with np.load(stored[-1]) as found:
            step = int(found["step"])
            tasks.load_state(json.loads(str(found["state"])))
    steps, rows = (arguments.rows - HELD_OUT) // COUNT, list[int]()
    while step < steps:
        drawn = tasks.at_step(step, count=COUNT, places=range(COUNT))
        rows += [int(task.instruction.removeprefix("edit ")) for task in drawn]
        step += 1
        if step % 100 == 0 or step == steps:
            temporary = place / "part"
            with temporary.open("wb") as file:
                np.savez(file, step=step, rows=np.array(rows), state=json.dumps(tasks.state()))
            temporary.rename(place / f"{step:08}.npz")
            rows = []
    tasks.close()


def wait(folder: Path, arguments: argparse.Namespace) -> None:
    """Measure the wait on two cores. The simulated step keeps one of them busy, like the process that drives a GPU."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    count = 4
    tasks = stream(folder, size=1024)
    tasks.at_step(0, count=count, places=range(count))
    waits = []
    for step in range(1, arguments.steps + 1):
        end = time.perf_counter() + arguments.seconds
        while time.perf_counter() < end:
            sum(range(10_000))
        before = tasks.waited
        tasks.at_step(step, count=count, places=range(count))
        waits.append(tasks.waited - before)
    tasks.close()
    share = 100 / arguments.seconds
    print(
        f"{len(waits)} steps of {arguments.seconds:g} s with {count} tasks of two images of 1024 x 1024 px: a step waits "
        f"{np.mean(waits) * share:.2f} % for its tasks on average, {np.median(waits) * share:.2f} % in the median, "
        f"{max(waits) * share:.2f} % at most"
    )


def check(folder: Path, arguments: argparse.Namespace) -> None:
    """Time the first and the second check of a folder of JPEGs, each in a new process. CPU time includes child processes."""
    for kept in (folder / ".retouch").glob("*"):
        kept.unlink()
    code = (
        "import os, time; b = time.perf_counter(); c = os.times()\n"
        "from retouch.data.base import DataContext; from retouch.data.sources.folder import FolderData\n"
        f"FolderData(path={str(folder)!r}).build(DataContext(size=(512, 512)))\n"
        "e = os.times(); print(f'{time.perf_counter() - b:.1f} s, CPU time {sum(e[:4]) - sum(c[:4]):.1f} s')"
    )
    for name in ("first", "second"):
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        print(f"{arguments.rows} images of 384 x 384 px, {name} start: {done.stdout.strip()}")


if __name__ == "__main__":
    main()
