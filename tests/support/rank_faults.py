"""Faults of a run on two ranks with sharded weights: how soon all processes end, and whether resuming gives bitwise equal results.

`outcome` starts `retouch launch`, injects one of ``FAULTS`` after the first steps, waits for everything to end, and runs the same
command again. A network partition needs the permission to create network namespaces.
"""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from folder_faults import WEIGHTS, file_hashes, six_step_recipe
from retouch.recipe.recipe import Recipe, parse
from retouch.records.folder import RunFolder

RANK_TIMEOUT = 10
MAX_SECONDS = 120  # seconds: the time-out of a rank, the grace period of the launcher, and a reserve for slow machines


@dataclass(frozen=True)
class Launched:
    """A launcher and its ranks, by their process ids."""

    launcher: int
    ranks: tuple[int, int]


def _kill(chosen: Callable[[Launched], Sequence[int]], run: Launched) -> None:
    for pid in chosen(run):
        os.kill(pid, signal.SIGKILL)


def _suspend(run: Launched) -> None:
    os.kill(run.ranks[1], signal.SIGSTOP)


def _suspend_briefly(run: Launched) -> None:
    os.kill(run.ranks[1], signal.SIGSTOP)
    time.sleep(RANK_TIMEOUT / 3)
    os.kill(run.ranks[1], signal.SIGCONT)


def _fill_disk(rank: int, run: Launched) -> None:
    resource.prlimit(run.ranks[rank], resource.RLIMIT_FSIZE, (4096, 4096))


def _partition(run: Launched) -> None:
    subprocess.run(["nsenter", "-t", str(run.ranks[0]), "-n", "ip", "link", "set", "lo", "down"], check=True)


FAULTS: dict[str, Callable[[Launched], None]] = {
    "rank 0 is killed": partial(_kill, lambda run: run.ranks[:1]),
    "rank 1 is killed": partial(_kill, lambda run: run.ranks[1:]),
    "the launcher is killed": partial(_kill, lambda run: [run.launcher]),
    "both ranks are killed": partial(_kill, lambda run: run.ranks),
    "the launcher and both ranks are killed": partial(_kill, lambda run: [run.launcher, *run.ranks]),
    "rank 1 stops responding": _suspend,
    "rank 1 is slow for a while": _suspend_briefly,
    "the disk of rank 0 is full": partial(_fill_disk, 0),
    "the disk of rank 1 is full": partial(_fill_disk, 1),
    "the network between the ranks fails": _partition,
}


@dataclass(frozen=True)
class Outcome:
    """The result of a fault. ``seconds``: until launcher and ranks had ended. ``wrong``: what is wrong; empty if nothing is."""

    fault: str
    code: int
    seconds: float
    wrong: str
    text: str


def can_partition() -> bool:
    """Return whether this process is allowed to create a network namespace."""
    tools = all(shutil.which(tool) for tool in ("unshare", "nsenter", "ip"))
    return tools and subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode == 0


def sharded_recipe(out: Path, name: str) -> Recipe:
    document = six_step_recipe(out, name).document()
    document |= {"sharding": "fsdp2", "checkpoints": document["checkpoints"] | {"every": 1, "keep": 2}}
    return parse(document)


def start(made: Recipe, log: Path, *, isolated: bool = False) -> "subprocess.Popen[bytes]":
    """Start `retouch launch` of the recipe on two ranks. ``isolated``: in a network namespace of its own."""
    file = made.folder.with_name(f"{made.name}.json")
    file.write_text(made.model_dump_json())
    command = [sys.executable, "-W", "ignore", "-m", "retouch.cli", "launch", "--nproc", "2", str(file)]
    if isolated:
        command = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RETOUCH_RANK_TIMEOUT": str(RANK_TIMEOUT)}
    with log.open("wb") as printed:
        return subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, env=environment)


def outcome(fault: str, out: Path, whole: Path) -> Outcome:
    """Inject a fault into a run, start the run again, and return the result. ``whole``: the folder of an undisturbed run."""
    made, log = sharded_recipe(out, fault.replace(" ", "-")), out / f"{fault.replace(' ', '-')}.log"
    with start(made, log, isolated=fault.startswith("the network")) as launcher:
        try:
            while len(RunFolder(made.folder).read_metrics()) < 2:
                assert launcher.poll() is None, log.read_text()[-3000:]
                time.sleep(0.01)
            run = Launched(launcher.pid, _ranks_of(launcher.pid))
            FAULTS[fault](run)
            began = time.monotonic()
            while (launcher.poll() is None or any(map(_is_running, run.ranks))) and time.monotonic() - began < 2 * MAX_SECONDS:
                time.sleep(0.05)
            seconds = time.monotonic() - began
        finally:
            launcher.kill()
    printed = log.read_text() + "".join(each.read_text() for each in (made.folder / "logs").glob("*.log"))
    wrong = [f"took {seconds:.0f} s"] if seconds > MAX_SECONDS else []
    wrong += ["a traceback"] if "Traceback" in printed else []
    again = start(made, log)
    if again.wait(300) != 0:
        wrong.append(f"the same command ended with {again.returncode}: {log.read_text()[-500:]}")
    elif file_hashes(made.folder, (*WEIGHTS, "metrics.jsonl")) != file_hashes(whole, (*WEIGHTS, "metrics.jsonl")):
        wrong.append("other bits")
    said = [line for line in printed.splitlines() if "retouch " in line and ": " in line]
    return Outcome(fault, launcher.returncode, seconds, ", ".join(wrong), said[-1] if said else "")


def run_without_faults(out: Path) -> Path:
    """Run without faults and return the folder of the run."""
    made = sharded_recipe(out, "whole")
    log = out / "whole.log"
    assert start(made, log).wait(300) == 0, log.read_text()[-3000:]
    return made.folder


def _ranks_of(launcher: int) -> tuple[int, int]:
    """Return the process ids of the ranks. The guardian process, which is also a child of the launcher, is left out."""
    ranks = {}
    for child in map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()):
        environment = dict(entry.split("=", 1) for entry in Path(f"/proc/{child}/environ").read_text().split("\0") if "=" in entry)
        if "-m\0retouch.cli" in Path(f"/proc/{child}/cmdline").read_text():
            ranks[environment["RANK"]] = child
    return ranks["0"], ranks["1"]


def _is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
