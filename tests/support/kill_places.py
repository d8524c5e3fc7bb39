"""Kills a tiny run with SIGKILL at each of several places, resumes it, and reports which result files differ.

This is a program of its own, so that it can fork before any thread runs: `python tests/support/kill_places.py OUT COUNT [WHAT]`
prints a JSON line per place. A place is a function, the number of the call, and whether the kill comes before or after this call.
WHAT selects the run; without it a denoising policy is trained. WHAT is one of:

- the folder of a vision-language model: a policy that writes completions;
- the folder of an Emu3: a policy that writes image tokens, with a value head;
- "phases": a supervised phase before the RL phase;
- "stale": rollouts are made two steps ahead of the updates;
- "refill": groups with equal rewards are replaced.
"""

import hashlib
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from retouch.config.packaged import find
from retouch.recipe.document import evaluate
from retouch.recipe.recipe import Recipe, parse

STEPS = 4
PHASES = "phases"
STALE = "stale"
REFILL = "refill"
PLACES = (
    ("retouch.run.checkpoint:write_tensors", 1, "before"),
    ("retouch.run.checkpoint:write_tensors", 3, "after"),
    ("retouch.run.checkpoint:write_tensors", 6, "before"),
    ("retouch.run.checkpoint:save", 1, "after"),
    ("retouch.run.checkpoint:prune", 2, "before"),
    ("retouch.policies.denoising:DenoisingPolicy.rollout", 2, "after"),
    ("retouch.policies.denoising:DenoisingPolicy.rollout", 5, "before"),
    ("retouch.policies.denoising:DenoisingPolicy.evaluate", 4, "after"),
    ("retouch.rewards.judging:RewardScorer._start", 3, "before"),
    ("retouch.rewards.judging:RewardScorer._finish", 4, "after"),
    ("retouch.rewards.ledger.journal:Journal.record", 1, "after"),
    ("retouch.rewards.ledger.journal:Journal.record", 4, "before"),
    ("retouch.distributed.optimizer:ReplicatedStepper.backward", 5, "after"),
    ("retouch.distributed.optimizer:ReplicatedStepper.step", 3, "before"),
    ("retouch.distributed.optimizer:ReplicatedStepper.step", 4, "after"),
    ("retouch.records.files:append_line", 2, "after"),
    ("retouch.records.files:append_line", 5, "before"),
    ("retouch.records.files:append_line", 6, "after"),
    ("retouch.records.files:write_atomic", 7, "before"),
    ("retouch.run.recorder:Recorder.step", 3, "after"),
    ("retouch.run.evaluation:RunEvaluations.write_summary", 1, "before"),
    ("retouch.records.folder:RunFolder.write_samples", 2, "before"),
)
# Kills in the warm-up, between the phases, in a rollout, and between two epochs of a step. The trial step of each phase is made
# first, so its calls are counted too.
PHASES_PLACES = (
    ("retouch.policies.denoising:DenoisingPolicy.demonstrate", 4, "before"),
    ("retouch.distributed.optimizer:ReplicatedStepper.backward", 3, "after"),
    ("retouch.run.build:Assembly.begin", 2, "before"),
    ("retouch.run.build:Assembly.begin", 2, "after"),
    ("retouch.policies.denoising:DenoisingPolicy.rollout", 2, "after"),
    ("retouch.distributed.optimizer:ReplicatedStepper.step", 7, "after"),
    ("retouch.policies.denoising:DenoisingPolicy.rollout", 3, "before"),
    ("retouch.run.checkpoint:save", 1, "after"),
)
# Kills with two rollouts in the queue that the checkpoint does not contain, before the third rollout is made, and after the third
# optimizer step (the call of the trial step counts too).
STALE_PLACES = (
    ("retouch.run.checkpoint:save", 1, "after"),
    ("retouch.run.collecting:begin_collecting", 3, "before"),
    ("retouch.distributed.optimizer:ReplicatedStepper.step", 4, "after"),
)
# Kills when the scores of a replacement group are in the ledger but its samples are not stored, and in the second round of a step.
REFILL_PLACES = (("retouch.run.collecting:replace_rows", 1, "before"), ("retouch.run.collecting:replace_rows", 4, "before"))
OTHER_PLACES: dict[str | None, Sequence[tuple[str, int, str]]] = {
    PHASES: PHASES_PLACES,
    STALE: STALE_PLACES,
    REFILL: REFILL_PLACES,
}


def document_of(out: Path, name: str) -> dict[str, Any]:
    """Return the document of a recipe of four steps on a few rows, with a moving average and a checkpoint every other step."""
    document: dict[str, Any] = evaluate(find("recipes/playground/grpo.jsonnet"))
    document |= {
        "name": name,
        "out": str(out),
        "steps": STEPS,
        "tasks_per_step": 2,
        "group_size": 2,
        "microbatch": 4,
        "device": "cpu",
        "trackers": [],
        "checkpoints": {"every": 2, "keep": 1},
        "samples": {"every": 2, "tasks": 2, "groups": 1},
        "eval": {"tasks": 4, "complexity": [1, 2], "num_steps": 1},
    }
    window = {"mode": "window", "size": 2, "high": 3}
    document["rollout"] = {"num_steps": 4, "transition": {"kind": "cps", "noise_level": 0.7}, "window": window}
    document["policy"]["ema"] = {"decay": 0.9}
    return document


def recipe(out: Path, name: str, writer: str | None) -> Recipe:
    """Return a recipe of GRPO for one kind of run (WHAT)."""
    document = document_of(out, name)
    document["objective"] = {"kind": "policy_gradient", "clip_low": 1e-4, "clip_high": 1e-4}
    if writer == PHASES:
        imitates = {"name": "warm-up", "steps": 2, "objective": {"kind": "supervised"}, "group_size": 1}
        passed_over = {"name": "nothing", "steps": 0, "objective": {"kind": "nft"}}
        document |= {"steps": None, "phases": [imitates, passed_over, {"name": "learn", "steps": 2}], "epochs": 2}
    elif writer == STALE:
        document["rollout"]["staleness"] = 2
        document["learning_rate"] = 1e-2  # large, so that an update visibly changes the images
    elif writer == REFILL:
        document["rollout"]["refill"] = {"rounds": 2}
        document["reward"]["combine"] = "max(overall, 9)"  # so that most groups of two have equal rewards
    elif writer is not None:
        document["policy"] |= {"kind": "autoregressive", "model": {"kind": "playground-writer", "path": writer}}
        document["rollout"] = {"kind": "tokens", "max_new_tokens": 5, "top_k": 20}
        model = {"kind": "playground"}
        document["renderer"] = {"kind": "response", "model": model, "encoder": "frozen", "num_steps": 2, "cut_off": "draw"}
        document["objective"] |= {"clip_low": 0.2, "clip_high": 0.2, "kl": {"kind": "k3", "weight": 0.1}}
        if json.loads((Path(writer) / "config.json").read_text())["model_type"] == "emu3":
            document["policy"]["model"] = {"kind": "emu3", "path": writer, "size": [24, 24], "dtype": "float32"}
            document |= {"rollout": {"kind": "tokens", "max_new_tokens": 24, "temperature": 0.7}, "renderer": {"kind": "codes"}}
            document["advantage"] = {"kind": "gae"}  # so that runs with a value head are killed too
    return parse(document)


def import_models() -> None:
    """Import the modules that take time to import, once and before the forks."""
    import retouch.run.session  # noqa: F401


def train(made: Recipe) -> None:
    from retouch.run.session import run

    assert run(made, fresh=False) == 0


def kill_at(place: str, call: int, when: str) -> None:
    """Wrap the function so that this process is killed with SIGKILL before or after call number ``call``."""
    module_name, _, path = place.partition(":")
    owner: Any = importlib.import_module(module_name)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    whole: Callable[..., Any] = vars(owner)[name]
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = whole(*args, **kwargs)
        if calls == call and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, counted)


def run_in_fork(work: Callable[[], int | None], log: Path | None = None) -> int:
    """Run ``work`` in a fork and return its exit code, or minus the number of the signal that ended it.

    ``log``: the file for the output; without it only the error output is shown.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    out = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(out, 1)
    if log is not None:
        os.dup2(out, 2)
    code = 1
    try:
        code = work() or 0
    except BaseException:  # noqa: BLE001  (a fork must not run its parent's code)
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def file_hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of the files that must not differ: the last checkpoint's tensors, the metrics, the held-out scores."""
    names = [f"checkpoints/step-{STEPS:06d}/{group}.safetensors" for group in ("weights", "optimizer", "copies", "random")]
    names += ["metrics.jsonl", f"evals/step-{STEPS:06d}.json", "evals.jsonl"]
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def places(writer: str | None) -> Sequence[tuple[str, int, str]]:
    if writer in OTHER_PLACES:
        return OTHER_PLACES[writer]
    acting = "retouch.policies.autoregressive:AutoregressivePolicy"
    denoising = "retouch.policies.denoising:DenoisingPolicy"
    return [(place if writer is None else place.replace(denoising, acting), call, when) for place, call, when in PLACES]


def train_until_killed(made: Recipe, *place: Any) -> None:
    """``place``: the arguments of ``kill_at``."""
    kill_at(*place)
    train(made)


def some_of(known: Sequence[tuple[str, int, str]], count: int) -> Iterator[tuple[int, tuple[str, int, str]]]:
    """Yield ``count`` evenly distributed places with their numbers."""
    yield from enumerate(known[:: max(1, len(known) // count)][:count])


def print_result(place: tuple[str, int, str], **result: Any) -> None:
    name, call, when = place
    sys.stdout.write(json.dumps({"place": f"{when} call {call} of {name}", **result}) + "\n")
    sys.stdout.flush()


def main(out: Path, count: int, writer: str | None = None) -> None:
    import_models()

    assert run_in_fork(lambda: train(recipe(out, "whole", writer))) == 0
    expected = file_hashes(out / "whole")
    for number, place in some_of(places(writer), count):
        made = recipe(out, f"killed-{number}", writer)
        ended = run_in_fork(partial(train_until_killed, made, *place))
        metrics = made.folder / "metrics.jsonl"
        done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        resumed = run_in_fork(partial(train, made))
        found = file_hashes(made.folder) if resumed == 0 else {}
        differing = sorted(key for key in expected if found.get(key) != expected[key])
        print_result(place, ended=ended, resumed=resumed, differing=differing, done=done)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
