"""Diffusion-DPO on pairs of images, `chosen` and `rejected`, without rollouts and without a reward model.

    accelerate launch examples/dpo_from_pairs.py    # 1 to 8 GPUs with 80 GB
    python examples/dpo_from_pairs.py --tiny        # a CPU, in seconds

Wallace et al. 2023, arXiv 2311.12908, with the loss of flow matching. The data set has one row per pair: a prompt and two images.
A folder with a metadata.jsonl works as well: {"prompt": "...", "chosen": "a.png", "rejected": "b.png"}. Evaluation measures the
share of held-out pairs in the right order; with `reward_funcs`, it also makes images for the held-out prompts and scores them.
"""

import sys

import retouch

arguments = {
    "model": "stabilityai/stable-diffusion-3.5-medium",
    "objective": retouch.DPO(pairs="data", beta=2000.0),
    "peft_config": retouch.Lora(rank=32, alpha=64),
    "size": (1024, 1024),
    "rollout": {"num_steps": 28, "transition": {"kind": "ode"}, "guidance_scale": 4.5},  # for the logged samples
    "learning_rate": 3e-5,
    "steps": 1000,
    "tasks_per_step": 64,
    "microbatch": 4,
    "gradient_checkpointing": True,
    "optimizer": {"warmup_steps": 50},
    "eval": {"every": 200, "tasks": 64, "batch": 8},
    "run_name": "dpo-from-pairs",
}
if "--tiny" in sys.argv:
    import tiny

    arguments |= tiny.sd3()
    arguments |= {"train_dataset": tiny.pairs(), "optimizer": {}}
else:
    from datasets import load_dataset

    arguments["train_dataset"] = load_dataset("data-is-better-together/open-image-preferences-v1-binarized", split="train")

trainer = retouch.Trainer(**arguments)
for step in trainer:
    print(f"step {step.step}: {step.metrics['policy/preferred']:.0%} of the pairs in the right order")
table = trainer.evaluate()
print(f"held-out: {table['all']['pairs/preferred']:.0%} of the pairs in the right order")
trainer.save_pretrained(trainer.folder / "lora")
