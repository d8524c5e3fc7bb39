"""Compares the speed of cached decoding to transformers' generate and to its continuous batching, in turn in one run.

    python measurements/engines/text.py [--rounds 3]

The model is a tiny random Qwen2.5 on one thread. The results are tokens per second, medians of the rounds after a warm-up round.
With one stop token, almost all rows reach the longest length ("one length"); with 26 stop tokens, rows end at unequal lengths.
"""

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
import tiny_writers
import tiny_writing
from retouch.policies.decoding import CachedDecoding
from retouch.policies.rollout import TokenRollout
from retouch.types import Batch

GROUPS, SIZE, LONGEST = 8, 8, 64
PAGE = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    count = parser.parse_args().rounds
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    print(f"| {GROUPS} tasks x {SIZE} rows, at most {LONGEST} tokens | `cached` | `generate` | `generate_batch` |")
    print("| --- | --- | --- | --- |")
    for width in (64, 256):
        for stops, words in ((1, "one length"), (26, "unequal lengths")):
            rates = measured(width, stops, count)
            print(f"| width {width}, {words} | {' | '.join(f'{rate:.0f}' for rate in rates)} |")


def measured(width: int, stops: int, count: int) -> list[float]:
    """The tokens per second of cached decoding, ``generate`` and ``generate_batch``."""
    shape = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 4, "num_attention_heads": width // 32}
    writer = tiny_writers.writer(
        "qwen2.5", stop=tiny_writing.STOPS[:stops], text=shape | {"num_key_value_heads": max(1, width // 64)}
    )
    batch = tiny_writing.batch(tiny_writers.tasks(GROUPS, with_images=False), SIZE)
    ways = (lambda: cached(writer, batch), lambda: generated(writer, batch), lambda: batched(writer, batch))
    rounds = [[rate(way) for way in ways] for _ in range(count + 1)][1:]
    return [statistics.median(each) for each in zip(*rounds, strict=True)]


def rate(way: Callable[[], int]) -> float:
    """Tokens per second of a call that returns its number of tokens."""
    began = time.perf_counter()
    return way() / (time.perf_counter() - began)


def cached(writer: tiny_writers.QwenWriter, batch: Batch) -> int:
    return int(CachedDecoding(writer)(batch, writer.encode(batch.tasks), TokenRollout(max_new_tokens=LONGEST)).lengths.sum())


def settings(writer: tiny_writers.QwenWriter) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=LONGEST,
        do_sample=True,
        top_k=0,
        eos_token_id=list(writer.stop),
        pad_token_id=writer.pad,
        suppress_tokens=(~writer.grammar.vocabularies[0]).nonzero()[:, 0].tolist(),
    )


@torch.no_grad()
def generated(writer: tiny_writers.QwenWriter, batch: Batch) -> int:
    prompts = writer.encode(batch.tasks).take(torch.tensor(batch.group))
    made = writer.module.generate(input_ids=prompts.ids, attention_mask=prompts.mask.long(), generation_config=settings(writer))[
        :, prompts.ids.shape[1] :
    ]
    ends = torch.isin(made, torch.tensor(writer.stop)).int()
    return int(torch.where(ends.any(1), ends.argmax(1) + 1, made.shape[1]).sum())


def batched(writer: tiny_writers.QwenWriter, batch: Batch) -> int:
    prompts = writer.encode(batch.tasks)
    rows = [prompts.ids[k][prompts.mask[k]].tolist() for k in batch.group]
    pages = len(rows) * ((max(map(len, rows)) + LONGEST) // PAGE + 2)
    how = ContinuousBatchingConfig(return_logprobs=True, page_size=PAGE, num_blocks=pages, max_batch_tokens=512)
    made = writer.module.generate_batch(rows, generation_config=settings(writer), continuous_batching_config=how)
    assert len(made) == len(rows)
    return sum(len(each.generated_tokens) for each in made.values())


if __name__ == "__main__":
    main()
