"""A recipe of two small steps on the playground, for tests of whole runs."""

from typing import Any

SMALL: dict[str, Any] = {
    "name": "small",
    "steps": 2,
    "tasks_per_step": 2,
    "group_size": 2,
    "learning_rate": 1e-3,
    "policy": {
        "kind": "denoising",
        "model": {"kind": "playground"},
        "train": {"kind": "lora", "rank": 4, "alpha": 8},
        "ema": {"decay": 0.9},
    },
    "rollout": {"num_steps": 3, "transition": {"kind": "cps", "noise_level": 0.7}, "window": {"mode": "window", "size": 1}},
    "data": {"kind": "playground", "complexity": [1], "count": 8},
    "reward": {"kind": "playground", "combine": {"overall": 1}},
    "objective": {"kind": "policy_gradient", "clip_low": 1e-4, "clip_high": 1e-4},
    "eval": {"tasks": 4},
}
