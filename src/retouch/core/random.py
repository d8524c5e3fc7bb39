"""Generators keyed by what they are for, so that no draw depends on what was drawn before it or where it runs."""

import hashlib

import torch


def generator(*key: int | str) -> torch.Generator:
    """A CPU generator seeded by the key: (seed, "noise", step, group, slot), say.

    Draws are made on the CPU and moved, so that a run sees the same noise on every device. Equal keys give equal streams;
    keys that differ anywhere, in type or value, give unrelated ones (SHA-256 of the key's repr, first 63 bits).
    """
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
