"""Scores a teacher that makes the edits of an instruction one after the other: the base editor of recipes/playground/opd.jsonnet,
or the model of another recipe.

    python measurements/playground/edit_by_edit.py --split validation --tasks 240
    python measurements/playground/edit_by_edit.py --recipe recipes/emu3/sft_s__rl_c-playground.jsonnet

Prints, by the number of edits, the scores of the base model that reads the whole instruction, and of the same model when it makes
the edits one by one, each on the image before, and the share of the gap between base and ceiling that the second closes: the limit
of a policy that learns from this teacher alone.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace

import torch
from PIL.Image import Image

from retouch.inference.opening import open_recipe
from retouch.inference.sampling import sample_tasks
from retouch.objectives.distillation import Teacher
from retouch.recipe.recipe import load
from retouch.run.build import Assembly
from retouch.types import Batch, Sample, Task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/playground/opd.jsonnet")
    parser.add_argument("--split", default="validation", choices=("validation", "test"))
    parser.add_argument("--tasks", type=int, default=240)
    arguments = parser.parse_args()
    held_out = [f"eval.split={arguments.split}", f"eval.tasks={arguments.tasks}"]
    recipe = load(arguments.recipe, [*held_out, "data.thought=true"])
    teacher = Teacher(instructions="instructions")
    parts, _ = open_recipe(recipe, None, trained=False)
    tasks = [*parts.sets[0].heldout]
    ways: dict[str, Sequence[Image | None]] = {}
    ways |= {"at once": sampled(parts, tasks), "one by one": one_by_one(parts, tasks, [teacher.texts(task) for task in tasks])}
    rows = tuple(range(len(tasks)))
    batch = Batch(seed=0, step=0, tasks=tuple(tasks), group_ids=rows, group=rows, slot=(0,) * len(rows))
    policy = parts.policy(recipe.resolved_phases()[-1].rollout)
    ways["ceiling"] = parts.renderer()(tasks, policy.demonstrate(batch))  # the target, encoded and decoded by the autoencoder
    means: dict[str, float] = {}
    for way, images in ways.items():
        scores = parts.judge.reward([Sample(task=task, image=image) for task, image in zip(tasks, images, strict=True)])
        for count in sorted({task.tags["complexity"] for task in tasks}):
            chosen = torch.tensor([task.tags["complexity"] == count for task in tasks])
            shown = "  ".join(f"{name} {scores[name][chosen].mean():.2f}" for name in ("IF", "IP", "PQ", "overall", "exact"))
            print(f"{way}, {count} edits, {int(chosen.sum())} tasks: {shown}")
        several = torch.tensor([task.tags["complexity"] != "1" for task in tasks])
        means[way] = scores["overall"][several].mean().item()
    base, one, best = (means[way] for way in ("at once", "one by one", "ceiling"))
    print(f"two or three edits: {base:.2f} at once, {one:.2f} one by one, {(one - base) / (best - base):.2f} of the gap")


def sampled(parts: Assembly, tasks: Sequence[Task], *, slot: int = 0) -> list[Image]:
    return [sample.image for sample in sample_tasks(parts, tasks, 0, slot=slot)]


def one_by_one(parts: Assembly, tasks: Sequence[Task], texts: Sequence[Sequence[str]]) -> list[Image]:
    """The image of each task after all its texts, each of which edits the image before."""
    images = [task.images[0] for task in tasks]
    for turn in range(max(map(len, texts))):
        rows = [row for row, several in enumerate(texts) if turn < len(several)]
        asked = [replace(tasks[row], instruction=texts[row][turn], images=(images[row],)) for row in rows]
        for row, image in zip(rows, sampled(parts, asked, slot=turn), strict=True):
            images[row] = image
    return images


if __name__ == "__main__":
    main()
