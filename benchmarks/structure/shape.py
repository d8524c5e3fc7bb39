"""`make shape`: measures the size of the source tree, import cycles, the cold start, and how many docstrings cite a source.

    python benchmarks/structure/shape.py                                  # this repository
    python benchmarks/structure/shape.py --compare benchmarks/structure/shape_before.json
    python benchmarks/structure/shape.py --against ../before              # another checkout; both are timed in turn
    python benchmarks/structure/shape.py --lists                          # list the cycles, duplicates and short files
    python benchmarks/structure/shape.py --compare benchmarks/structure/shape_before.json --page docs/architecture.md

The script assumes no module names, except the console entry in `pyproject.toml` and the model families below.
"""

import argparse
import ast
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shape_counts import read, structure

ROOT = Path(__file__).parents[2]
PROBE = Path(__file__).with_name("shape_probe.py")
RECIPE = "recipes/playground/grpo.jsonnet"
OWN_FAMILY = ("playground", "qwen")
"""Words in the paths of the modules of the recipe's model family (the playground's model is a small Qwen-Image-Edit) and, outside
of ``models``, of the recipe's data, which are scenes of the playground."""
OTHER_FAMILIES = ("sd3", "flux", "z_image", "emu3", "janus", "ip_adapter")
Rows = dict[str, Any]
"""A table: the first column of each row, mapped to a value or to a list of values."""


def cold_starts(trees: Sequence[Path]) -> list[Rows]:
    """Measure the seconds and the imports up to the first sampling step. The trees take turns; the first round is a warm-up."""
    found: list[dict[str, list[Any]]] = [defaultdict(list) for _ in trees]
    entries = [(_console_entry(tree), _recipe_reader(tree)) for tree in trees]
    for turn in range(8):
        for tree, (entry, reader), figures in zip(trees, entries, found, strict=True):
            measured: dict[str, Any] = {
                "help": _seconds(tree, ["-c", f"from {entry.replace(':', ' import ')} as main; main(['--help'])"])
            }
            if turn < 4:
                measured["load"] = _probe(tree, "load", reader)
                measured["train"] = _probe(tree, "train", entry)
                model = measured["train"]["model"].rpartition(".")[0]
                measured["torch"] = _seconds(tree, ["-c", "import torch"])
                measured["model"] = _seconds(tree, ["-c", f"import {model}"])
            if turn:
                for name, value in measured.items():
                    figures[name].append(value)
    counted = [_probe(tree, "train", entry, "--calls") for tree, (entry, _) in zip(trees, entries, strict=True)]
    return [_cold_start(*pair) for pair in zip(found, counted, strict=True)]


def _cold_start(figures: Mapping[str, Sequence[Any]], counted: Any) -> Rows:
    load, train = figures["load"], figures["train"]
    modules, ran = Counter(map(_family, counted["modules"])), Counter(map(_family, counted["functions"]))
    calls: Counter[str] = Counter()
    for name, number in counted["functions"].items():
        calls[_family(name)] += number
    rows: Rows = {
        "`retouch --help`, seconds": round(statistics.median(figures["help"]), 3),
        "recipe read: seconds": round(statistics.median(found["seconds"] for found in load), 2),
        "recipe read: modules of the project imported": len(load[0]["modules"]),
        "recipe read: torch imported": "yes" if load[0]["torch"] else "no",
        "first sampling step: seconds": round(statistics.median(found["seconds"] for found in train), 2),
        "of these, importing torch alone": round(statistics.median(figures["torch"]), 2),
        "of these, importing torch and the model's class alone": round(statistics.median(figures["model"]), 2),
        "first sampling step: modules of the project imported": sum(modules.values()),
        "first sampling step: modules imported beyond the own family": sum(modules.values()) - modules["own family"],
        "first sampling step: files that ran a function": sum(ran.values()),
        "first sampling step: files that ran a function beyond the own family": sum(ran.values()) - ran["own family"],
        "first sampling step: the same, also without the own data": sum(ran.values()) - ran["own family"] - ran["own data"],
        "first sampling step: functions called": sum(calls.values()),
    }
    for family in ("own family", "own data", "shared model code", "other families", "the rest"):
        rows[f"of these, {family}: imported / files / functions"] = f"{modules[family]} / {ran[family]} / {calls[family]}"
    rows["first call"] = f"`{counted['model'].rpartition('.')[2]}` from `{counted['caller']}`"
    return rows


def _family(module: str) -> str:
    if any(word in module for word in OWN_FAMILY):
        return "own data" if "playground" in module and ".models." not in module else "own family"
    if any(word in module for word in OTHER_FAMILIES):
        return "other families"
    return "shared model code" if ".models." in module else "the rest"


def _console_entry(tree: Path) -> str:
    entry: str = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["scripts"]["retouch"]
    return entry


def _recipe_reader(tree: Path) -> str:
    """Find the public function `load...(path, ...) -> Recipe` in any module. Returns `module:name`."""
    for source in read(tree / "src" / "retouch").values():
        for node in source.tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("load"):
                returned = node.returns and ast.unparse(node.returns).strip("'")
                if returned == "Recipe":
                    return f"{source.name}:{node.name}"
    raise SystemExit(f"{tree}: no function `load...(...) -> Recipe`; `_recipe_reader` looks for that")


def _probe(tree: Path, task: str, entry: str, *flags: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        rest = [folder, str(time.time()), *flags] if task == "train" else []
        return json.loads(_run(tree, [str(PROBE), task, entry, RECIPE, *rest]).splitlines()[-1])


def _seconds(tree: Path, arguments: Sequence[str]) -> float:
    start = time.perf_counter()
    _run(tree, arguments)
    return time.perf_counter() - start


def _run(tree: Path, arguments: Sequence[str]) -> str:
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{tree}: {' '.join(arguments)}\n{done.stderr[-2000:]}")
    return done.stdout


def tables(now: Mapping[str, Any], before: Mapping[str, Any] | None) -> Iterator[str]:
    """The figures as Markdown tables, next to the earlier figures if ``before`` is given."""
    yield f"Commit {now['commit']}" + (f", before: {before['commit']}" if before else "")
    titles = {
        "folders": ("folder", ["files", "lines"]),
        "totals": ("size", [""]),
        "imports": ("imports", [""]),
        "cold start": ("cold start", [""]),
        "citations": ("public functions and classes", ["all", "with a docstring", "that cites a source"]),
    }
    for section, (title, columns) in titles.items():
        if section not in now:
            continue
        sides = [now] if before is None else [before, now]
        words = ["now"] if before is None else ["before", "now"]
        headers = [title, *(f"{column} {word}".strip() for column in columns for word in words)]
        names = dict.fromkeys(name for side in sides for name in side.get(section, {}))
        yield f"\n| {' | '.join(headers)} |\n|{' --- |' * len(headers)}"
        for name in names:
            values = [_row(side.get(section, {}).get(name), len(columns)) for side in sides]
            cells = [str(value[at]) for at in range(len(columns)) for value in values]
            yield f"| {name} | {' | '.join(cells)} |"


def _row(value: Any, columns: int) -> list[Any]:
    if value is None:
        return ["-"] * columns
    return value if isinstance(value, list) else [value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout to measure; default: this repository")
    parser.add_argument("--against", type=Path, help="another checkout for the column `before`; both are measured in turn")
    parser.add_argument("--compare", type=Path, help="file written by --json, for the column `before`")
    parser.add_argument("--json", type=Path, help="file for the figures of the tree")
    parser.add_argument("--static", action="store_true", help="count only, without the cold start")
    parser.add_argument("--lists", action="store_true", help="also list the cycles, duplicate class names and short files")
    parser.add_argument("--page", type=Path, help="also write the tables into this page, between its lines `<!-- shape -->`")
    arguments = parser.parse_args()
    trees = [path.resolve() for path in (arguments.tree, arguments.against) if path is not None]
    measured = [structure(tree / "src" / "retouch") for tree in trees]
    lists = measured[0].pop("lists")
    for figures, tree in zip(measured, trees, strict=True):
        figures.pop("lists", None)
        figures["commit"] = subprocess.check_output(["git", "describe", "--always", "--dirty"], cwd=tree, text=True).strip()
    if not arguments.static:
        for figures, rows in zip(measured, cold_starts(trees), strict=True):
            figures["cold start"] = rows
    before = measured[1] if arguments.against else json.loads(arguments.compare.read_text()) if arguments.compare else None
    lines = list(tables(measured[0], before))
    print("\n".join(lines))
    if arguments.page:
        head, _, tail = arguments.page.read_text().split("<!-- shape -->\n")
        arguments.page.write_text("<!-- shape -->\n".join([head, "\n" + "\n".join(lines) + "\n\n", tail]))
    if arguments.lists:
        print(f"\n{json.dumps(lists, indent=1)}")
    if arguments.json:
        text = json.dumps(measured[0], indent=2, ensure_ascii=False)
        arguments.json.write_text(re.sub(r"\[\s+([\d,\s]+?)\s+\]", lambda row: f"[{' '.join(row[1].split())}]", text) + "\n")


if __name__ == "__main__":
    main()
