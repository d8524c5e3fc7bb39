"""Runs the checks of `make gpu` as a dry run in one process, so that torch and the models' libraries are imported once.

    python gpu_in_one_process.py FOLDER CHECK ...

Prints for each check the line that `measurements/gpu/run.py --dry-run` would print. Time limits, kills and crashing checks need one
process per check and are not tested here.
"""

import importlib
import io
import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

GPU = Path(__file__).parents[2] / "measurements" / "gpu"


def main(folder: Path, names: list[str]) -> None:
    sys.path.insert(0, str(GPU))
    checks: dict[str, Any] = {check.name: check for check in importlib.import_module("run").CHECKS}
    suite: Any = importlib.import_module("suite")
    work = importlib.import_module("worker").main
    for name in names:
        started = time.perf_counter()
        sys.stdin = io.StringIO("go\n")
        with TemporaryDirectory(prefix="retouch-gpu-") as scratch:
            try:
                work(checks[name].function, folder, scratch=Path(scratch), dry_run=True)
            except Exception as error:  # noqa: BLE001  (the check has recorded the error, and the other checks still run)
                sys.stderr.write(f"{name}: {error}\n")
            lines = list(suite.lines_of(Path(scratch)))
        result = suite.result_of(name, lines, ended=None, seconds=time.perf_counter() - started)
        sys.stdout.write(json.dumps(result.to_json()) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
