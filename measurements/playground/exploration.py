"""Scores many samples of an image-token model per validation task, to show what RL could reinforce in it.

    python measurements/playground/exploration.py s sc

Prints, for tasks with one edit (S) and with two or three (C): the scores of the most likely image and of samples, the best of n
samples, the share of groups of 8 and of 16 samples with equal rewards, the share of requested edits of each kind that are made by
one sample and by the best of 16, and the correlation of ``overall`` with its parts within a group.
"""

import argparse

import torch

from retouch.policies.autoregressive import AutoregressivePolicy
from retouch.policies.rollout import TokenRollout
from retouch.policies.weights import WeightCopies
from retouch.renderers.base import CodesDecoder
from retouch.types import Batch, Sample, Scores, Task
from retouch_worlds.data import PlaygroundData
from retouch_worlds.models.language import PlaygroundEmu3
from retouch_worlds.playground.scenes import KINDS
from retouch_worlds.rewards import PlaygroundReward

SAMPLES = 16
ROWS = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "starts", nargs="+", metavar="START", help="s, s-distractors, sc, sc-unfinished, or a folder of other weights"
    )
    parser.add_argument("--tasks", type=int, default=150)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = PlaygroundData(count=arguments.tasks, complexity=[1, 2, 3], split="validation", filler=0.25)
    tasks = [*data.tasks(in_turn=True)]
    simple = torch.tensor([task.tags["complexity"] == "1" for task in tasks])
    for start in arguments.starts:
        greedy, sampled = scores(start, tasks, count=0), scores(start, tasks, count=SAMPLES)
        for name, rows in {"S": simple, "C": ~simple}.items():
            print(f"{start} {name}")
            report(
                {column: values[rows] for column, values in greedy.items()},
                {column: values[rows] for column, values in sampled.items()},
            )


def scores(start: str, tasks: list[Task], *, count: int) -> Scores:
    """The columns (tasks, samples) of ``count`` samples per task; if ``count`` is 0, those of the most likely image."""
    keys = {"path": start} if "/" in start else {"start": start}
    model = PlaygroundEmu3.model_validate({"kind": "playground-emu3", **keys}).build(
        device=torch.device("cpu"), gradient_checkpointing=False
    )
    sampling = TokenRollout(max_new_tokens=24)
    policy = AutoregressivePolicy(model, sampling=sampling, microbatch=ROWS, copies=WeightCopies(model.module))
    renderer, reward = CodesDecoder(model, batch=ROWS), PlaygroundReward()
    per_task = max(count, 1)
    parts: list[Scores] = []
    for first in range(0, len(tasks), ROWS // per_task):
        some = tuple(tasks[first : first + ROWS // per_task])
        group = tuple(row for row in range(len(some)) for _ in range(per_task))
        slots, ids = tuple(range(per_task)) * len(some), tuple(range(first, first + len(some)))
        batch = Batch(seed=5, step=0, tasks=some, group_ids=ids, group=group, slot=slots)
        made = policy.rollout(batch) if count else policy.sample(batch)
        shown = [some[row] for row in group]
        images = renderer(shown, made)
        parts.append(reward([Sample(task, image) for task, image in zip(shown, images, strict=True)]))
    return {column: torch.cat([part[column] for part in parts]).view(len(tasks), per_task) for column in parts[0]}


def report(greedy: Scores, sampled: Scores) -> None:
    """Print statistics of the scores (tasks, samples)."""
    overall = sampled["overall"]
    for name, found in {"most likely": greedy, "samples": sampled}.items():
        means = "  ".join(f"{column} {found[column].nanmean():.2f}" for column in ("overall", "IF", "IP", "PQ", "exact"))
        print(f"  {name:12} {means}")
    best = "  ".join(f"{n}: {overall.unflatten(1, (-1, n)).amax(2).mean():.2f}" for n in (1, 2, 4, 8, 16))
    print(f"  best of n    {best}")
    equal = "  ".join(f"{n}: {(overall.unflatten(1, (-1, n)).std(2, correction=0) == 0).float().mean():.2f}" for n in (8, 16))
    print(f"  equal groups {equal}")
    made = {kind: sampled[f"success/{kind}"] for kind in KINDS}
    asked = {kind: values[~values[:, 0].isnan()] for kind, values in made.items()}
    print("  made by 1, 16", "  ".join(f"{kind} {x.mean():.2f}, {x.amax(1).mean():.2f}" for kind, x in asked.items()))
    print("  correlation ", "  ".join(f"{name} {correlation(overall, sampled[name]):.2f}" for name in ("IF", "IP", "PQ")))


def correlation(first: torch.Tensor, second: torch.Tensor) -> float:
    """The correlation of two columns (tasks, samples), after the mean of each task is subtracted."""
    centred = [(values - values.mean(1, keepdim=True)).flatten() for values in (first, second)]
    return float(torch.corrcoef(torch.stack(centred))[0, 1])


if __name__ == "__main__":
    main()
