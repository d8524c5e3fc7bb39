"""`make results`: the claims of docs/results.md, measured. Runs each recipe over seeds and writes the page.

A run is kept under benchmarks/cache/ by its resolved recipe and the shipped weights that it uses, with its first steps and with the
code that made it. Code that has changed since must make the same first steps again; where it does not, all is run again.
`--only RECIPE` runs some, `--seeds 0 1 2` chooses the seeds.
"""

import argparse
import ast
import hashlib
import json
import math
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results_page import SECTIONS, Entry, page
from results_plot import draw

from retouch.recipe.emu3 import PlaygroundEmu3
from retouch.recipe.ip_adapter import IpAdapter
from retouch.recipe.recipe import Recipe, load

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "benchmarks" / "cache"
PAGE = ROOT / "docs" / "results.md"
PLOTS = ROOT / "docs" / "pictures"
RUNS = ROOT / "runs" / "results"
SOURCE = ROOT / "src"
WEIGHTS = SOURCE / "retouch" / "playground" / "weights"
SHIPPED = {
    "playground": "editor",
    "playground-writer": "writer",
    "playground-painter": "painter",
    "playground-enhancer": "enhancer",
    "playground-words": "words",
}
# What runs of the playground compute with; how they are assembled and kept decides no number.
DENOISING = (
    "retouch.training.loop",
    "retouch.data.sampler",
    "retouch.models.common.guidance",
    "retouch.models.qwen_image.edit",
    "retouch.objectives.nft",
    "retouch.objectives.policy_gradient",
    "retouch.objectives.supervised",
    "retouch.playground.judges.judge",
    "retouch.playground.world.tasks",
    "retouch.policies.denoising.policy",
    "retouch.renderers.latents",
)
WRITING = (
    "retouch.training.loop",
    "retouch.data.sampler",
    "retouch.models.qwen_image.edit",
    "retouch.models.qwen_image.responses",
    "retouch.models.qwen_vl.model",
    "retouch.objectives.cross_entropy",
    "retouch.objectives.policy_gradient",
    "retouch.playground.world.indirect",
    "retouch.playground.judges.judge",
    "retouch.playground.world.tasks",
    "retouch.policies.autoregressive.policy",
    "retouch.renderers.blind",
    "retouch.renderers.responses",
)
REWRITING = (
    "retouch.training.loop",
    "retouch.data.sampler",
    "retouch.models.qwen_image.model",
    "retouch.models.qwen_vl.model",
    "retouch.objectives.cross_entropy",
    "retouch.objectives.policy_gradient",
    "retouch.playground.judges.painting_judge",
    "retouch.playground.world.paintings",
    "retouch.policies.autoregressive.policy",
    "retouch.renderers.blind",
    "retouch.renderers.prompts",
)
IMAGE_TOKENS = (
    "retouch.training.loop",
    "retouch.data.sampler",
    "retouch.models.emu3.model",
    "retouch.objectives.cross_entropy",
    "retouch.objectives.policy_gradient",
    "retouch.playground.judges.judge",
    "retouch.playground.world.tasks",
    "retouch.policies.autoregressive.policy",
    "retouch.renderers.codes",
)
WORDS = (
    "retouch.training.loop",
    "retouch.data.sampler",
    "retouch.models.flux.fill",
    "retouch.objectives.actor_critic",
    "retouch.objectives.awm",
    "retouch.objectives.dpo",
    "retouch.objectives.nft",
    "retouch.objectives.policy_gradient",
    "retouch.objectives.supervised",
    "retouch.playground.world.words",
    "retouch.policies.denoising.policy",
    "retouch.renderers.latents",
    "retouch.rewards.text.ocr",
)
# Beside what the model computes with.
REFERENCED = (
    "retouch.models.ip_adapter.image_encoder",
    "retouch.models.ip_adapter.adapter",
    "retouch.models.ip_adapter.reference_model",
    "retouch.playground.judges.sign_judge",
    "retouch.policies.denoising.reference_dropout",
)
# By the kind of renderer; a policy without one makes its own pictures, and is named by its model where that is another.
DECIDING = {None: DENOISING, "response": WRITING, "prompt": REWRITING, "codes": IMAGE_TOKENS, "playground-words": WORDS}
TRACED = 3
TRACE = ("reward/mean", "policy/loss", "policy/grad_norm")
# What costs time before and beside the first steps, and does not change them.
BRIEFLY = ("eval.tasks=3", "eval.best_of_k=0", "samples.tasks=1", "samples.every=0", "checkpoints.every=0", "trackers=[]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="recipes to run; the page is written from what is cached")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    arguments = parser.parse_args()
    found: dict[Entry, list[dict]] = {}
    for entry in (entry for section in SECTIONS for entry in section.entries):
        kept = {seed: recall(entry, seed) for seed in arguments.seeds if seed in entry.seeds}
        may_run = not arguments.only or entry.recipe in arguments.only
        for seed, known in kept.items():
            if not (known and holds(entry, known, list(kept.values()))):
                kept[seed] = run(entry, seed) if may_run else None
        results = [known["result"] for known in kept.values() if known]
        if results:
            found[entry] = results
    for section in SECTIONS:
        if section.plot is not None and any(entry in found for entry in section.entries):
            draw({entry.name: found[entry][0]["curve"] for entry in section.entries if entry in found}, PLOTS / section.plot)
    PAGE.write_text(page(found))
    print(f"wrote {PAGE.relative_to(ROOT)}")


def recall(entry: Entry, seed: int) -> dict | None:
    """What is kept of a run."""
    kept = place(entry, seed)
    return json.loads(kept.read_text()) if kept.exists() else None


def holds(entry: Entry, known: dict, all_seeds: Sequence[dict | None]) -> bool:
    """Whether the code as it is makes these numbers: it made them, or it makes the first steps of one of the seeds again."""
    code = code_digest(load(ROOT / entry.recipe))
    if code not in known["code"]:
        traced = next((other for other in all_seeds if other and other["trace"]), None)
        if traced is None or not same(first_steps(entry, traced["result"]["seed"]), traced["trace"]):
            return False
        for other in filter(None, all_seeds):
            other["code"] = sorted({*other["code"], code})
            keep(entry, other)
    return True


def run(entry: Entry, seed: int) -> dict:
    """Run it whole, and keep what came of it."""
    folder = RUNS / f"{Path(entry.recipe).stem}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    before = children_seconds()
    subprocess.run(command(entry, seed, folder), cwd=ROOT, check=True)
    spent = children_seconds() - before
    code = code_digest(load(ROOT / entry.recipe))
    known = {"result": {"seed": seed, **measured(folder), "cpu_seconds": spent}, "trace": trace(folder), "code": [code]}
    keep(entry, known)
    return known


def children_seconds() -> float:
    """The processor's, of all that this process started and that has ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def first_steps(entry: Entry, seed: int) -> list[dict]:
    """What the first steps of a run tell, of one that is ended after them."""
    folder = RUNS / f"{Path(entry.recipe).stem}-{seed}-first-steps"
    shutil.rmtree(folder, ignore_errors=True)
    process = subprocess.Popen([*command(entry, seed, folder), *(part for key in BRIEFLY for part in ("--set", key))], cwd=ROOT)
    while process.poll() is None and len(trace(folder)) < TRACED:
        time.sleep(0.5)
    process.terminate()
    process.wait()
    return trace(folder)


def command(entry: Entry, seed: int, folder: Path) -> list[str]:
    settings = (f"seed={seed}", f"name={folder.name}", f"out={folder.parent}")
    train = [sys.executable, "-m", "retouch.cli", "train", entry.recipe]
    return [*train, *(part for setting in settings for part in ("--set", setting))]


def trace(folder: Path) -> list[dict]:
    """The first steps of a run's metrics, as far as they are there."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    told = [json.loads(line) for line in lines[:TRACED] if line.endswith("\n")]
    return [{name: line[name] for name in TRACE if name in line} for line in told]


def same(found: Sequence[dict], wanted: Sequence[dict]) -> bool:
    """Whether two traces are equal but for rounding, which may differ between machines."""
    if [sorted(step) for step in found] != [sorted(step) for step in wanted]:
        return False
    pairs = [(step[name], other[name]) for step, other in zip(found, wanted, strict=True) for name in step]
    return all(math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-6) for a, b in pairs)


def place(entry: Entry, seed: int) -> Path:
    """Where a run is kept: named by the hash of its resolved recipe and of the shipped weights that it uses."""
    recipe = load(ROOT / entry.recipe, [f"seed={seed}", "name=any", "out=any"])
    document: Any = recipe.document()
    if "renderer" in document:
        document["renderer"]["device"] = None  # kept runs are named by recipes that had this key
    whole = hashlib.sha256(json.dumps(document, sort_keys=True).encode())
    for file in sorted(file for name in used_weights(recipe) for file in (WEIGHTS / name).rglob("*.safetensors")):
        whole.update(file.relative_to(SOURCE).as_posix().encode() + hashlib.sha256(file.read_bytes()).digest())
    return CACHE / f"{whole.hexdigest()[:32]}.json"


def keep(entry: Entry, known: dict) -> None:
    CACHE.mkdir(exist_ok=True)
    place(entry, known["result"]["seed"]).write_text(json.dumps(known, indent=2) + "\n")


def used_weights(recipe: Recipe) -> set[str]:
    """Folders of the shipped weights that the recipe's models are read from."""
    model = recipe.policy.model
    if isinstance(model, PlaygroundEmu3):
        return {"emu3/autoencoder", f"emu3/{model.start}"}
    sight = {"sight"} if shows_references(recipe) else set()
    return sight | {SHIPPED[model.kind] for model in (model, recipe.image_model) if model.kind in SHIPPED}


def shows_references(recipe: Recipe) -> bool:
    return isinstance(recipe.policy.train, IpAdapter)


def code_digest(recipe: Recipe) -> str:
    """SHA-256 of the code that such a run trains with: what it does, not its words."""
    whole = hashlib.sha256()
    own = recipe.policy.model.kind
    modules = DECIDING[own if own in DECIDING else recipe.renderer and recipe.renderer.kind]
    for file in with_imports((*modules, *REFERENCED) if shows_references(recipe) else modules):
        if file.name != "types.py":  # declares, and computes nothing
            whole.update(file.relative_to(SOURCE).as_posix().encode() + deeds(file.read_text()).encode())
    return whole.hexdigest()[:16]


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
    phases = [line["phase"] for line in metrics]
    warm = next((told["table"] for told in evals if 0 < told["step"] == phases.count("warm-up")), None)
    return {
        "summary": summary,
        "before": evals[0]["table"],
        **({} if warm is None else {"warm": warm}),
        "after": evals[-1]["table"],
        "ratio_max_first": max(ratios) if ratios else None,
        "curve": curve(folder, evals, summary["column"]),
    }


def curve(folder: Path, evals: Sequence[dict], column: str) -> list[tuple[float, float]]:
    """(seconds of the processor in the training steps before it, mean of the column) of each evaluation."""
    spent = [json.loads(line) for line in (folder / "timings.jsonl").read_text().splitlines()]
    return [
        (round(sum(line["cpu/step"] for line in spent if line["step"] <= told["step"]), 1), told["table"]["all"][column])
        for told in evals
    ]


if __name__ == "__main__":
    main()
