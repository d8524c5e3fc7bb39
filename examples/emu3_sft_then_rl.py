"""Emu3 generates an edited image as tokens. It is trained first on the edits in the data (SFT), then with rewards (RL).

    accelerate launch --config_file recipes/accelerate/zero2.yaml examples/emu3_sft_then_rl.py TOKENS http://HOST:4877/v1
    python examples/emu3_sft_then_rl.py --tiny      # a CPU, in seconds; the line above: 8 GPUs with 80 GB

TOKENS is a folder that `retouch data tokenize` wrote; the address is that of a vision-language judge. The settings are those of
EARL (docs/coming-from.md): REINFORCE with a KL to the model before RL, groups of 8, and the mean over tokens.
"""

import sys

import retouch
from retouch_judge.kinds import Endpoint
from retouch_models.image_tokens import TokenData
from retouch_models.language import Emu3Model

tokens, judge_url = sys.argv[1:3] if len(sys.argv) > 2 else ("tokens", "http://localhost:4877/v1")
judge = Endpoint(model="Qwen/Qwen2.5-VL-72B-Instruct", base_url=judge_url, key=None, concurrency=64)

arguments = {
    "model": Emu3Model(
        path="BAAI/Emu3-Stage1",
        tokenizer="Emu3-community/Emu3-Gen-hf",
        autoencoder="BAAI/Emu3-VisionTokenizer",
        size=(256, 256),
    ),
    "reward_funcs": retouch.rewards.VieScore(judge=judge),
    "reward_weights": {"overall": 1.0},
    "train_dataset": TokenData(lists=(tokens,)),
    "objective": retouch.REINFORCE(kl=retouch.Kl(kind="k3", weight=3e-4), normalise="token"),
    "advantage": retouch.GroupAdvantage(eps=1e-4),
    "phases": [
        {
            **{"name": "supervised", "steps": 10800, "objective": retouch.CrossEntropy(normalise="token")},
            **{"tasks_per_step": 128, "group_size": 1, "learning_rate": 1e-5},
        },
        {"name": "rl", "steps": 2000},
    ],
    "rollout": {"kind": "tokens", "max_new_tokens": 2048, "temperature": 1.0, "chunk": 16},
    "gradient_checkpointing": True,
    "sharding": "zero2",
    "learning_rate": 3e-6,
    "tasks_per_step": 16,
    "microbatch": 4,
    "eval": {"every": 100, "tasks": 64, "batch": 8},
    "run_name": "emu3-sft-then-rl",
}
if "--tiny" in sys.argv:
    import tiny

    arguments |= {**tiny.emu3(), "steps": None}

trainer = retouch.Trainer(**arguments)
trainer.train()
trainer.save_pretrained(trainer.folder / "model")
