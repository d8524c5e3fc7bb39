"""Trains with the reward of a server (`examples/reward_server.py`), so the GPUs of the run hold only the trained model.

    accelerate launch examples/train_with_reward_server.py http://10.0.0.5:8700     # 1 to 8 GPUs
    python examples/train_with_reward_server.py http://127.0.0.1:8700 --tiny        # a CPU, in seconds

The scores have the same bits as with the same reward inside the run. If the server does not answer for a while, requests are
repeated; if it still does not answer, the run saves a checkpoint and ends, and continues from it when it is started again.
"""

import sys

import retouch

server = next((word for word in sys.argv[1:] if word.startswith("http")), "http://127.0.0.1:8700")

arguments = {
    "model": "stabilityai/stable-diffusion-3.5-medium",
    "reward_funcs": retouch.rewards.Remote(endpoints=(server,), deadline=120.0),
    "reward_weights": {"pickscore": 1.0},
    "train_dataset": [
        {"prompt": f"{animal} in {place}"} for animal in ("a cat", "an owl") for place in ("snow", "a tree", "a bus")
    ],
    "objective": retouch.GRPO(clip=1e-4),
    "peft_config": retouch.Lora(rank=32, alpha=64),
    "size": (512, 512),
    "steps": 200,
    "group_size": 16,
    "run_name": "with-reward-server",
}
if "--tiny" in sys.argv:
    import tiny

    arguments |= tiny.sd3()

retouch.Trainer(**arguments).train()
