"""Makes one run after the other under random faults: each must end with the same bits as an undisturbed run.

    python measurements/robustness/soak.py [--minutes 30] [--seed 0]

The reward is served on loopback by two replicas behind proxies, which spoil or delay a share of the replies in 17 ways
(measurements/serving). At random moments the training process is killed, is paused for a second, or finds its disk full; or a
replica of the server is killed.
"""

import argparse
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE.parents[1] / "tests" / "support"), str(HERE.parent / "serving")]
os.environ["RETOUCH_ALLOW_IMPORTS"] = "scorers"
import chaos  # noqa: E402
import servers  # noqa: E402

import folder_faults as faults  # noqa: E402
from kill_places import run_in_fork  # noqa: E402

SHARE = 0.15  # share of the replies that the proxies spoil
FAULTS = ("kill", "kill", "pause", "full disk", "kill a replica", "nothing")


def judged_by(out: Path, name: str, urls: list[str]) -> "faults.Recipe":
    """The recipe of a run whose reward is served at ``urls``, with many retries and a checkpoint after each step."""
    document = faults.six_step_recipe(out, name).document()
    patience = {"timeout": 3.0, "deadline": 300.0, "attempts": 50, "retry_share": 1.0, "batch": 2}
    document["reward"] = {"kind": "remote", "endpoints": urls, "columns": {"score": [0, 1]}, "combine": {"score": 1}, **patience}
    document["checkpoints"] |= {"every": 1}
    return faults.parse(document)


def disturb(kind: str, child: int, server: "servers.Ours", draw: random.Random) -> None:
    """Apply a fault to the training process (the only child of the forked process ``child``), or to a replica of the server."""
    children = Path(f"/proc/{child}/task/{child}/children").read_text().split()
    if kind == "kill a replica":
        os.kill(draw.choice(list(server.pids().values())), signal.SIGKILL)
    for pid in map(int, children):
        if kind == "kill":
            os.kill(pid, signal.SIGKILL)
        elif kind == "full disk":
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, 4096))
        elif kind == "pause":
            os.kill(pid, signal.SIGSTOP)
            time.sleep(1.0)
            os.kill(pid, signal.SIGCONT)


def lap(made: "faults.Recipe", log: Path, server: "servers.Ours", draw: random.Random, counted: Counter[str]) -> str:
    """Make one run under faults, and start it again until it finishes. Returns what was wrong, or an empty text."""
    printed = ""
    for attempt in range(60):
        child = os.fork()
        if child == 0:
            os._exit(abs(run_in_fork(lambda: faults.train(made), log)) % 256)
        if attempt < 8:
            time.sleep(draw.uniform(0.0, 6.0))
            kind = draw.choice(FAULTS)
            try:
                disturb(kind, child, server, draw)
                counted[kind] += 1
            except (ProcessLookupError, FileNotFoundError):
                pass  # the process had ended already
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        printed += log.read_text()
        if code == 0:
            return "a traceback: " + printed[-2000:] if "Traceback" in printed else ""
    return f"never ended: {printed[-2000:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw, counted = random.Random(arguments.seed), Counter[str]()
    import retouch.run.session  # noqa: F401  (loaded once, before the forks)

    laps = wrong = 0
    with ExitStack() as stack:
        out = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(servers.ours("Digest", {}, replicas=2))
        whole = judged_by(out, "whole", list(server.urls))
        assert run_in_fork(lambda: faults.train(whole), out / "whole.log") == 0, (out / "whole.log").read_text()
        urls = [stack.enter_context(chaos._proxy(url, SHARE, seed)) for seed, url in enumerate(server.urls)]
        began = time.monotonic()
        while time.monotonic() - began < 60 * arguments.minutes:
            made = judged_by(out, f"lap-{laps}", urls)
            bad = lap(made, out / f"lap-{laps}.log", server, draw, counted)
            if not bad and faults.file_hashes(made.folder, faults.ALL) != faults.file_hashes(whole.folder, faults.ALL):
                bad = "other bits"
            laps, wrong = laps + 1, wrong + bool(bad)
            print(f"lap {laps:3d}  {'same bits' if not bad else 'WRONG: ' + bad}  {dict(counted)}", flush=True)
        minutes = (time.monotonic() - began) / 60
    print(f"\n{laps} runs in {minutes:.1f} minutes under {sum(counted.values())} faults: {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
