"""A vision-language model sees an image and an instruction, and writes how to edit it; a frozen Qwen-Image-Edit reads its text.

    export OPENAI_API_KEY=...
    accelerate launch --config_file recipes/accelerate/zero2.yaml examples/writer_before_editor.py --photos DIR
    python examples/writer_before_editor.py --tiny  # a CPU, in seconds; the line above: 8 GPUs with 80 GB

DIR has images and a metadata.jsonl: {"file_name": "beach.jpg", "instruction": "make it evening and remove the boat"}. The judge
scores how well the edit follows the instruction, and how much of the rest was kept.
"""

import sys

import retouch
from retouch_judge.kinds import Endpoint

judge = Endpoint(model="gpt-4o", base_url="https://api.openai.com/v1")

arguments = {
    "model": "Qwen/Qwen2.5-VL-7B-Instruct",
    "renderer": {
        **{"kind": "response", "model": "Qwen/Qwen-Image-Edit", "encoder": "frozen"},  # the editor's own encoder reads the response
        **{"num_steps": 20, "guidance_scale": 4.0, "batch": 2},
    },
    "reward_funcs": retouch.rewards.Aspects(judge=judge, aspects=("alignment", "identity")),
    "reward_weights": {"alignment": 0.6, "identity": 0.4},
    "train_dataset": sys.argv[sys.argv.index("--photos") + 1] if "--photos" in sys.argv else None,
    "objective": retouch.GRPO(clip=0.2, normalise="dr_grpo"),
    "peft_config": retouch.Lora(rank=32, alpha=64),
    "rollout": {"kind": "tokens", "max_new_tokens": 512},
    "gradient_checkpointing": True,
    "sharding": "zero2",
    "learning_rate": 1e-5,
    "steps": 1500,
    "tasks_per_step": 2,
    "group_size": 8,
    "microbatch": 1,
    "eval": {"every": 100, "tasks": 48, "batch": 2},
    "run_name": "writer-before-editor",
}
if "--tiny" in sys.argv:
    import tiny

    arguments |= tiny.writer()

trainer = retouch.Trainer(**arguments)
trainer.train()
trainer.save_pretrained(trainer.folder / "writer")
