"""Compares a vLLM server on this machine's CPU to the policy's own engine: tokens per second, and differences of log-probabilities.

    make engines                              # once, for the environment
    python measurements/engines/served.py

The model is a tiny random vision-language writer. Both engines are measured in turn in one run; the results are medians of three
rounds after a warm-up round. vLLM uses its model runner V1; V2 needs Triton's interpreter on a CPU. The speeds on a CPU do not
predict those on a GPU.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
import served_models
import tiny_writers
import tiny_writing
import vllm_server
from retouch.policies.autoregressive import AutoregressivePolicy
from retouch.policies.decoding import CachedDecoding
from retouch.types import Batch

TASKS, ROWS, LONGEST, ROUNDS = 8, 8, 64, 3


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        served_models.save_writer(here / "model")
        with vllm_server.running(here / "model", here / "server", *vllm_server.LORA_FLAGS) as server:
            policy = served_models.policy(
                served_models.writer(here / "model"), server.url, here / "run", sampling={"max_new_tokens": LONGEST}
            )
            tiny_writers.perturb(policy.module)
            report(policy)
            policy.engine.close()


def report(policy: AutoregressivePolicy) -> None:
    """Measure both engines and print the table."""
    tasks = served_models.tasks(TASKS - 1)
    engines = {"vllm": policy.engine, "cached": CachedDecoding(policy.model)}
    rates: dict[str, list[float]] = {name: [] for name in engines}
    differences: list[float] = []
    for number in range(ROUNDS + 1):
        batch = tiny_writing.batch(tasks, ROWS, step=number)
        for name, engine in engines.items():
            rates[name].append(rate(policy, engine, batch))
        trajectory = policy.rollout(batch)
        assert trajectory.behaviour_log_probs is not None
        differences += (trajectory.log_probs - trajectory.behaviour_log_probs)[trajectory.mask].abs().tolist()
    print(f"| {TASKS} tasks x {ROWS} rows, at most {LONGEST} tokens | tokens a second |")
    print("| --- | --- |")
    for name, found in rates.items():
        print(f"| {name} | {statistics.median(found[1:]):.0f} |")
    mean, largest = statistics.mean(differences), max(differences)
    print(f"\nmismatch over {len(differences)} tokens: mean {mean:.1e}, largest {largest:.1e} nats")


def rate(policy: AutoregressivePolicy, engine: object, batch: Batch) -> float:
    """Tokens per second of a generation."""
    began = time.perf_counter()
    made = engine(batch, policy.model.encode(batch.tasks), policy.sampling)  # type: ignore[operator]
    return int(made.lengths.sum()) / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
