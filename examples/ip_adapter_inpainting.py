"""An IP-Adapter for FLUX.1-Fill learns to write words into a masked part of an image, in the style of a reference image.

    accelerate launch examples/ip_adapter_inpainting.py --data DIR      # 8 GPUs with 80 GB
    python examples/ip_adapter_inpainting.py --tiny                     # a CPU, in seconds

DIR has a metadata.jsonl: {"file_name": "sign.png", "mask": "sign_mask.png", "reference": "style.png", "target": "sign.png",
"text": "Azir", "prompt": "The text is 'Azir'."}. A supervised warm-up on the targets comes first, then RL with OCR as the reward.
"""

import sys

import retouch

arguments = {
    "model": "black-forest-labs/FLUX.1-Fill-dev",
    "reward_funcs": retouch.rewards.Ocr(where="mask"),
    "reward_weights": {"correctness": 1.0},
    "train_dataset": sys.argv[sys.argv.index("--data") + 1] if "--data" in sys.argv else None,
    "objective": retouch.GRPO(clip=3e-6, kl=retouch.Kl(kind="velocity", weight=0.1)),
    "peft_config": retouch.IpAdapter(encoder="google/siglip-so400m-patch14-384", tokens=128, dropout=0.05),
    "size": (512, 512),
    "rollout": {
        **{"num_steps": 6, "transition": {"kind": "sde", "noise_level": 0.8}, "chunk": 16},
        "window": {"mode": "window", "size": 3, "low": 0, "high": 3},
    },
    "phases": [
        {
            **{"name": "warm-up", "steps": 400, "objective": retouch.Supervised()},
            **{"tasks_per_step": 256, "group_size": 1},
        },
        {"name": "rl", "steps": 1000},
    ],
    "gradient_checkpointing": True,
    "sharding": "zero2",
    "learning_rate": 1e-5,
    "tasks_per_step": 16,
    "group_size": 16,
    "microbatch": 2,
    "eval": {"every": 50, "tasks": 64, "num_steps": 28, "batch": 16},
    "run_name": "ip-adapter-inpainting",
}
if "--tiny" in sys.argv:
    import tiny

    arguments |= {**tiny.inpainting(), "steps": None}
    arguments["reward_funcs"] = retouch.rewards.Ocr(where="box", line_width=160)

trainer = retouch.Trainer(**arguments)
trainer.train()
trainer.save_pretrained(trainer.folder / "ip-adapter")
