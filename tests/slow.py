"""Runs the slow tests file by file, and continues where an earlier call was interrupted; exit status 1 if a file fails.

python tests/slow.py [--jobs N] [--repeat-failed] [FILE OR FOLDER]...

Results are kept in runs/slow-tests.jsonl with a digest of the commit and of uncommitted changes. Files that were run with the same
digest are not run again.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path("runs", "slow-tests.jsonl")
CHOSEN = "slow and not engines"
_LOCK = threading.Lock()


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Runs the slow tests file by file; an interrupted run continues.")
    parser.add_argument(
        "paths", nargs="*", metavar="FILE OR FOLDER", help="only tests in these files and folders", default=["tests"]
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="number of files that run at the same time")
    parser.add_argument("--repeat-failed", action="store_true", help="also run files that failed with this digest again")
    asked = parser.parse_args(words)
    os.chdir(ROOT)
    digest, known = code_digest(), {}
    for line in RESULTS.read_text().splitlines() if RESULTS.is_file() else ():
        result = json.loads(line)
        if result["digest"] == digest:
            known[result["file"]] = result
    counts = slow_tests(asked.paths)
    waiting = [file for file in counts if file not in known or (asked.repeat_failed and known[file]["code"])]
    tell(f"{sum(counts.values())} slow tests in {len(counts)} files; {len(counts) - len(waiting)} files are done")
    with ThreadPoolExecutor(asked.jobs) as pool:
        known |= dict(zip(waiting, pool.map(lambda file: run(file, digest), waiting), strict=True))
    failed = [file for file in counts if known[file]["code"]]
    seconds = sum(known[file]["seconds"] for file in counts)
    tell(f"{len(counts) - len(failed)} of {len(counts)} files pass, {seconds / 60:.0f} minutes of tests; failed: {failed}")
    return 1 if failed else 0


def code_digest() -> str:
    """A digest of the commit and of all changes to files that git tracks."""
    commands = (["git", "rev-parse", "HEAD"], ["git", "diff", "HEAD"])
    return hashlib.sha256(b"".join(subprocess.run(each, capture_output=True, check=True).stdout for each in commands)).hexdigest()


def slow_tests(paths: Sequence[str]) -> dict[str, int]:
    """The number of slow tests of each file, in the order of pytest."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", CHOSEN, *paths]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        raise SystemExit(f"the tests cannot be collected:\n{found.stdout}{found.stderr}")
    return {file: int(count) for file, count in re.findall(r"^(.+\.py): (\d+)$", found.stdout, re.MULTILINE)}


def run(file: str, digest: str) -> dict[str, Any]:
    """Run the slow tests of a file, print what pytest prints, and keep the result."""
    start = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-m", CHOSEN, "--durations=5", "--durations-min=10", file]
    found = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    result = {"digest": digest, "file": file, "code": found.returncode, "seconds": round(time.monotonic() - start, 1)}
    with _LOCK:
        tell(found.stdout)
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("a") as kept:
            kept.write(json.dumps(result) + "\n")
    return result


def tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
