"""Runs all hostile suites, and prints one table of the cases and the failures.

    python measurements/robustness/hostile.py [--quick]

`--quick` runs only a part of the folder faults, kills and payloads, and no faults of ranks.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
SUITES: dict[str, tuple[list[str], list[str] | None]] = {
    "damaged folders": (["folders.py"], ["folders.py", "--every", "12"]),
    "links out of a run": (["links.py"], ["links.py", "--every", "6"]),
    "hostile archives": (["archives.py"], ["archives.py", "--every", "10"]),
    "kills": (["kills.py"], ["kills.py", "--kills", "10", "--cold", "2"]),
    "faults of two ranks": (["ranks.py"], None),
    "payloads to a reward server": (["payloads.py"], ["payloads.py", "--requests", "3000"]),
    "slow clients of both servers": (["exhaustion.py"], ["exhaustion.py", "--every", "4"]),
    "replies to clients": (["replies.py"], ["replies.py"]),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    rows, code = [], 0
    for name, (whole, reduced) in SUITES.items():
        words = reduced if quick else whole
        if words is None:
            continue
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(HERE / words[0]), *words[1:]], capture_output=True, text=True, check=False
        )
        code = code or done.returncode
        print(done.stdout if not done.returncode else done.stdout + done.stderr[-2000:], flush=True)
        summary = (done.stdout.strip().splitlines() or ["nothing was printed"])[-1]
        rows.append(f"| {name} | {summary} | {'ok' if not done.returncode else 'WRONG'} | {(time.monotonic() - began) / 60:.1f} |")
    print("\n".join(["| suite | tried | result | minutes |", "| --- | --- | --- | --- |", *rows]))
    return code


if __name__ == "__main__":
    sys.exit(main())
