"""A user's script: DPO of a tiny Stable Diffusion 3 on pairs of images, with the output folder as argument. It ignores ranks."""

import sys

from PIL import Image

import retouch
import tiny_pipelines


def main(out: str) -> None:
    pairs = [
        {
            "prompt": f"image {number}",
            "id": str(number),
            "chosen": Image.new("RGB", (32, 32), (200 + number, 9, 9)),
            "rejected": Image.new("RGB", (32, 32), (9, 9, 200 + number)),
        }
        for number in range(17)
    ]
    trainer = retouch.Trainer(
        tiny_pipelines.sd3(),
        train_dataset=pairs[:12],
        eval_dataset=pairs[12:],
        objective=retouch.DPO(pairs="data", beta=100.0),
        peft_config=retouch.Lora(rank=2, alpha=2),
        rollout={"num_steps": 3, "transition": {"kind": "ode"}},
        **{"steps": 3, "tasks_per_step": 4, "size": 32, "device": "cpu", "trackers": ()},
        output_dir=out,
        run_name="run",
        progress=False,
    )
    trainer.train()
    files = trainer.save_pretrained(f"{out}/lora")
    assert bool(files) == trainer.is_main


if __name__ == "__main__":
    main(sys.argv[1])
