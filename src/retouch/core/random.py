"""Random generators seeded by a key, so that a draw depends neither on earlier draws nor on the device or rank."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def generator(*key: int | str) -> torch.Generator:
    """A CPU generator seeded by ``key``, for example ``generator(seed, "noise", step, group, slot)``.

    Draw on the CPU and move the result, so that a run sees the same noise on every device. Equal keys give equal streams. Keys
    that differ in any value or type give independent streams (the seed is the first 63 bits of the SHA-256 of the key's repr).
    """
    import torch

    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def permutation(count: int, *key: int | str) -> list[int]:
    """The numbers from 0 to ``count - 1`` in a random order, drawn from ``generator(*key)``."""
    import torch

    return list(torch.randperm(count, generator=generator(*key)).tolist())


def backoff_pause(*key: int | str, attempt: int, base: float, longest: float) -> float:
    """Draw a pause in seconds before the next attempt: uniform from 0 to min(longest, base 2^attempt), which is full jitter.

    ``attempt`` counts from 0. The generator is seeded with ``key`` and ``attempt``, so clients with other keys pause differently.
    """
    import torch

    draw = torch.rand((), generator=generator(*key, attempt)).item()
    return draw * min(longest, base * 2.0 ** min(attempt, 30))
