"""Writes the table of docs/machines.md on the changes that make Flow-GRPO of Qwen-Image-Edit faster.

    python measurements/rehearsal/speedup.py [NAMES ...]

Rehearses the recipe as it is, then with one change turned off at a time, and then without all changes, to which the changes are
added one after the other. NAMES are changes to turn off together, such as ``lora,adamw``; if any are given, only these
combinations are rehearsed. The figures are kept in speedup.json next to this file.
"""

import json
import logging
import math
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from improvements import IMPROVEMENTS, turned_off
from table import PAGE, ROOT, insert

KEPT = Path(__file__).with_name("speedup.json")
MARK = "<!-- speedup -->"
RECIPE = ROOT / "recipes" / "qwen-image-edit" / "flow-grpo.jsonnet"
MACHINE = "h100"
HEADER = (
    "| change | turned back by | s per image without it: all, rollout, update | times faster | added: s per image | "
    "times faster | share |\n| --- | --- | --- | --- | --- | --- | --- |"
)
CHANGES = {name: IMPROVEMENTS[name] for name in ("guidance", "lora", "shapes", "adamw", "compile")}
"""The changes by name, in the order in which they are added."""


def rehearse_without(names: Sequence[str]) -> dict[str, float]:
    """Rehearse the recipe with these changes turned off.

    Returns seconds per image: of the step, the rollout, the update, the ideal step, and each kind of work; and the peak in bytes.
    """
    from retouch.recipe.recipe import load
    from retouch_plan import estimate as report
    from retouch_plan.dry_run import dry_run
    from retouch_plan.machines import MACHINES

    machine = MACHINES[MACHINE]
    with turned_off(load(RECIPE), names) as recipe:
        found = dry_run(recipe, machine)
    phase = found.phases[0]
    each = {name: report.seconds(found.stages[name].work, machine) / phase.rows for name in phase.stages}
    kinds = {kind: spent / phase.rows for kind, spent in report.step_work(found, 0).seconds.items()}
    return {
        "step": sum(each.values()),
        "rollout": each["rollout"],
        "update": each["update"],
        "peak": found.peak,
        "ideal": report.step_work(found, 0).flops.total() / machine.half / phase.rows,
        **{f"kind: {name}": spent for name, spent in sorted(kinds.items())},
    }


def table(kept: dict[str, dict[str, float]]) -> str:
    """The table: a row for the recipe without any of the changes, then a row for each change.

    ``kept``: the figures, by the comma-separated names of the changes that were turned off.
    """
    now, before = kept[""], kept[",".join(CHANGES)]
    lines, last = [HEADER, f"| none of them | all of the below | | | {before['step']:.2f} | 1.00 | |"], before
    for index, (name, change) in enumerate(CHANGES.items()):
        alone, added = kept[name], kept[",".join(list(CHANGES)[index + 1 :])]
        share = math.log(last["step"] / added["step"]) / math.log(before["step"] / now["step"])
        how = " ".join(f"`--set '{each}'`" for each in change.off) or "the script"
        cells = [
            change.title,
            how,
            ", ".join(f"{alone[part]:.2f}" for part in ("step", "rollout", "update")),
            f"{alone['step'] / now['step']:.2f}",
            f"{added['step']:.2f}",
            f"{before['step'] / added['step']:.2f}",
            f"{round(100 * share) or 0} %",
        ]
        lines.append(f"| {' | '.join(cells)} |")
        last = added
    return "\n".join(lines)


def combinations() -> list[str]:
    """The comma-separated names of the changes that are turned off in each rehearsal of the table."""
    names = list(CHANGES)
    return list(dict.fromkeys([*names, *(",".join(names[index:]) for index in range(len(names) + 1))]))


def main(chosen: list[str]) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    for names in chosen or combinations():
        kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else {}
        kept[names] = rehearse_without([name for name in names.split(",") if name])
        KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        print(names or "the recipe as it is", {name: round(value, 3) for name, value in kept[names].items()}, flush=True)
    insert(PAGE, MARK, table(json.loads(KEPT.read_text())))


if __name__ == "__main__":
    main(sys.argv[1:])
