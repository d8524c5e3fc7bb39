"""Makes the batches of examples/one_file_flow_grpo.py for the library."""

import importlib.util
from pathlib import Path
from types import ModuleType

import torch

from retouch.types import Batch, Task

ROOT = Path(__file__).resolve().parents[2]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("one_file_flow_grpo", ROOT / "examples" / "one_file_flow_grpo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


one_file = _load()


def one_file_batch(seed: int, step: int) -> Batch:
    """The batch of the example's step: its prompts in its order, so that the library draws the same noise for them."""
    order = torch.randperm(len(one_file.PROMPTS), generator=one_file.generator(seed, "prompts", step))
    prompts = [one_file.PROMPTS[k] for k in order[: one_file.PROMPTS_PER_STEP]]
    return Batch(
        seed=seed,
        step=step,
        tasks=tuple(Task(id=prompt, instruction=prompt) for prompt in prompts),
        group_ids=tuple(range(len(prompts))),
        group=tuple(k for k in range(len(prompts)) for _ in range(one_file.GROUP_SIZE)),
        slot=tuple(range(one_file.GROUP_SIZE)) * len(prompts),
    )
