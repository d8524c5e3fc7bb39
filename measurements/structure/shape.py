"""`make shape`: the size of each package against its budget, what a step enters, and the cold start.

    python measurements/structure/shape.py                 # this repository; --tree measures another checkout
    python measurements/structure/shape.py --static        # only the table of sizes
    python measurements/structure/shape.py --check         # `make lint`: fails if a figure is above its budget
    python measurements/structure/shape.py --lower         # lowers the budgets to the present figures, and adds missing ones

The script assumes no module names, except the console entry in `pyproject.toml` and the model families below.
"""

import argparse
import ast
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shape_counts import BUDGETS, figures, load_budgets, lowered, over_budget, packages, walk

ROOT = Path(__file__).parents[2]
PROBE = Path(__file__).with_name("shape_probe.py")
RECIPE = "recipes/playground/grpo.jsonnet"
QUICKSTART = "recipes/quickstart.jsonnet"
OWN_FAMILY = ("retouch_worlds", "qwen")
"""Words in the paths of the modules of the recipe's model family (the playground's model is a small Qwen-Image-Edit) and, outside
of ``models``, of the recipe's data, which are scenes of the playground."""
OTHER_FAMILIES = ("sd3", "flux", "z_image", "emu3", "janus", "ip_adapter")
TITLES = {
    "lines": "lines",
    "files": "files",
    "functions": "functions",
    "median_body": "median body, at least",
    "nested_imports": "imports in functions",
}


def size_table(tree: Path) -> Iterator[str]:
    """The figures of each package as a Markdown table; a cell has the figure, its budget and its goal."""
    budgets = load_budgets(ROOT)
    yield f"| now / budget / goal | {' | '.join(TITLES.values())} |\n|{' --- |' * (len(TITLES) + 1)}"
    for place, found in figures(tree).items():
        rows = [(found[name], budgets.get(place, {}).get(name, {})) for name in TITLES]
        cells = (f"{now:,} / {_number(row.get('budget'))} / {_number(row.get('goal'))}" for now, row in rows)
        yield f"| `{place}` | {' | '.join(cells)} |"


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def steps_table(tree: Path) -> Iterator[str]:
    """How much of the project the quickstart enters: functions and files, by a trace of one `collect` and of two steps."""
    found, goals = _train(tree, "steps", QUICKSTART), load_budgets(ROOT)["quickstart"]
    yield "| entered by the quickstart: now / goal | functions | files |\n| --- | --- | --- |"
    for title, key in (("one `collect`", "collect"), ("a run of two steps, from the command line to its end", "run")):
        functions, files = sum(found[key].values()), len(found[key])
        yield f"| {title} | {functions} / {goals[key]['functions']} | {files} / {goals[key]['files']} |"


def cold_start_table(tree: Path) -> Iterator[str]:
    """Seconds and imports up to the first sampling step: medians, after a warm-up."""
    seconds: dict[str, list[float]] = defaultdict(list)
    reader, entry = _recipe_reader(tree), _console_entry(tree)
    for turn in range(8):
        measured = {"help": _seconds(tree, f"from {entry.replace(':', ' import ')} as main; main(['--help'])")}
        if turn < 4:
            load = json.loads(_run(tree, [str(PROBE), "load", reader, RECIPE]))
            train = _train(tree, "train", RECIPE)
            model = train["model"].rpartition(".")[0]
            measured |= {"load": load["seconds"], "train": train["seconds"], "model": _seconds(tree, f"import {model}")}
        for name, value in measured.items() if turn else ():
            seconds[name].append(value)
    counted = _train(tree, "train", RECIPE, "--calls")
    modules, ran = Counter(map(_family, counted["modules"])), Counter(map(_family, counted["functions"]))
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    rows = {
        "`retouch --help`, seconds": f"{middle['help']:.3f}",
        "recipe read: seconds": f"{middle['load']:.2f}",
        "recipe read: torch imported": "yes" if load["torch"] else "no",
        "first sampling step: seconds": f"{middle['train']:.2f}",
        "of these, importing torch and the model's class alone": f"{middle['model']:.2f}",
        "first sampling step: modules of the project imported": modules.total(),
        "first sampling step: modules imported beyond the own family": modules.total() - modules["own family"],
        "first sampling step: files that ran a function": ran.total(),
        "first sampling step: the same, without the own family and the own data": ran.total() - ran["own family"] - ran["own data"],
        "first sampling step: functions called": sum(counted["functions"].values()),
    }
    yield "| cold start | |\n| --- | --- |"
    yield from (f"| {name} | {value} |" for name, value in rows.items())


def _family(module: str) -> str:
    if any(word in module for word in OWN_FAMILY):
        return "own data" if "retouch_worlds" in module and ".models." not in module else "own family"
    if any(word in module for word in OTHER_FAMILIES):
        return "other families"
    return "shared model code" if ".models." in module else "the rest"


def _console_entry(tree: Path) -> str:
    entry: str = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["scripts"]["retouch"]
    return entry


def _recipe_reader(tree: Path) -> str:
    """Find the public function `load...(path, ...) -> Recipe` in any module. Returns `module:name`."""
    for source in walk(*packages(tree)):
        for node in source.tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("load"):
                returned = node.returns and ast.unparse(node.returns).strip("'")
                if returned == "Recipe":
                    return f"{source.name}:{node.name}"
    raise SystemExit(f"{tree}: no function `load...(...) -> Recipe`; `_recipe_reader` looks for that")


def _train(tree: Path, task: str, recipe: str, *flags: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        words = [str(PROBE), task, _console_entry(tree), recipe, folder, str(time.time()), *flags]
        return json.loads(_run(tree, words).splitlines()[-1])


def _seconds(tree: Path, code: str) -> float:
    start = time.perf_counter()
    _run(tree, ["-c", code])
    return time.perf_counter() - start


def _run(tree: Path, arguments: Sequence[str]) -> str:
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{tree}: {' '.join(arguments)}\n{done.stderr[-2000:]}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout to measure; default: this repository")
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--static", action="store_true", help="only the table of sizes, which runs nothing of the project")
    task.add_argument("--check", action="store_true", help="fail if a figure is above its budget")
    task.add_argument("--lower", action="store_true", help=f"write the present figures into {BUDGETS} where they are lower or new")
    arguments = parser.parse_args()
    tree = arguments.tree.resolve()
    if arguments.lower:
        (tree / BUDGETS).write_text(lowered(tree), encoding="utf-8")
    elif arguments.check:
        if found := [*over_budget(tree)]:
            advice = f"Remove code, or raise the budget in {BUDGETS} in a commit of its own that says why."
            raise SystemExit("\n".join([*found, advice]))
    else:
        tables = [size_table(tree)] if arguments.static else [size_table(tree), steps_table(tree), cold_start_table(tree)]
        print("\n\n".join("\n".join(table) for table in tables))


if __name__ == "__main__":
    main()
