"""A custom objective: the policy gradient uses only the best and the worst images of each group.

    accelerate launch examples/custom_objective.py  # 1 to 8 GPUs with 80 GB
    python examples/custom_objective.py --tiny      # a CPU, in seconds

The class uses log-probabilities, advantages and weights, but no model, so it works with every policy, also with language models.
"""

import sys

import torch

import retouch
from retouch.config.section import Positive
from retouch.objectives.base import Objective
from retouch.types import Loss, Needs


class BestAndWorst(Objective):
    """PPO's clipped surrogate on the samples whose advantage is at least `threshold` standard deviations from 0."""

    threshold: Positive = 1.0
    clip: Positive = 1e-4
    needs_log_probs = True

    @property
    def has_ratio(self):
        return True  # makes the preflight check that the ratio is 1 before the first step

    def losses(self, policy, minibatch):
        for part in policy.microbatches(minibatch.trajectory):
            ratio = policy.evaluate(minibatch.trajectory, part, Needs()).log_ratio.exp()
            advantage, weight = (each[part.rows, part.actions] for each in (minibatch.advantages, minibatch.weights))
            advantage = advantage * (advantage.abs() >= self.threshold)
            clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
            loss = -(weight * torch.minimum(ratio * advantage, clipped * advantage)).sum()
            yield Loss(loss, {"policy/loss": loss.detach()})


arguments = {
    "model": "stabilityai/stable-diffusion-3.5-medium",
    "reward_funcs": retouch.rewards.PickScore(),
    "train_dataset": [
        {"prompt": f"{animal} on a {thing}"} for animal in ("a cat", "an owl") for thing in ("chair", "roof", "boat")
    ],
    "objective": BestAndWorst(threshold=0.7),
    "peft_config": retouch.Lora(rank=32, alpha=64),
    "size": (512, 512),
    "steps": 200,
    "group_size": 16,
    "run_name": "custom-objective",
}
if "--tiny" in sys.argv:
    import tiny

    arguments |= tiny.sd3()
    arguments["reward_funcs"] = retouch.rewards.PickScore(path=tiny.clip())

retouch.Trainer(**arguments).train()
