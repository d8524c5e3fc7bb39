"""Decodes completions with a tiny writer on the fake accelerator: all tokens, and only a few, as in a dry run.

    python dry_run_tokens.py

Prints for each of ``CASES`` a JSON line with the kernels, FLOPs, host waits and peak memory of both ways, and the figures that the
dry run reports for one token.
"""

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

import tiny_writers
import tiny_writing
from retouch.policies.decoding import CachedDecoding
from retouch.policies.rollout import TokenRollout
from retouch_models.qwen_vl import QwenWriter
from retouch_plan.accelerator import DEVICE, Accelerator, register
from retouch_plan.machines import MACHINES
from retouch_plan.meter import Meter, Stage, Work
from retouch_plan.repeats import FewTokens

GROUP = 4
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "growing": (64, {"static": False}),
    "static": (48, {"static": True}),
    "static, long": (112, {"static": True}),
    "static, seldom": (90, {"static": True, "check_every": 40}),
    "static, two rooms": (300, {"static": True}),
}
"""The number of tokens and the options of the decoding, by name."""
WAYS: dict[str, Callable[[CachedDecoding, Meter], Any]] = {"all": lambda decoder, meter: decoder, "few": FewTokens}


def figures(work: Work) -> dict[str, float]:
    counts = {name: work.counts[name] for name in ("kernels", "captured")}
    return {**counts, "flops": sum(work.flops.values()), "waits": sum(work.waits.values())}


def decoded(tokens: int, options: dict[str, Any]) -> Iterator[tuple[str, Stage, Any]]:
    """Yield the name of each way, the stage in which it decoded, and the decoder."""
    for name, way in WAYS.items():
        meter = Meter(MACHINES["h100"])
        with Accelerator(observe=meter.observe, on_read=meter.wait, is_weight=meter.is_weight), torch.no_grad():
            module = tiny_writers.module("qwen2.5").to(torch.device(DEVICE, 0))
            model = QwenWriter(module, tiny_writers.tokenizer(), template=tiny_writers.TEMPLATE)
            tasks = tiny_writers.tasks(1, with_images=False)
            batch, prompts = tiny_writing.batch(tasks, GROUP), model.encode(tasks)
            decoder = way(CachedDecoding(model, **options), meter)
            with meter.stage("decoding"):
                decoder(batch, prompts, TokenRollout(max_new_tokens=tokens))
            yield name, meter.stages["decoding"], decoder


def main() -> None:
    register()
    for case, (tokens, options) in CASES.items():
        line: dict[str, Any] = {"case": case, "token": None}
        for name, stage, decoder in decoded(tokens, options):
            line[name] = {**figures(stage.work), "peak": stage.peak}
            token = getattr(decoder, "token", None)
            if token is not None:
                line["token"] = figures(token)
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
