"""Writes the tables of docs/machines.md on every full-size recipe without and with its improvements of speed and memory.

    python measurements/rehearsal/before_after.py [RECIPE ...]

Rehearses the given recipes, or all, without any of their improvements (`improvements.py`). The figures are kept in
before_after.json next to this file. Those with the improvements are in the table of `table.py`, which is called for recipes that it
lacks. A recipe is not rehearsed again if its GPU work, its improvements and its GPU are those of the kept figures.
"""

import json
import logging
import sys
import warnings
from hashlib import sha256
from pathlib import Path
from typing import Any

import table
from improvements import IMPROVEMENTS, improvements_of, settings_of, turned_off
from table import PAGE, STAGES, figures, groups, in_own_process, insert, machine_of, names, recipe_of

KEPT = Path(__file__).with_name("before_after.json")
MARK = "<!-- before and after -->"
LEGEND = "| name | improvement | without it | turned off by |\n| --- | --- | --- | --- |"
HEADER = (
    "| recipe | GPUs | turned off | peak GB before | peak GB | s per image before | s per image | times faster | "
    "TFLOP per image before | TFLOP per image |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)
PEAKS = f"| peak GB | {' | '.join(STAGES)} |\n| --- |{' --- |' * len(STAGES)}"
FIGURES = ("peak", "in", "peaks", "flops", "modelled", "cpu_seconds")


def rehearse_one(name: str, off: list[str]) -> dict[str, Any]:
    """Rehearse a recipe without the improvements ``off``. Returns the figures of ``table.figures`` that are kept."""
    with turned_off(recipe_of(name), off) as recipe:
        found = figures(recipe, machine_of(name))
    return {each: found[each] for each in FIGURES}


def digest(name: str) -> str:
    """A digest of all that the kept figures of a recipe depend on, except for the code."""
    off = improvements_of(recipe_of(name))
    return sha256(json.dumps([table.digest(name), off, settings_of(off)]).encode()).hexdigest()[:16]


def kept() -> dict[str, dict[str, Any]]:
    """The kept figures, by the first recipe of each group."""
    found: dict[str, dict[str, Any]] = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else {}
    return found


def tables(without: dict[str, dict[str, Any]], rows: dict[str, dict[str, Any]]) -> str:
    """All tables: a row for each improvement, a row for each group of recipes, and the peaks of each group in each stage.

    ``without``: the figures without the improvements. ``rows``: those of `table.py`.
    """
    legend = [f"| {' | '.join([f'`{name}`', each.title, each.without, _how(name)])} |" for name, each in IMPROVEMENTS.items()]
    whole = [_row(name, found, rows[name]) for name, found in without.items()]
    stages = [_peaks(name, found["peaks"], rows[name]["peaks"]) for name, found in without.items()]
    return "\n".join([LEGEND, *legend, "", HEADER, *whole, "", PEAKS, *stages])


def _how(name: str) -> str:
    return " ".join(f"`--set '{setting}'`" for setting in IMPROVEMENTS[name].off) or "the script"


def _row(name: str, before: dict[str, Any], after: dict[str, Any]) -> str:
    cells = [
        "<br>".join(f"`{each}`" for each in (name, *after["same"])),
        f"{after['ranks']} {after['machine'].upper()}",
        ", ".join(f"`{each}`" for each in before["off"]),
        _peak(name, before),
        _peak(name, after),
        f"{before['modelled']:.2f}",
        f"{after['modelled']:.2f}",
        f"{before['modelled'] / after['modelled']:.2f}",
        *(f"{sum(each['flops'].values()) / 1e12:.1f}" for each in (before, after)),
    ]
    return f"| {' | '.join(cells)} |"


def _peak(name: str, found: dict[str, Any]) -> str:
    from retouch_plan.machines import MACHINES, fits

    size = f"{found['peak'] / 1e9:.1f}, {found['in']}"
    return size if fits(found["peak"], MACHINES[machine_of(name)].memory) else f"{size} (does not fit)"


def _peaks(name: str, before: dict[str, int], after: dict[str, int]) -> str:
    cells = [f"{before[stage] / 1e9:.1f} → {after[stage] / 1e9:.1f}" if stage in after else "" for stage in STAGES]
    return f"| {' | '.join([f'`{name}`', *cells])} |"


def main(chosen: list[str]) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    found = groups(chosen)
    for name in found:
        rows, mark = kept(), digest(name)
        if rows.get(name, {}).get("digest") == mark:
            continue
        off = improvements_of(recipe_of(name))
        rows[name] = {"digest": mark, "off": off, **in_own_process(rehearse_one, name, off)}
        rows = {each: rows[each] for each in sorted(rows, key=names().index)}
        KEPT.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        print(name, rows[name], flush=True)
    shown = table.kept()
    missing = [name for name in found if shown.get(name, {}).get("digest") != table.digest(name)]
    if missing:
        table.main(missing)
    insert(PAGE, MARK, tables(kept(), table.kept()))
    print(f"{len(found)} recipes have figures of their present settings; wrote the tables of {PAGE.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
