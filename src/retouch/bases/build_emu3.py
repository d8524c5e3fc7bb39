"""`retouch playground build --emu3`: trains the base editors of image tokens, and the autoencoder whose codes they write."""

import copy
import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Emu3ForConditionalGeneration, PreTrainedTokenizerBase

from retouch.bases.emu3 import LONGEST, Emu3Training, emu3_tokenizer, train_emu3
from retouch.bases.image_codes import CodesTraining, train_codes
from retouch.models.emu3 import Emu3Editor
from retouch.models.emu3_load import language_model
from retouch.playground.judge import PlaygroundJudge
from retouch.playground.scenes import SIZE
from retouch.playground.tasks import PlaygroundTasks
from retouch.policies.autoregressive import AutoregressivePolicy
from retouch.policies.decoding import Decoding
from retouch.policies.weights import WeightCopies
from retouch.renderers.codes import CodesRenderer
from retouch.rewards.judging import Judge
from retouch.runs import files
from retouch.runs.build_model import playground_weights
from retouch.runs.evaluation import Evaluator, table
from retouch.runs.journal import unkept
from retouch.runs.ranks import Ranks

log = logging.getLogger("retouch")
COMMAND = "retouch playground build --emu3"
HELD_OUT = 330


CODES = CodesTraining(steps=1500, free_steps=700)
STARTS = {
    "s": Emu3Training(complexity={1: 1.0}, rounds=(2200, 2200)),
    "sc": Emu3Training(complexity={1: 0.75, 2: 0.125, 3: 0.125}, rounds=(2200, 2200)),
}
"""Taught single edits, or also some of two and three."""


def build_emu3(
    out: Path | None, *, seed: int, codes: CodesTraining = CODES, starts: Mapping[str, Emu3Training] = STARTS
) -> dict[str, float]:
    """Train autoencoder and editors and write them to ``out`` (None: into the package). Returns held-out means.

    One thread, so that the bits do not depend on how many cores there are.
    """
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s", force=True)
    folder = playground_weights("emu3") if out is None else out
    threads, began = torch.get_num_threads(), time.perf_counter()
    torch.set_num_threads(1)
    try:
        vq = train_codes(replace(codes, seed=seed), log.info)
        words = emu3_tokenizer(seed)
        trained = {name: train_emu3(vq, words, replace(settings, seed=seed), _named(name)) for name, settings in starts.items()}
    finally:
        torch.set_num_threads(threads)
    _halved(vq).save_pretrained(folder / "autoencoder")
    words.save_pretrained(folder / "tokenizer")
    scores = {}
    for name, whole in trained.items():
        _halved(language_model(whole)).save_pretrained(folder / name)
        scores |= {f"{name}, {what}": value for what, value in measure(whole, words).items()}
    files.write_json(folder / "build.json", {"command": f"{COMMAND} --seed {seed}", "seed": seed, "held_out": scores})
    log.info("built in %.0f s: %s", time.perf_counter() - began, folder)
    for what, value in scores.items():
        log.info("  %-40s %.3f", what, value)
    return scores


def measure(whole: Emu3ForConditionalGeneration, words: PreTrainedTokenizerBase) -> dict[str, float]:
    """Held-out means of its likeliest pictures, and of the true targets through its codes, by complexity."""
    module: Any = language_model(whole)
    editor = Emu3Editor(module, words, vq=whole.model.vqmodel, size=(SIZE, SIZE))
    decoding = Decoding(max_new_tokens=LONGEST)
    policy = AutoregressivePolicy(editor, decoding=decoding, microbatch=HELD_OUT, copies=WeightCopies(editor.module))
    evaluate = Evaluator(
        tasks=PlaygroundTasks(seed=1, count=HELD_OUT, complexity=[1, 2, 3], split="test"),
        renderer=CodesRenderer(editor, rows=HELD_OUT),
        judge=unkept(Judge(PlaygroundJudge(), {"overall": 1.0})),
        ranks=Ranks(),
        seed=1,
        batch=HELD_OUT,
    )
    ceiling = evaluate.ceiling(policy)
    assert ceiling is not None
    found = {f"ceiling {name}": float(value) for name, value in table(ceiling)[0]["all"].items() if name in ("overall", "exact")}
    for row, means in table(evaluate(policy))[0].items():
        if "kinds" not in row:
            found |= {f"{row} {name}": float(means[name]) for name in ("overall", "IF", "IP", "PQ", "exact")}
    return found


def _named(name: str) -> Callable[[str], None]:
    return lambda line: log.info("%s %s", name, line)


def _halved(module: nn.Module) -> Any:
    return copy.deepcopy(module).half()
