"""A user's script: trains a tiny Stable Diffusion 3, with the output folder as argument. It ignores ranks."""

import sys
from typing import Any

import retouch
import tiny_pipelines


def red(images: list[Any]) -> list[float]:
    return [image.getpixel((0, 0))[0] / 255 for image in images]


def main(out: str) -> None:
    trainer = retouch.Trainer(
        tiny_pipelines.sd3(),
        red,
        [{"prompt": "a red circle" if number % 2 else "blue", "id": str(number)} for number in range(8)],
        peft_config=retouch.Lora(rank=2, alpha=2),
        rollout={"num_steps": 3, "transition": {"kind": "sde", "noise_level": 0.7}},
        **{"steps": 2, "tasks_per_step": 2, "group_size": 2, "size": 32, "device": "cpu", "trackers": ()},
        output_dir=out,
        run_name="run",
        progress=False,
    )
    summary = trainer.train()
    assert (summary is not None) == trainer.is_main
    assert trainer.evaluate()["all"]["n"] == 4


if __name__ == "__main__":
    main(sys.argv[1])
