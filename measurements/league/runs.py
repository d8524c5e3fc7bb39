"""One run of the league: starts `retouch train`, and keeps a record of the run."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from budget import spent
from worlds import SPLIT, World, untrained

import retouch.run.evaluation
import retouch.run.recorder  # noqa: F401  (these three are imported once before the forks, not in each)
from retouch.cli import main
from retouch.config.consent import VARIABLE
from retouch.recipe.recipe import Recipe
from retouch.run.build import build_sets

FLOOR = -1.0
"""The share of the gap that a run gets if it ended with an error."""
DIVERGED = -0.1
"""A run has diverged if it ended with an error or with a smaller share of the gap than this."""


def train(recipe: Recipe, folder: Path, *, world: World) -> dict[str, Any]:
    """The record of a run (see ``train_alone``), whose score is measured against the base model as in all other runs of the world.

    If the recipe has its own number of denoising steps in evaluations, the base model is evaluated again with the number of the
    world, in a run of one step. The record then has the two numbers and the base model's score with the recipe's number.
    """
    made, base = train_alone(recipe, folder, world=world), untrained(world, recipe)
    if base is None or made["ended"] != "finished":
        return made
    other = train_alone(base, folder, world=world)
    if other["ended"] != "finished":
        raise RuntimeError(f"the base model was not evaluated: {other['ended']}")
    (first, *later), own = made["curve"], recipe.eval.num_steps
    standard = base.eval.num_steps or base.rollout.num_steps
    made |= {"few_steps": {"steps": own, "standard": standard, "base": first[1]}, "curve": [other["curve"][0], *later]}
    if "before" in made:
        made["before"] = other["before"]
    if "preservation" in made:
        made["preservation"] = [other["preservation"][0], made["preservation"][1]]
    return made


def train_alone(recipe: Recipe, folder: Path, *, world: World) -> dict[str, Any]:
    """Run `retouch train` on the recipe in ``folder`` and return its record; the folder is removed if the run has finished.

    The run is a forked process, so that the libraries are imported once for many runs. CPU seconds are those of this forked process
    and its children, as counted by the operating system. Raises RuntimeError if the run made no step or was stopped by a signal:
    such an end is not a result of the algorithm.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    file, log = folder / "given.json", folder / "output.txt"
    file.write_text(json.dumps({**recipe.document(), "name": "run", "out": str(folder)}))
    process = os.fork()
    if process == 0:
        _command(["train", str(file)], log, allow_imports=world.allow_imports)
    try:
        _, status, usage = os.wait4(process, 0)
    except BaseException:
        os.kill(process, signal.SIGKILL)
        raise
    code, metrics = os.waitstatus_to_exitcode(status), folder / "run" / "metrics.jsonl"
    ended = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1] if code else "finished"
    if code and (not 0 < code < 128 or not metrics.exists()):
        raise RuntimeError(f"{folder}: exit code {code}: {ended}")
    made = {"steps": recipe.steps, "images": _images(recipe, metrics), "evaluations": spent(recipe, recipe.steps or 0)}
    made |= {"cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1), "ended": ended[:300]}
    if code:
        return made
    found = made | measured(recipe, folder / "run", world=world)
    shutil.rmtree(folder)
    return found


def _command(words: list[str], log: Path, *, allow_imports: Sequence[str]) -> NoReturn:
    """Run a command of `retouch` in this process, with its output in ``log``, and end the process."""
    code = 1
    try:
        output = os.open(log, os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ[VARIABLE] = ",".join(allow_imports)
        code = main(words)
    finally:
        sys.stdout.flush()
        os._exit(code)


def measured(recipe: Recipe, folder: Path, *, world: World) -> dict[str, Any]:
    """The record of a run's folder: the curve of mean scores over network evaluations, seconds, preservation.

    The record of a final run also has ``tasks``, the number of held-out tasks in each stratum, and ``before``, ``between`` and
    ``after``, the scores of these tasks, stratum by stratum; ``between`` has one list for each evaluation during training.
    """
    evals = [json.loads(line) for line in (folder / "evals.jsonl").read_text().splitlines()]
    seconds = [json.loads(line)["cpu/step"] for line in (folder / "timings.jsonl").read_text().splitlines()]
    tag, values = world.strata
    headline = "headline" if "headline" in evals[0]["table"] else "all"
    first, last = evals[0], evals[-1]
    found = {
        "training_cpu_seconds": round(sum(seconds), 1),
        "ceiling": round(json.loads((folder / "evals" / "baselines.json").read_text())["ceiling"], 4),
        "curve": [[spent(recipe, each["step"]), round(each["table"][headline][world.column], 4)] for each in evals],
    }
    if world.preservation is not None:
        found["preservation"] = [round(each["table"][headline][world.preservation], 4) for each in (first, last)]
    if recipe.eval.split == SPLIT["final"]:
        found["tasks"] = [round(first["table"][f"{tag}={value}"]["n"]) for value in values]
        found |= {"before": _scores(recipe, folder, first["step"], world), "after": _scores(recipe, folder, last["step"], world)}
        found["between"] = [_scores(recipe, folder, each["step"], world) for each in evals[1:-1]]
    return found


def _scores(recipe: Recipe, folder: Path, step: int, world: World) -> list[float]:
    """The scores of the held-out tasks after a step, stratum by stratum."""
    tag, values = world.strata
    stored = json.loads((folder / "evals" / f"step-{step:06d}.json").read_text())
    pairs = list(zip(_tags(recipe, tag), stored["scores"][world.column], strict=True))
    return [round(score, 3) for value in values for of, score in pairs if of == value]


def _tags(recipe: Recipe, tag: str) -> list[str]:
    """The value of ``tag`` of each held-out task, in the order of an evaluation."""
    (phase,) = recipe.resolved_phases()
    return [task.tags[tag] for task in build_sets(recipe, phase.data, size=recipe.image_size).heldout]


def _images(recipe: Recipe, metrics: Path) -> int:
    """The number of images that the training made, including the groups that ``rollout.refill`` replaced."""
    (phase,) = recipe.resolved_phases()
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    return 0 if phase.imitates else round(sum(step.get("refill/samples", phase.rows) for step in steps))


def place(kept: Path, world: World, contestant: str) -> Path:
    """The file of a contestant's runs in a world."""
    return kept / world.name / (contestant.lower().replace(",", "").replace(" ", "-") + ".json")


def read(kept: Path, world: World, contestant: str) -> dict[str, dict[str, Any]]:
    """The kept runs of a contestant, by digest of the recipe; empty if the definition of world or contestant has changed since."""
    file = place(kept, world, contestant)
    known = json.loads(file.read_text()) if file.exists() else {}
    return known.get("runs", {}) if known.get("definition") == world.definition(world.contestant(contestant)) else {}


def keep(kept: Path, world: World, contestant: str, runs: dict[str, dict[str, Any]]) -> None:
    """Write the kept runs of a contestant, one per line, so that a diff of two versions is readable."""
    file = place(kept, world, contestant)
    file.parent.mkdir(parents=True, exist_ok=True)
    definition = world.definition(world.contestant(contestant))
    lines = ",\n".join(f"{json.dumps(digest)}: {json.dumps(runs[digest])}" for digest in runs)
    new = file.with_suffix(".new")
    new.write_text(f'{{"definition": "{definition}", "runs": {{\n{lines}\n}}}}\n')
    new.replace(file)


def share_of_gap(run: dict[str, Any]) -> float:
    """(after - before) / (ceiling - before), from the mean scores; `FLOOR` for a run that ended with an error."""
    if run["ended"] != "finished":
        return FLOOR
    (_, before), *_, (_, after) = run["curve"]
    return (after - before) / (run["ceiling"] - before)


def diverged(run: dict[str, Any]) -> bool:
    """Whether the run ended with an error, or with a share of the gap below `DIVERGED`."""
    return share_of_gap(run) < DIVERGED
