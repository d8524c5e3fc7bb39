"""Compares the speed of cached decoding of image tokens to transformers' generate with the same grammar.

    python measurements/engines/image_tokens.py [--rounds 3]

The model is a random Emu3 of width 256 with four layers, and an image has 16 x 16 codes. Both sides use one thread, sample at
temperature 1, and are measured in turn in one run; the results are medians of the rounds after a warm-up round. In `generate` the
grammar is a logits processor in Python that looks at the ids written so far, the usual implementation in a trainer.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Emu3Config, Emu3ForConditionalGeneration, GenerationConfig, LogitsProcessor, LogitsProcessorList

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
import tiny_emu3
import tiny_models
from retouch.policies.decoding import CachedDecoding
from retouch.policies.rollout import TokenRollout
from retouch.types import Batch
from retouch_models.emu3 import Emu3Editor, Emu3Tokens, language_model

SIDE, WIDTH, GROUPS, SAMPLES = 16, 256, 4, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    count = parser.parse_args().rounds
    torch.set_num_threads(1)
    editor = untrained()
    numbers = tuple(range(GROUPS))
    batch = Batch(
        seed=0,
        step=0,
        tasks=tuple(tiny_models.task(str(k), "make it red", tiny_models.image(k, 2 * SIDE, 2 * SIDE)) for k in numbers),
        group_ids=numbers,
        group=tuple(k for k in numbers for _ in range(SAMPLES)),
        slot=tuple(range(SAMPLES)) * GROUPS,
    )
    length = len(editor.words.header(SIDE, SIDE)) + SIDE * (SIDE + 1) + 3
    inside = InModel(editor)
    ways = {
        "cached decoding": lambda: cached(editor, batch, length),
        "generate, the grammar in Python": lambda: generated(editor, batch, length),
    }
    rounds = [{name: timed(way, inside) for name, way in ways.items()} for _ in range(count + 1)][1:]
    print(f"| {GROUPS} x {SAMPLES} pictures of {SIDE} x {SIDE} codes | tokens a second | share of time in the model |")
    print("| --- | --- | --- |")
    for name in ways:
        taken = statistics.median(each[name][0] for each in rounds)
        share = statistics.median(each[name][1] for each in rounds)
        print(f"| {name} | {len(batch) * length / taken:.0f} | {share:.2f} |")
    plain, ours = (statistics.median(each[name][0] for each in rounds) for name in reversed(ways))
    print(f"\ncached decoding is {plain / ours:.2f} times as fast")


def untrained() -> Emu3Editor:
    """A random Emu3 with an autoencoder that encodes an image of 32 x 32 px as 16 x 16 codes."""
    words = tiny_emu3.tokenizer()
    config = tiny_emu3.module().config.to_dict()
    config["text_config"] |= {
        **{"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 4, "num_attention_heads": 8},
        **{"num_key_value_heads": 4, "head_dim": WIDTH // 8, "max_position_embeddings": 2048},
    }
    torch.manual_seed(0)
    whole = Emu3ForConditionalGeneration(Emu3Config.from_dict(config)).requires_grad_(False).eval()
    return Emu3Editor(language_model(whole), words, vq=whole.model.vqmodel, size=(2 * SIDE, 2 * SIDE))


class InModel:
    """Measures the seconds that are spent inside the decoder and its head, with hooks."""

    def __init__(self, editor: Emu3Editor) -> None:
        self.seconds, self._began = 0.0, 0.0
        for module in (editor.module.model, editor.module.lm_head):
            module.register_forward_pre_hook(self._begin)
            module.register_forward_hook(self._end)

    def _begin(self, *_: object) -> None:
        self._began = time.perf_counter()

    def _end(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began


def timed(way: Callable[[], int], inside: InModel) -> tuple[float, float]:
    """The seconds of a call, and the share of them that is spent inside the model."""
    inside.seconds, began = 0.0, time.perf_counter()
    way()
    taken = time.perf_counter() - began
    return taken, inside.seconds / taken


def cached(editor: Emu3Editor, batch: Batch, length: int) -> None:
    """Sample the batch with cached decoding, and check that all rows are images."""
    made = CachedDecoding(editor)(batch, editor.encode(batch.tasks), TokenRollout(max_new_tokens=length))
    assert all(editor.codes_in(row) is not None for row in made.ids.tolist())


class Grid(LogitsProcessor):
    """The grammar of an image: for each row, it allows only the ids that may follow those after the prompt."""

    def __init__(self, words: Emu3Tokens, prompt: int) -> None:
        self.words, self.prompt = words, prompt
        self.header = words.header(SIDE, SIDE)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for row, ids in enumerate(input_ids[:, self.prompt :].tolist()):
            allowed = torch.full_like(scores[row], -torch.inf)
            allowed[self.next(ids)] = 0.0
            scores[row] = scores[row] + allowed
        return scores

    def next(self, ids: list[int]) -> list[int]:
        words = self.words
        if len(ids) < len(self.header):
            return [self.header[len(ids)]]
        since = len(ids) - len(self.header)
        if since < SIDE * (SIDE + 1):
            return [words.eol] if since % (SIDE + 1) == SIDE else words.visual.tolist()
        return [[words.eof, words.eoi, words.eos][since - SIDE * (SIDE + 1)]]


@torch.no_grad()
def generated(editor: Emu3Editor, batch: Batch, length: int) -> None:
    """Sample the batch with ``generate``, and check that all rows are images."""
    prompts = editor.encode(batch.tasks).take(torch.tensor(batch.group))
    made = editor.module.generate(
        input_ids=prompts.ids,
        attention_mask=prompts.mask.long(),
        generation_config=GenerationConfig(
            max_new_tokens=length, do_sample=True, top_k=0, eos_token_id=editor.words.eos, pad_token_id=editor.pad
        ),
        logits_processor=LogitsProcessorList([Grid(editor.words, prompts.ids.shape[1])]),
    )[:, prompts.ids.shape[1] :]
    assert all(editor.codes_in(row) is not None for row in made.tolist())


if __name__ == "__main__":
    main()
