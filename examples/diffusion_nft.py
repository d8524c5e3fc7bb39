"""DiffusionNFT: reinforcement learning without log-probabilities, so the ordinary, deterministic sampler can make the images.

    accelerate launch examples/diffusion_nft.py     # 1 to 8 GPUs with 80 GB
    python examples/diffusion_nft.py --tiny         # a CPU, in seconds

Zheng et al. 2025, arXiv 2509.16117. A copy of the LoRA makes the images; its weights slowly follow the trained weights.
"""

import sys

from PIL import ImageStat

import retouch


@retouch.reward(low=0, high=1)
def colourful(images, **columns):
    """The mean saturation of each image, 0 to 1."""
    return [ImageStat.Stat(image.convert("HSV").getchannel("S")).mean[0] / 255 for image in images]


SUBJECTS = ["a fox", "two pears", "a lighthouse", "an old bus", "a market", "a bowl of soup", "a garden", "a winter street"]

arguments = {
    "model": "stabilityai/stable-diffusion-3.5-medium",
    "reward_funcs": [retouch.rewards.PickScore(), colourful],
    "reward_weights": {"pickscore/pickscore": 0.05, "colourful/colourful": 1.0},
    "train_dataset": [{"prompt": f"{subject} {where}"} for subject in SUBJECTS for where in ("at dusk", "in the rain", "at noon")],
    "objective": retouch.NFT(beta=1.0, reference_weight=1e-4),
    "peft_config": retouch.Lora(rank=32, alpha=64),
    "size": (512, 512),
    "rollout": {"num_steps": 10, "transition": {"kind": "ode"}, "chunk": 12},
    "learning_rate": 3e-4,
    "steps": 300,
    "tasks_per_step": 8,
    "group_size": 24,
    "microbatch": 8,
    "eval": {"every": 50, "tasks": 4, "num_steps": 28, "batch": 8},
    "run_name": "diffusion-nft",
}
if "--tiny" in sys.argv:
    import tiny

    arguments |= tiny.sd3()
    arguments["reward_funcs"] = [retouch.rewards.PickScore(path=tiny.clip()), colourful]
    arguments["rollout"] = {"num_steps": 3, "transition": {"kind": "ode"}}

trainer = retouch.Trainer(**arguments)
trainer.train()
trainer.save_pretrained(trainer.folder / "lora")
