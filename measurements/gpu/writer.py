"""A writer with 7 B parameters samples 64 tokens for eight rows, with a growing and a static cache, and as a CUDA graph.

Measured are milliseconds, host waits and kernels per token, the number of tokens that differ with a graph, and the milliseconds of
``generate`` of transformers.
"""

import json
from collections.abc import Iterator
from functools import partial
from importlib.resources import files
from typing import Any

import torch
from cases import random_weights, write_writer
from findings import Finding, at_most, measured
from target import Target

from retouch.models.train import Lora
from retouch.policies.decoding import CHECK_EVERY, CachedDecoding
from retouch.policies.rollout import TokenRollout
from retouch.types import Batch, Task
from retouch_models.language import QwenLanguageModel
from retouch_plan.dry_run import WORDS

ROWS, RANK = 8, 32
PROFILED = 9
"""The number of tokens that are profiled."""
REHEARSED_KERNELS = {"growing cache": 1691, "static cache": 1836, "graph": 1836}
"""The kernels of a token of this writer in a rehearsal (docs/machines.md)."""
MOST_MILLISECONDS = 12.0
"""The longest allowed time of a token of a graph. Reading the weights once takes 5 ms; a graph of this step took 11.5 ms."""
TINY = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
TINY_VISION = {"depth": 1, "embed_dim": 64, "hidden_size": 128, "num_heads": 2}


def run(target: Target) -> Iterator[Finding]:
    """Time cached decoding with both caches, then ``generate`` of transformers."""
    target.require_memory(24e9)
    tokens = 17 if target.tiny else 64
    model = _model(target)
    batch = _batch()
    prompts = model.encode(batch.tasks)
    made = {}
    for way in REHEARSED_KERNELS:
        decode = CachedDecoding(model, static=way != "growing cache")
        decode.captures = way == "graph"
        sample = partial(decode, batch, prompts, TokenRollout(max_new_tokens=tokens, temperature=1.0))
        target.reset_peak()
        made[way] = sample()  # a warm-up
        seconds = target.elapsed(sample)
        few = partial(decode, batch, prompts, TokenRollout(max_new_tokens=PROFILED, temperature=1.0))
        of_few = target.elapsed(few)
        limit = MOST_MILLISECONDS if way == "graph" and not target.tiny else None
        of_token = (seconds - of_few) / (tokens - PROFILED)
        yield at_most(f"{way}, {ROWS} rows: time of a token", 1e3 * of_token, limit, "ms")
        yield measured(f"{way}: prompt, and capture if any", of_few - PROFILED * of_token, "s")
        yield measured(f"{way}: tokens a second, all rows", ROWS * tokens / seconds)
        yield measured(f"{way}: peak", target.peak() / 1e9, "GB")
        first = partial(decode, batch, prompts, TokenRollout(max_new_tokens=1, temperature=1.0))
        most = None if way == "growing cache" else 1 / CHECK_EVERY + 1 / tokens
        if way != "graph":  # a capture itself waits for the device
            yield at_most(f"{way}: host waits of a token", (target.waits(sample) - target.waits(first)) / (tokens - 1), most)
            yield measured(f"{way}: kernels of a token", (target.kernels(few) - target.kernels(first)) / (PROFILED - 1))
        if not target.tiny:
            yield measured(f"{way}: rehearsed kernels of a token", REHEARSED_KERNELS[way])
    yield at_most("tokens that differ with a graph", int((made["graph"].ids != made["static cache"].ids).sum()), 0)
    for _ in range(2):
        seconds = target.elapsed(lambda: _generate(model, prompts, tokens))
    yield measured("transformers' generate, time of a token", 1e3 * seconds / tokens, "ms")


def _model(target: Target) -> Any:
    described = json.loads((files("retouch.models") / "configs" / "writers" / "qwen2-vl-7b-instruct.json").read_text("utf-8"))
    if target.tiny:
        described["config"]["text_config"].update(TINY)
        described["config"]["vision_config"].update(TINY_VISION)
    folder = write_writer(target.scratch, described)
    section = QwenLanguageModel(kind="qwen-vl", path=str(folder), dtype="bfloat16")
    with random_weights(target):
        model: Any = section.build(device=target.device, gradient_checkpointing=False)
    Lora(rank=RANK, alpha=2 * RANK).make_trainable(model.module, targets=section.lora_targets, seed=0)
    return model


def _batch() -> Batch:
    task = Task(id="writer", instruction=" ".join(["word"] * WORDS))
    return Batch(seed=0, step=0, tasks=(task,), group_ids=(0,), group=(0,) * ROWS, slot=tuple(range(ROWS)))


@torch.no_grad()
def _generate(model: Any, prompts: Any, tokens: int) -> None:
    ids, mask = prompts.ids.repeat(ROWS, 1), prompts.mask.long().repeat(ROWS, 1)
    model.module.generate(
        input_ids=ids, attention_mask=mask, do_sample=True, min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=model.pad
    )
