"""The process of one check: imports the module, waits for a line of input, runs the check, and writes a line for each value.

python measurements/gpu/worker.py MODULE:FUNCTION FOLDER SCRATCH [--dry-run]
"""

import importlib
import json
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from findings import FOUND, NotRun


def _write(file: TextIO, line: dict[str, Any]) -> None:
    file.write(json.dumps(line) + "\n")
    file.flush()


def main(check: str, folder: Path, *, scratch: Path, dry_run: bool) -> None:
    """Run the check ``MODULE:FUNCTION``, and write its values, its reason for not running, or its error to ``scratch``."""
    module, _, function = check.partition(":")
    with open(scratch / FOUND, "w", encoding="utf-8") as file:
        try:
            run = getattr(importlib.import_module(module), function)
            from target import open_target

            if not sys.stdin.readline():  # the suite has ended
                return
            print(f"== {check}, {time.strftime('%H:%M:%S')}")
            for finding in run(open_target(folder, scratch=scratch, dry_run=dry_run)):
                _write(file, {"finding": asdict(finding)})
        except NotRun as reason:
            _write(file, {"not run": str(reason)})
        finally:
            error = sys.exception() if hasattr(sys, "exception") else None
            if error is not None:
                frame = traceback.extract_tb(error.__traceback__)[-1]
                first = (str(error).strip().splitlines() or [""])[0]
                _write(file, {"error": f"{type(error).__name__}: {first} (at {Path(frame.filename).name}:{frame.lineno})"})


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), scratch=Path(sys.argv[3]), dry_run="--dry-run" in sys.argv[4:])
