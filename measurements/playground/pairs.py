"""DPO on pairs of images in a folder, without rollouts: the playground's model that renders words learns from its own samples.

    python measurements/playground/pairs.py --out runs/pairs

The command samples ``--group`` images for each of ``--tasks`` training tasks. Of each task it writes the images with the best and
the worst OCR score as ``chosen`` and ``rejected``. Then it trains on the folder, and prints the scores of held-out words before and
after.
"""

import argparse
import json
from pathlib import Path

from retouch.distributed.ranks import Ranks
from retouch.recipe.recipe import Recipe, load, parse
from retouch.run.build import assemble
from retouch.run.session import run
from retouch.types import Batch, Sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/pairs"), help="folder of the pairs and of the run")
    parser.add_argument("--tasks", type=int, default=512, help="training tasks to sample for")
    parser.add_argument("--group", type=int, default=8, help="samples per task")
    parser.add_argument("--steps", type=int, default=60, help="training steps")
    parser.add_argument("--pairs-per-step", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--beta", type=float, default=2000.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    base = load("playground/words-dpo", [f"seed={given.seed}", "device=cpu"])
    folder = given.out / f"data-{given.seed}"
    if not (folder / "metadata.jsonl").is_file():
        print(write_pairs(base, folder, tasks=given.tasks, group=given.group), "pairs")
    data = {"kind": "folder", "path": str(folder), "held_out": 0}
    objective = {"kind": "dpo", "pairs": "data", "shift": 3.0, "beta": given.beta}
    phase = {"name": "pairs", "steps": given.steps, "data": data, "objective": objective}
    counts = {"group_size": 2, "tasks_per_step": given.pairs_per_step, "learning_rate": given.learning_rate}
    # The phase without steps provides the held-out words.
    document = {**base.document(), "steps": None, "phases": [{"name": "words", "steps": 0}, {**phase, **counts}]}
    recipe = parse({**document, "name": f"dpo-{given.seed}", "out": str(given.out), "trackers": []})
    run(recipe, fresh=True)
    summary = json.loads((recipe.folder / "summary.json").read_text())
    print({key: summary[key] for key in ("before", "after", "seconds") if key in summary})


def write_pairs(recipe: Recipe, folder: Path, *, tasks: int, group: int) -> int:
    """Sample and score images, and write a pair for each task whose samples differ in score. Returns the number of pairs."""
    folder.mkdir(parents=True)
    parts = assemble(recipe, Ranks())
    policy, renderer = parts.policy(recipe.rollout), parts.renderer()
    lines = []
    for first in range(0, tasks, 16):
        some = tuple(parts.sets[0].train[index] for index in range(first, min(first + 16, tasks)))
        rows = range(len(some) * group)
        places = {"group": tuple(row // group for row in rows), "slot": tuple(row % group for row in rows)}
        batch = Batch(seed=recipe.seed, step=first, tasks=some, group_ids=tuple(range(len(some))), **places)
        images = renderer([some[k] for k in batch.group], policy.rollout(batch))
        scores = parts.judge([Sample(some[k], image) for k, image in zip(batch.group, images, strict=True)]).rewards.view(-1, group)
        for index, (task, of_task) in enumerate(zip(some, scores, strict=True)):
            best, worst = int(of_task.argmax()), int(of_task.argmin())
            if of_task[best] == of_task[worst]:
                continue
            name = f"{first + index:06d}"
            sides = {"chosen": images[index * group + best], "rejected": images[index * group + worst]}
            for side, image in {"image": task.images[0], "mask": task.mask, **sides}.items():
                image.save(folder / f"{name}-{side}.png")
            files = {side: f"{name}-{side}.png" for side in ("image", "mask", "chosen", "rejected")}
            lines.append({"id": task.id, "instruction": task.instruction, "text": task.text, **files})
    parts.judge.close()
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return len(lines)


if __name__ == "__main__":
    main()
