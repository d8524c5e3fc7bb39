"""Flow-GRPO of Stable Diffusion 3.5 with two rewards: rendering of the requested text (OCR), and human preference (PickScore).

    accelerate launch examples/flow_grpo_sd3.py     # 8 GPUs with 80 GB; fewer work too, with fewer tasks per step
    python examples/flow_grpo_sd3.py --tiny         # a CPU, in seconds

The settings are those of Flow-GRPO (Liu et al., arXiv 2505.05470): LoRA of rank 32, groups of 24 images, 10 SDE steps, KL 0.04.
"""

import itertools
import sys

import retouch

PLACES = ["a shop sign", "a birthday cake", "a road sign", "a neon light", "a T-shirt", "a chalkboard", "a book cover", "a poster"]
WORDS = ["open", "fresh bread", "slow down", "welcome", "no smoking", "happy hour", "thank you", "exit", "sold out", "best friends"]

arguments = {
    "model": "stabilityai/stable-diffusion-3.5-medium",
    "reward_funcs": [retouch.rewards.Ocr(), retouch.rewards.PickScore()],
    "reward_weights": {"ocr/correctness": 1.0, "pickscore/pickscore": 0.02},
    "train_dataset": [{"prompt": f'{place} that says "{word}"', "text": word} for place, word in itertools.product(PLACES, WORDS)],
    "objective": retouch.GRPO(clip=1e-4, kl=0.04),
    "peft_config": retouch.Lora(rank=32, alpha=64),
    "size": (512, 512),
    "rollout": {"num_steps": 10, "transition": {"kind": "sde", "noise_level": 0.7}, "guidance_scale": 4.5, "chunk": 12},
    "learning_rate": 3e-4,
    "steps": 500,
    "tasks_per_step": 16,
    "group_size": 24,
    "microbatch": 8,
    "eval": {"every": 50, "tasks": 8, "num_steps": 40, "batch": 8},
    "run_name": "flow-grpo-sd3",
}
if "--tiny" in sys.argv:
    import tiny

    arguments |= tiny.sd3()
    arguments["reward_funcs"] = [retouch.rewards.Ocr(), retouch.rewards.PickScore(path=tiny.clip())]

trainer = retouch.Trainer(**arguments)
trainer.train()
trainer.save_pretrained(trainer.folder / "lora")  # pipe.load_lora_weights(...), PEFT, or ComfyUI
