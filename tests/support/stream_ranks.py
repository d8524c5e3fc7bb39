"""Trains a tiny Stable Diffusion 3 on a stream; started by torchrun: ``stream_ranks.py OUT STOP``.

Each rank appends the prompts that it scores to ``OUT/rows.RANK.txt``. ``STOP``: the run stops after this step, with a checkpoint;
0: never.
"""

import os
import sys
from pathlib import Path
from typing import Any

import datasets

import retouch
import tiny_pipelines
from retouch.data.sources.stream import IterableData

ROWS, HELD, COUNT, GROUP, STEPS = 14, 2, 4, 2, 7


def stream() -> IterableData:
    rows = [{"prompt": f"row {number}", "id": str(number)} for number in range(ROWS)]
    given = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=2)
    return IterableData.of(given, held_out=HELD, check=2, shuffle=3)


def red_level(images: list[Any], prompts: list[str]) -> list[float]:
    rank = os.environ.get("RANK", "0")
    with (Path(sys.argv[1]) / f"rows.{rank}.txt").open("a") as file:
        file.write("".join(f"{prompt}\n" for prompt in prompts))
    return [image.getpixel((0, 0))[0] / 255 for image in images]


def main(out: str, stop: int) -> None:
    trainer = retouch.Trainer(
        tiny_pipelines.sd3(),
        red_level,
        stream(),
        peft_config=retouch.Lora(rank=2, alpha=2),
        rollout={"num_steps": 2, "transition": {"kind": "sde", "noise_level": 0.7}},
        **{"steps": STEPS, "tasks_per_step": COUNT, "group_size": GROUP, "size": 32, "device": "cpu", "trackers": ()},
        output_dir=out,
        run_name="run",
        progress=False,
    )
    for step in trainer:
        if step.step == stop:
            break


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
