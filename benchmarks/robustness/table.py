"""All hostile suites, counted in one table: payloads to a reward server, replies to its clients, folders, kills.

    python benchmarks/robustness/table.py [--only SECTION] [--requests 50000]

Each section is a module of this folder with a function ``counts(arguments)``, which returns a ``Counts``. Each must end with 0
lost, 0 wrong and 0 tracebacks, or the command exits with 1. ``--requests``: hostile and honest requests to one server, over which
its memory must stay flat (+50 MB); 0 leaves it out. Linux only (memory is read from /proc).
"""

import argparse
import importlib
import logging
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parents[1] / "tests" / "support"), str(HERE.parents[1] / "tests" / "serving")]
SECTIONS = ("payloads", "replies", "folders", "kills")


@dataclass
class Counts:
    """``lost``: cases after which work or a sample was gone. ``wrong``: not refused, or a wrong result."""

    title: str
    cases: int = 0
    lost: int = 0
    wrong: int = 0
    tracebacks: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.lost or self.wrong or self.tracebacks)


def folder_counts(module: ModuleType) -> Counts:
    """The outcomes of ``folders.py``."""
    counted = Counts("faults of a run's folder")
    with tempfile.TemporaryDirectory() as out:
        for outcome in module.outcomes(Path(out)):
            counted.cases += 1
            counted.wrong += outcome.kind == "WRONG"
            counted.tracebacks += "Traceback" in outcome.text
            counted.notes += [f"{outcome.fault}: {outcome.text[:150]}"] if outcome.kind == "WRONG" else []
    return counted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS, action="append")
    parser.add_argument("--requests", type=int, default=50_000, metavar="N")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # clients say what they refuse
    rows = []
    for name in arguments.only or SECTIONS:
        if not (HERE / f"{name}.py").is_file():
            continue
        began = time.monotonic()
        module = importlib.import_module(name)
        counts = folder_counts(module) if name == "folders" else module.counts(arguments)
        rows.append(counts)
        print(f"{counts.title}: {counts.cases} cases in {time.monotonic() - began:.0f} s", *counts.notes, sep="\n  ", flush=True)
    print("\n| section | cases | lost | wrong | tracebacks |\n| --- | --- | --- | --- | --- |")
    for row in rows:
        print(f"| {row.title} | {row.cases} | {row.lost} | {row.wrong} | {row.tracebacks} |")
    totals = [str(sum(getattr(row, name) for row in rows)) for name in ("cases", "lost", "wrong", "tracebacks")]
    print(f"| all | {' | '.join(totals)} |")
    return int(not all(row.clean for row in rows))


if __name__ == "__main__":
    sys.exit(main())
