"""Package versions and measured rates of this machine, written as a profile for ``retouch doctor --device``.

The rates are those with which a rehearsal models a machine.
"""

import importlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from findings import Finding, at_least, at_most
from target import Target
from torch.nn.functional import scaled_dot_product_attention

from retouch_plan.machines import MACHINES, find_machine

PACKAGES = (
    *("torch", "transformers", "diffusers", "accelerate", "peft", "pydantic", "rjsonnet", "safetensors", "tokenizers"),
    "retouch",
)
SHARE = 0.8
"""The smallest share of a modelled rate that the GPU must reach."""
PAGEABLE_SHARE = 0.5
"""The same for copies from pageable memory, which the CPU copies into a buffer first: they depend on its clock. A host with a slow
clock, next to an H100, reached 6.7 GB/s. Rehearsals use the rate of the profile."""
ROWS, TOKENS = 8704, 8640
"""Rows of a matrix product with a LoRA, and tokens in an attention layer, of Qwen-Image-Edit at 1024 px."""
WIDTH, HEADS = 3072, 24
RANK = 64
UNITS = {"TFLOP/s": 1e12, "GB/s": 1e9, "µs": 1e-6}


@dataclass(frozen=True)
class Rate:
    """A measured rate in FLOP/s or bytes/s, or a time in seconds.

    ``unit``: the key of `UNITS` in which it is shown. ``field``: the profile field that gets the value; empty for none.
    """

    name: str
    value: float
    unit: str
    field: str = ""


def run(target: Target) -> Iterator[Finding]:
    """Measure versions and rates, and write the profile."""
    yield from _versions()
    modelled = MACHINES[target.machine]
    rates: dict[str, float] = {}
    for rate in _rates(target):
        unit, bounded = UNITS[rate.unit], not target.tiny and rate.field not in ("", "launch")
        if rate.field:
            rates[rate.field] = rate.value
        share = PAGEABLE_SHARE if rate.field == "copy" else SHARE
        limit = share * getattr(modelled, rate.field) / unit if bounded else None
        yield at_least(rate.name, rate.value / unit, limit, rate.unit)
    yield _profile(target, rates)


def _versions() -> Iterator[Finding]:
    missing = 0
    for name in PACKAGES:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            print(f"{name} is missing: {error}")
            missing += 1
        else:
            print(name, getattr(module, "__version__", ""))
    yield at_most("packages that are missing", missing, 0)


def _rates(target: Target) -> Iterator[Rate]:
    device, size = target.device, 64 if target.tiny else 8192
    half, single = (torch.randn(size, size, device=device).to(dtype) for dtype in (torch.bfloat16, torch.float32))
    work = 2 * size**3
    yield Rate("product in bf16", work / target.seconds(lambda: half @ half), "TFLOP/s", "half")
    with _tf32(False):
        yield Rate("product in fp32", work / target.seconds(lambda: single @ single, repeats=3), "TFLOP/s", "single")
    with _tf32(True):
        yield Rate("product in TF32", work / target.seconds(lambda: single @ single, repeats=3), "TFLOP/s")
    yield from _lora(target)
    yield from _attention(target)
    yield from _bandwidth(target)
    small = torch.zeros(8, device=device)
    yield Rate("starting a kernel", _launch(target, small), "µs", "launch")


def _lora(target: Target) -> Iterator[Rate]:
    rows, width = (64, 64) if target.tiny else (ROWS, WIDTH)
    x = torch.randn(rows, width, device=target.device, dtype=torch.bfloat16)
    down, up = (torch.randn(*shape, device=target.device, dtype=torch.bfloat16) for shape in ((width, RANK), (RANK, width)))
    seconds = target.seconds(lambda: x @ down @ up)
    yield Rate(f"products with a LoRA of rank {RANK}", 4 * rows * width * RANK / seconds, "TFLOP/s")


def _attention(target: Target) -> Iterator[Rate]:
    heads, tokens, channels = (2, 64, 32) if target.tiny else (HEADS, TOKENS, WIDTH // HEADS)
    q, k, v = (torch.randn(1, heads, tokens, channels, device=target.device, dtype=torch.bfloat16) for _ in range(3))
    mask = torch.ones(1, 1, 1, tokens, device=target.device, dtype=torch.bool).expand(1, 1, tokens, tokens)
    work = 4 * heads * tokens**2 * channels
    plain = target.seconds(lambda: scaled_dot_product_attention(q, k, v))
    yield Rate(f"attention of {tokens} tokens", work / plain, "TFLOP/s", "attention")
    masked = target.seconds(lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask))
    yield Rate("the same with a mask", work / masked, "TFLOP/s", "masked_attention")


def _bandwidth(target: Target) -> Iterator[Rate]:
    size = 2**16 if target.tiny else 2**30
    source = torch.zeros(size, dtype=torch.uint8, device=target.device)
    copy = torch.empty_like(source)
    yield Rate("bandwidth, read and written", 2 * size / target.seconds(lambda: copy.copy_(source)), "GB/s", "bandwidth")
    host = torch.zeros(size, dtype=torch.uint8)
    yield Rate("copy from pageable memory", size / target.seconds(lambda: copy.copy_(host), repeats=2), "GB/s", "copy")
    if target.is_cuda:
        pinned = host.pin_memory()
        seconds = target.seconds(lambda: copy.copy_(pinned, non_blocking=True), repeats=2)
        yield Rate("copy from pinned memory", size / seconds, "GB/s", "pinned_copy")


def _launch(target: Target, small: torch.Tensor, count: int = 2000) -> float:
    """Seconds that the host needs to launch one kernel, measured before the host waits for the GPU."""
    small.add_(1)
    target.synchronize()
    started = time.perf_counter()
    for _ in range(count):
        small.add_(1)
    spent = time.perf_counter() - started
    target.synchronize()
    return spent / count


def _profile(target: Target, rates: dict[str, float]) -> Finding:
    """Write the profile, and count the measured rates that a rehearsal reads back from it."""
    name = torch.cuda.get_device_name(target.device) if target.is_cuda else "a CPU, in a dry run"
    made: dict[str, Any] = {"name": target.machine, **rates, "measured": f"measured by make gpu on {name}"}
    if target.memory:
        made["memory"] = target.memory
    path = target.folder / "profile.json"
    path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    read = find_machine(str(path))
    kept = sum(getattr(read, each) == rates[each] for each in rates)
    return at_least("rates of profile.json that a rehearsal reads", kept, len(rates))


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    kept = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = kept
