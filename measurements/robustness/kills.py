"""Kills runs with SIGKILL at random moments and resumes them: each must end with the same bits as an undisturbed run.

    python measurements/robustness/kills.py [--kills 100] [--cold 10] [--seed 0]

Most kills hit a forked process that has imported everything already, so they hit loading, evaluation, training and saving.
``--cold`` is the number of kills that hit a new process, between its first instruction and its first steps.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1] / "tests" / "support"))
import folder_faults as faults  # noqa: E402
from kill_places import import_models, run_in_fork  # noqa: E402


def killed_fork(made: faults.Recipe, log: Path, after: float) -> bool:
    """Train in a forked process and kill it after ``after`` seconds. Returns False if the process had ended before."""
    child = os.fork()
    if child == 0:
        os._exit(run_in_fork(lambda: faults.train(made), log))
    time.sleep(after)
    return _kill(child)


def killed_process(made: faults.Recipe, log: Path, after: float) -> bool:
    """Train in a new process and kill it after ``after`` seconds. Returns False if the process had ended before."""
    file = made.folder.with_name(f"{made.name}.json")
    file.write_text(made.model_dump_json())
    with log.open("wb") as printed:
        command = [sys.executable, "-W", "ignore", "-m", "retouch.cli", "train", str(file)]
        process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT)
    time.sleep(after)
    process.kill()
    return process.wait() == -signal.SIGKILL


def _kill(child: int) -> bool:
    """Kill the child processes of the forked process ``child``, and wait for it. Returns whether it still had children."""
    children = Path(f"/proc/{child}/task/{child}/children").read_text().split()
    for pid in map(int, children):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(child, 0)
    return bool(children)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--cold", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    import_models()

    kills = runs = wrong = 0
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary)
        whole = faults.six_step_recipe(out, "whole")
        began = time.monotonic()
        assert run_in_fork(lambda: faults.train(whole), out / "whole.log") == 0, (out / "whole.log").read_text()
        length = time.monotonic() - began
        cold = {round(index * arguments.kills / max(1, arguments.cold)) for index in range(arguments.cold)}
        while kills < arguments.kills:
            made, log = faults.six_step_recipe(out, f"run-{runs}"), out / f"run-{runs}.log"
            mine, printed = 0, ""
            for _ in range(8):
                if kills < arguments.kills:
                    kill = killed_process if kills in cold else killed_fork
                    hit = kill(made, log, draw.uniform(0.0, length * (2.0 if kills in cold else 1.0)))
                    kills, mine = kills + hit, mine + hit
                    printed += log.read_text()
            code = run_in_fork(lambda made=made: faults.train(made), log)
            printed += log.read_text()
            same = code == 0 and faults.file_hashes(made.folder, faults.ALL) == faults.file_hashes(whole.folder, faults.ALL)
            bad = not same or "Traceback" in printed
            runs, wrong = runs + 1, wrong + bad
            verdict = "same bits" if not bad else f"WRONG: exit {code}: {printed[-300:]}"
            print(f"run {runs:3d}  {mine} kills  {verdict}", flush=True)
    print(f"\n{kills} kills ({min(len(cold), kills)} of them in a cold start) in {runs} runs: {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
