"""`make results`: the claims of docs/results.md, measured. Runs each recipe over seeds and writes the page.

A run whose resolved recipe and code version (the base weights and the package's sources) have been run before is not run again:
its summary is kept under benchmarks/cache/, by hash. `--only NAME` runs some, `--seeds 0 1 2` chooses the seeds.
"""

import argparse
import ast
import hashlib
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from retouch.runs.recipe import Recipe, load

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "benchmarks" / "cache"
PAGE = ROOT / "docs" / "results.md"
RUNS = ROOT / "runs" / "results"
SOURCE = ROOT / "src"
WEIGHTS = SOURCE / "retouch" / "playground" / "weights"
# What runs of the playground compute with; how they are assembled and kept decides no number.
DENOISING = (
    "retouch.loop",
    "retouch.data.sampler",
    "retouch.models.qwen_image_edit",
    "retouch.objectives.nft",
    "retouch.objectives.policy_gradient",
    "retouch.objectives.supervised",
    "retouch.playground.judge",
    "retouch.playground.tasks",
    "retouch.policies.denoising",
    "retouch.policies.guidance",
    "retouch.renderers.latents",
)
SHIPPED = {"playground": "editor", "playground-writer": "writer"}


@dataclass(frozen=True)
class Entry:
    """A row of the page: a recipe, and what it is there for."""

    name: str
    recipe: str
    about: str


ENTRIES = (
    Entry("GRPO (headline)", "recipes/quickstart.jsonnet", "clipped policy gradient, CPS, window of two steps"),
    Entry("DiffusionNFT", "recipes/playground/nft.jsonnet", "forward process, no log-probabilities"),
    Entry("supervised control", "recipes/playground/supervised.jsonnet", "the base's own data and objective, as many samples"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="names of rows to run; the page is written from what is cached")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    arguments = parser.parse_args()
    found: dict[str, list[dict]] = {}
    for entry in ENTRIES:
        for seed in arguments.seeds:
            wanted = not arguments.only or entry.name in arguments.only
            result = outcome(entry, seed, may_run=wanted)
            if result is not None:
                found.setdefault(entry.name, []).append(result)
    PAGE.write_text(page(found))
    print(f"wrote {PAGE.relative_to(ROOT)}")


def outcome(entry: Entry, seed: int, *, may_run: bool) -> dict | None:
    """The numbers of one run, from the cache or from running it; None where it is not cached and may not run."""
    key = digest(load(ROOT / entry.recipe, [f"seed={seed}", "name=any", "out=any"]))
    kept = CACHE / f"{key}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    if not may_run:
        return None
    name = f"{Path(entry.recipe).stem}-{seed}-{key[:8]}"
    folder = RUNS / name
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "retouch.cli", "train", entry.recipe, "--set", f"seed={seed}", "--set", f"name={name}"]
    subprocess.run([*command, "--set", f"out={RUNS}"], cwd=ROOT, check=True)
    result = {"seed": seed, **measured(folder)}
    CACHE.mkdir(exist_ok=True)
    kept.write_text(json.dumps(result, indent=2) + "\n")
    return result


def digest(recipe: Recipe) -> str:
    """SHA-256 of the resolved recipe, the shipped weights that it uses and the code that trains (what it does, not its words)."""
    whole = hashlib.sha256(json.dumps(recipe.document(), sort_keys=True).encode())
    for file in sorted(file for name in used_weights(recipe) for file in (WEIGHTS / name).rglob("*.safetensors")):
        whole.update(file.relative_to(SOURCE).as_posix().encode() + hashlib.sha256(file.read_bytes()).digest())
    for file in with_imports(DENOISING):
        if file.name == "types.py":  # declares, and computes nothing
            continue
        whole.update(file.relative_to(SOURCE).as_posix().encode() + deeds(file.read_text()).encode())
    return whole.hexdigest()[:32]


def used_weights(recipe: Recipe) -> set[str]:
    """Folders of the shipped weights that the recipe's models are read from."""
    return {SHIPPED[model.kind] for model in (recipe.policy.model, recipe.image_model) if model.kind in SHIPPED}


def with_imports(modules: Sequence[str]) -> list[Path]:
    """The files of the package's modules, and of all that these import from it, sorted."""
    found: set[Path] = set()
    open_ends = list(modules)
    while open_ends:
        file = SOURCE / (open_ends.pop().replace(".", "/") + ".py")
        if not file.is_file() or file in found:
            continue
        found.add(file)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("retouch"):
                open_ends += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return sorted(found)


def deeds(code: str) -> str:
    """The code without docstrings and annotations of arguments, which change no number."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.dump(tree)


def measured(folder: Path) -> dict:
    """What the page says of a run."""
    summary = json.loads((folder / "summary.json").read_text())
    evals = [json.loads(line) for line in (folder / "evals.jsonl").read_text().splitlines()]
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    ratios = [line["policy/ratio_max_first"] for line in metrics if "policy/ratio_max_first" in line]
    return {
        "summary": summary,
        "before": evals[0]["table"],
        "after": evals[-1]["table"],
        "ratio_max_first": max(ratios) if ratios else None,
    }


def page(found: dict[str, list[dict]]) -> str:
    """docs/results.md."""
    lines = [
        "# Results",
        "",
        "Held-out tasks of the playground: scenes, instructions and seeds that no training saw. Compound edits (two or three in "
        "one instruction) were never in the supervised phase of the base. Every figure here is made by `make results`.",
        "",
        "Share of gap: (after - before) / (ceiling - before) of the overall score on compound edits, where the ceiling is the "
        "exact target through the autoencoder. Best of k: the best of k samples of the base, picked by the judge.",
        "",
    ]
    lines += [*headline(found), "", *detail(found)]
    return "\n".join(lines) + "\n"


def headline(found: dict[str, list[dict]]) -> list[str]:
    lines = [
        "| recipe | seed | before | after | gain (95 %) | share of gap | best of k | ceiling | singles | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, results in found.items():
        for result in results:
            s = result["summary"]
            singles = result["after"]["complexity=1"]["overall"] - result["before"]["complexity=1"]["overall"]
            low, high = s["gain_ci95"]
            gain = f"{s['gain']:+.2f} ({low:+.2f} to {high:+.2f})"
            beside = f"{s['best_of_k']:.2f} (k={s['k']}) | {s['ceiling']:.2f}"
            lines.append(
                f"| {name} | {result['seed']} | {s['before']:.2f} | {s['after']:.2f} | {gain} | {s['gap_closed']:.2f} | {beside} | "
                f"{singles:+.2f} | {s['cost']['training seconds']:.0f} |"
            )
        shares = [result["summary"]["gap_closed"] for result in results]
        lines.append(f"| **{name}** | mean of {len(shares)} |  |  |  | **{statistics.mean(shares):.2f}** |  |  |  |  |")
    return lines


def detail(found: dict[str, list[dict]]) -> list[str]:
    lines = [
        "## What changed, column by column",
        "",
        "Means over the seeds, before -> after.",
        "",
        "| recipe | tasks | overall | IF | IP | PQ | exact |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, results in found.items():
        for row in ("complexity=1", "complexity=2", "complexity=3"):
            cells = []
            for column in ("overall", "IF", "IP", "PQ", "exact"):
                before, after = (statistics.mean(result[when][row][column] for result in results) for when in ("before", "after"))
                cells.append(f"{before:.2f} -> {after:.2f}")
            lines.append(f"| {name} | {row.replace('=', ' ')} | " + " | ".join(cells) + " |")
    lines += ["", "Share of edits that are done, by kind, over all held-out tasks:", ""]
    kinds = ("recolour", "reshape", "remove", "add", "move")
    lines += ["| recipe | " + " | ".join(kinds) + " |", "| --- |" + " --- |" * len(kinds)]
    for name, results in found.items():
        cells = []
        for kind in kinds:
            before, after = (
                statistics.mean(result[when]["all"][f"success/{kind}"] for result in results) for when in ("before", "after")
            )
            cells.append(f"{before:.2f} -> {after:.2f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "A gain that one kind of edit carries, or that costs more than 0.3 of IP, is a shortcut, whatever the mean says.",
        "",
    ]
    return lines + [f"- {name}: {shortcut(results, kinds)}" for name, results in found.items()]


def shortcut(results: list[dict], kinds: tuple[str, ...]) -> str:
    """What the change in IP and in each kind of edit says of a gain."""

    def change(row: str, column: str) -> float:
        return statistics.mean(result["after"][row][column] - result["before"][row][column] for result in results)

    preserved = change("all", "IP")
    rises = {kind: change("all", f"success/{kind}") for kind in kinds}
    told = ", ".join(f"{kind} {rise:+.2f}" for kind, rise in sorted(rises.items(), key=lambda item: -item[1]))
    most, second = sorted(rises.values(), reverse=True)[:2]
    carried = most > 0.05 and most > 3 * max(second, 0.0)
    verdict = "a shortcut" if carried or preserved < -0.3 else "no shortcut by this rule"
    return f"IP {preserved:+.2f}; done edits {told}: {verdict}."


if __name__ == "__main__":
    main()
