"""`python measurements/speed/ledger_cost.py`: how much time the ledger of scores adds to a step of `playground/grpo`.

A step runs through the normal training loop. The work of the ledger (hashing images, looking up scores, writing scores to the disk)
is timed on the threads that do it, and counts in full even where it overlaps with sampling. CPU seconds are reported next to
wall-clock seconds, which grow on a busy machine.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from opened import opened

import retouch.rewards.judging as judging
from retouch.rewards.ledger.journal import Journal
from retouch.run.step import collect, update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="playground/grpo.jsonnet")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(json.dumps(measure(arguments.recipe, arguments.rounds), indent=2))


def measure(recipe: str, rounds: int) -> dict[str, Any]:
    """Measure ``rounds`` steps after a warm-up step. Returns medians over the steps."""
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    judging.journal_rows = timed("naming pictures", judging.journal_rows, spent)
    Journal.recall = timed("looking up", Journal.recall, spent)  # type: ignore[method-assign]
    Journal.record = timed("writing", Journal.record, spent)  # type: ignore[method-assign]
    steps, kept = [], []
    with opened(recipe) as ready:
        for step in range(rounds + 1):
            spent.clear()
            clock, cpu = time.perf_counter(), time.process_time()
            update(ready.run, ready.phase, step, collect(ready.run, ready.phase, step))
            if step:
                steps.append((time.perf_counter() - clock, time.process_time() - cpu))
                kept.append({name: tuple(both) for name, both in spent.items()})
        samples = len(ready.phase.batch(0))
    shares = [
        [sum(each[k] for each in parts.values()) / whole[k] for parts, whole in zip(kept, steps, strict=True)] for k in (0, 1)
    ]
    return {
        "recipe": recipe,
        "samples": samples,
        "step_seconds": statistics.median(whole for whole, _ in steps),
        "step_cpu_seconds": statistics.median(cpu for _, cpu in steps),
        "ledger_ms": {name: 1e3 * statistics.median(parts[name][0] for parts in kept) for name in kept[0]},
        "ledger_cpu_ms": {name: 1e3 * statistics.median(parts[name][1] for parts in kept) for name in kept[0]},
        "share_of_step": statistics.median(shares[0]),
        "share_of_cpu": statistics.median(shares[1]),
    }


def timed(name: str, function: Callable[..., Any], spent: dict[str, list[float]]) -> Callable[..., Any]:
    """Wrap a function so that its wall-clock seconds and the CPU seconds of its thread are added to ``spent[name]``."""

    @wraps(function)
    def measured(*args: Any, **kwargs: Any) -> Any:
        clock, cpu = time.perf_counter(), time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent[name][0] += time.perf_counter() - clock
            spent[name][1] += time.thread_time() - cpu

    return measured


if __name__ == "__main__":
    main()
