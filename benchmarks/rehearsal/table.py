"""The table of docs/machines.md: every full-size recipe, rehearsed on the GPU that it names.

    python benchmarks/rehearsal/table.py [RECIPE ...]

Rehearses the given recipes, or all, and writes the table. What it found is kept in rehearsed.json beside this file.
"""

import json
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KEPT = Path(__file__).with_name("rehearsed.json")
PAGE = ROOT / "docs" / "machines.md"
MARK = "<!-- rehearsed -->"
MACHINE = "h100"
RECIPES = ("sd3/ocr-grpo", "flux2/ocr-grpo", "flux-fill/ip-adapter-grpo", "qwen-image-edit/flow-grpo")
HEADER = (
    "| recipe | ranks | peak GB | in | preflight | rollout | render | update | evaluation | checkpoint | "
    "TFLOP per image: rollout, update, render | s per image: modelled, ideal | hours |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def rehearse_one(name: str) -> dict[str, Any]:
    """The figures of a recipe: bytes, FLOPs and seconds by stage of its last phase."""
    from retouch.recipe.recipe import load
    from retouch.rehearsal import report
    from retouch.rehearsal.machines import MACHINES
    from retouch.rehearsal.step import rehearse

    machine, started = MACHINES[MACHINE], time.process_time()
    found = rehearse(load(ROOT / "recipes" / f"{name}.jsonnet"), machine)
    stages, phase = found.stages, found.phases[-1]
    top = max(stages, key=lambda each: max(stages[each].peaks.values(), default=0))
    modelled = sum(report.seconds(stages[each].work, machine) for each in phase.stages)
    return {
        "ranks": found.world,
        "peak": report.peak(found),
        "in": top,
        "held": dict(next(iter(stages[top].held.values())).most_common(6)),
        "peaks": {_plain(each): max(stage.peaks.values(), default=0) for each, stage in stages.items()},
        "flops": {_plain(each): sum(stages[each].work.flops.values()) / phase.rows for each in phase.stages},
        "modelled": modelled / phase.rows,
        "ideal": report.ideal_seconds(report.step_work(found, len(found.phases) - 1), machine) / phase.rows,
        "hours": report.hours(found, machine),
        "cpu_seconds": time.process_time() - started,
    }


def _plain(stage: str) -> str:
    """The stage without the name of its phase."""
    return stage.rpartition(": ")[2]


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The table, one row for each recipe."""
    return "\n".join([HEADER, *(_row(name, rows[name]) for name in RECIPES if name in rows)])


def _row(name: str, row: dict[str, Any]) -> str:
    peaks = [row["peaks"].get(stage, 0) / 1e9 for stage in ("preflight", "rollout", "render", "update", "evaluation", "checkpoint")]
    flops = ", ".join(f"{row['flops'].get(stage, 0) / 1e12:.1f}" for stage in ("rollout", "update", "render"))
    cells = [f"`{name}`", str(row["ranks"]), f"{row['peak'] / 1e9:.1f}", row["in"], *(f"{size:.1f}" for size in peaks), flops]
    return f"| {' | '.join([*cells, _pair(row), format(row['hours'], '.0f')])} |"


def _pair(row: dict[str, Any]) -> str:
    return f"{row['modelled']:.2f}, {row['ideal']:.2f}"


def main(names: list[str]) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    for name in names or RECIPES:
        found = rehearse_one(name)
        rows = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else {}
        KEPT.write_text(json.dumps({**rows, name: found}, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        print(_row(name, found))
    text = PAGE.read_text(encoding="utf-8")
    before, _, after = text.split(MARK)
    PAGE.write_text(f"{before}{MARK}\n\n{table(json.loads(KEPT.read_text()))}\n\n{MARK}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
