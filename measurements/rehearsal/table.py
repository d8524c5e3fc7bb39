"""Writes the tables of docs/machines.md: a rehearsal of every full-size recipe on the GPU for which it was written.

    python measurements/rehearsal/table.py [RECIPE ...]

Rehearses the given recipes, or all, and writes the tables. The figures are kept in rehearsed.json next to this file. Recipes that
differ only in parts without GPU work (data, rewards, advantages) are rehearsed once.
"""

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retouch.recipe.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
KEPT = Path(__file__).with_name("rehearsed.json")
PAGE = ROOT / "docs" / "machines.md"
MARK = "<!-- rehearsed -->"
FOLDERS = ("sd3", "flux2-klein", "flux-fill", "flux-kontext", "qwen-image", "qwen-image-edit", "qwen-image-2", "emu3")
SKIPPED_NAMES = ("-playground", "tiny", "one-gpu")
"""Words in the names of recipes with small models, which are not rehearsed, and of those that `cards.py` rehearses."""
_ON_H200 = (
    *("flux-fill/ip-adapter-grpo-published", "flux-fill/ip-adapter-nft", "flux-fill/ip-adapter-nft-published"),
    *("qwen-image/writer-grpo-published", "qwen-image/writer-grpo-published-mmmg", "qwen-image-edit/ip-adapter-grpo"),
    *("qwen-image-edit/writer-grpo-2509-published", "qwen-image-edit/writer-grpo-full-2509-published"),
)
MACHINES_OF = dict.fromkeys(_ON_H200, "h200")
"""The GPU of each recipe that is not written for an H100 with 80 GB."""
VARIABLES = {
    **{"APP__DATA_DIR": "data", "APP__BASE_EXP_DIR": "runs", "APP__RUN_NAME": "run"},
    "APP__REWARD_FUNCTION_API_BASE": "http://localhost:1",
}
"""The environment variables that recipes read."""
WITHOUT_WORK = ("name", "out", "data", "reward", "advantage", "samples", "checkpoints", "push", "steps", "passes", "seed")
SAME_STEP = ("name", "data", "steps", "keep_optimizer")
"""The keys of phases whose steps all have the same work."""
STAGES = ("preflight", "rollout", "render", "update", "evaluation", "checkpoint")
HEADER = (
    "| recipe | GPUs | peak GB | in | preflight | rollout | render | update | evaluation | checkpoint | "
    "TFLOP per image: rollout, update, render | s per image: modelled, ideal | hours |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)
UNITS = (
    "| recipe | one | kernels | host waits | ms modelled | of the GPU | of the host |\n| --- | --- | --- | --- | --- | --- | --- |"
)


def names() -> list[str]:
    """The names of the full-size recipes, in the order of `FOLDERS`."""
    files = sorted(file for folder in FOLDERS for file in (ROOT / "recipes" / folder).glob("*.jsonnet"))
    found = [f"{file.parent.name}/{file.stem}" for file in files if not any(part in file.stem for part in SKIPPED_NAMES)]
    return sorted(found, key=lambda name: (FOLDERS.index(name.partition("/")[0]), name))


def document(name: str) -> dict[str, Any]:
    """The evaluated document of a recipe. Also sets the environment variables that recipes read."""
    from retouch.recipe.document import evaluate

    os.environ.update(VARIABLES)
    return dict(evaluate(ROOT / "recipes" / f"{name}.jsonnet"))


def work_of(name: str) -> str:
    """The keys of a recipe that determine its GPU work, as JSON."""
    read = document(name)
    work = {key: value for key, value in read.items() if key not in WITHOUT_WORK}
    phases = read.get("phases") or ()
    work["steps"] = sum(phase.get("steps", 0) for phase in phases) or read.get("steps")
    same_steps = all(set(phase) <= set(SAME_STEP) for phase in phases)
    work["phases"] = [] if same_steps else [{**phase, "data": None} for phase in phases]
    for section, key in (("objective", "normalise"), ("optimizer", "schedule")):
        work[section] = {name: value for name, value in read.get(section, {}).items() if name != key}
    work["policy"] = {**read["policy"], "model": {**read["policy"]["model"], "path": None}}
    return json.dumps(work, sort_keys=True)


def groups(chosen: list[str]) -> dict[str, list[str]]:
    """Groups of recipes with equal GPU work, by the first recipe of the group."""
    found: dict[str, list[str]] = {}
    firsts: dict[str, str] = {}
    for name in names():
        found.setdefault(firsts.setdefault(work_of(name), name), []).append(name)
    return {first: members for first, members in found.items() if not chosen or set(chosen) & set(members)}


def digest(name: str) -> str:
    """A digest of all that the kept figures of a recipe depend on, except for the code."""
    return sha256(json.dumps([work_of(name), machine_of(name)]).encode()).hexdigest()[:16]


def kept() -> dict[str, dict[str, Any]]:
    """The kept figures, by the first recipe of each group."""
    found: dict[str, dict[str, Any]] = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else {}
    return found


def machine_of(name: str) -> str:
    return MACHINES_OF.get(name, "h100")


def rehearse_one(name: str) -> dict[str, Any]:
    """Rehearse a recipe. Returns the figures of ``figures``."""
    return figures(recipe_of(name), machine_of(name))


def recipe_of(name: str) -> "Recipe":
    from retouch.recipe.recipe import load

    document(name)  # sets the environment variables
    return load(ROOT / "recipes" / f"{name}.jsonnet")


def figures(recipe: "Recipe", machine_name: str) -> dict[str, Any]:
    """Rehearse a recipe. Returns bytes, FLOPs and seconds for the stages of its last phase, and figures of one step or token."""
    from retouch_plan import dry_run as report
    from retouch_plan.dry_run import dry_run
    from retouch_plan.machines import MACHINES

    machine, started = MACHINES[machine_name], time.process_time()
    found = dry_run(recipe, machine)
    stages, phase = found.stages, found.phases[-1]
    top = max(stages, key=lambda each: stages[each].peak)
    modelled = sum(report.seconds(stages[each].work, machine) for each in phase.stages)
    return {
        "ranks": found.world,
        "machine": machine.name,
        "peak": found.peak,
        "in": top,
        "held": dict(max((held for _, held in stages[top].peaks.values()), key=lambda held: held.total()).most_common(6)),
        "peaks": {_plain(each): stage.peak for each, stage in stages.items()},
        "flops": {_plain(each): sum(stages[each].work.flops.values()) / phase.rows for each in phase.stages},
        "modelled": modelled / phase.rows,
        "ideal": report.step_work(found, len(found.phases) - 1).flops.total() / machine.half / phase.rows,
        "hours": report.hours(found, machine),
        "units": {
            unit: {
                "kernels": work.counts["kernels"],
                "waits": sum(work.waits.values()),
                "device": work.seconds.total(),
                "host": report.host_seconds(work, machine),
            }
            for unit, work in found.units.items()
        },
        "cpu_seconds": time.process_time() - started,
    }


def in_own_process(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Call a function in a new process, because torch keeps the state of the fake accelerator until its process ends.

    The process is a fork of a server that has already imported the libraries.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(["retouch_plan.dry_run"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def _plain(stage: str) -> str:
    """The stage without the name of its phase."""
    return stage.rpartition(": ")[2]


def tables(rows: dict[str, dict[str, Any]]) -> str:
    """Both tables: a row for each group of recipes, and a row for each of its units of work."""
    units = [line for name, row in rows.items() for line in _units(name, row)]
    return "\n".join([HEADER, *(_row(name, row) for name, row in rows.items()), "", UNITS, *units])


def _row(name: str, row: dict[str, Any]) -> str:
    peaks = [f"{row['peaks'][stage] / 1e9:.1f}" if stage in row["peaks"] else "" for stage in STAGES]
    flops = ", ".join(f"{row['flops'].get(stage, 0) / 1e12:.1f}" for stage in ("rollout", "update", "render"))
    gpus = f"{row['ranks']} {row['machine'].upper()}"
    title = "<br>".join(f"`{each}`" for each in (name, *row["same"]))
    cells = [title, gpus, f"{row['peak'] / 1e9:.1f}", row["in"], *peaks, flops, f"{row['modelled']:.2f}, {row['ideal']:.2f}"]
    return f"| {' | '.join([*cells, format(row['hours'], '.0f')])} |"


def _units(name: str, row: dict[str, Any]) -> list[str]:
    lines = []
    for unit, work in row["units"].items():
        device, host = 1000 * work["device"], 1000 * work["host"]
        cells = [f"`{name}`", unit, f"{work['kernels']:.0f}", f"{work['waits']:.2g}", f"{max(device, host):.1f}", f"{device:.1f}"]
        lines.append(f"| {' | '.join([*cells, f'{host:.1f}'])} |")
    return lines


def insert(page: Path, mark: str, text: str) -> None:
    """Replace what stands between the two marks of a page."""
    before, _, after = page.read_text(encoding="utf-8").split(mark)
    page.write_text(f"{before}{mark}\n\n{text}\n\n{mark}{after}", encoding="utf-8")


def main(chosen: list[str]) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    for name, members in groups(chosen).items():
        same = [each for each in members if each != name]
        found = {**in_own_process(rehearse_one, name), "same": same, "digest": digest(name)}
        rows = {**kept(), name: found}
        order = names()
        rows = {each: rows[each] for each in sorted(rows, key=order.index)}
        KEPT.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        print(_row(name, found), flush=True)
    insert(PAGE, MARK, tables(kept()))


if __name__ == "__main__":
    main(sys.argv[1:])
