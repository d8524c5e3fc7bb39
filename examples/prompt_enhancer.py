"""A language model learns to rewrite prompts for a frozen text-to-image model. The reward is the CLIP score of the image.

    python examples/prompt_enhancer.py              # 3 GPUs: writer, text-to-image model, CLIP
    python examples/prompt_enhancer.py --tiny       # a CPU, in seconds

CLIP compares the image with the user's prompt, not with the rewritten prompt. `prompt_quality` is only logged: a policy that is
rewarded for it learns to write "4k, masterpiece".
"""

import sys

import retouch

PROMPTS = [
    *("a red book and a yellow vase", "a cup to the left of a plate", "three green apples on a chair", "a dog without a tail"),
    *("a small bridge under a large moon", "five birds on a wire", "a blue cat and a white mouse", "a clock behind a bottle"),
    *("two spoons and one fork", "a tree with purple leaves", "a square wheel", "a train above the clouds", "an empty glass"),
]

arguments = {
    "model": "Qwen/Qwen2.5-VL-7B-Instruct",
    "renderer": {"model": "stabilityai/stable-diffusion-3.5-medium", "num_steps": 28, "guidance_scale": 7.0, "batch": 8},
    "reward_funcs": [retouch.rewards.Clip(), retouch.rewards.PromptQuality()],
    "reward_weights": {"clip/similarity": 1.0},
    "train_dataset": [{"prompt": prompt} for prompt in PROMPTS],
    "objective": retouch.GRPO(clip=0.2, normalise="dr_grpo"),
    "peft_config": retouch.Lora(rank=32, alpha=64),
    "size": (1024, 1024),
    "rollout": {"kind": "tokens", "max_new_tokens": 100, "temperature": 0.7, "chunk": 64},
    "devices": {"policy": "cuda:0", "renderer": "cuda:1", "reward": "cuda:2"},
    "learning_rate": 1e-5,
    "steps": 300,
    "tasks_per_step": 8,
    "group_size": 8,
    "microbatch": 8,
    "eval": {"every": 50, "tasks": 4, "batch": 8},
    "run_name": "prompt-enhancer",
}
if "--tiny" in sys.argv:
    import tiny

    arguments |= {**tiny.enhancer(), "devices": None}
    arguments["reward_funcs"] = [retouch.rewards.Clip(path=tiny.clip()), retouch.rewards.PromptQuality()]

trainer = retouch.Trainer(**arguments)
trainer.train()
trainer.save_pretrained(trainer.folder / "lora")
