"""What all checks share: a condition with its figures, and distances of tensors."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def require(ok: bool | Tensor, says: str) -> None:
    """AssertionError with ``says`` where it is not so; also under ``python -O``."""
    if not ok:
        raise AssertionError(says)


def require_close(a: Tensor, b: Tensor, *, limit: float, what: str) -> None:
    """AssertionError where two tensors differ by more than ``limit`` of the larger one's largest value, or in shape, or in NaN."""
    require(a.shape == b.shape, f"{what}: shapes {tuple(a.shape)} and {tuple(b.shape)} differ")
    a, b = a.detach().double(), b.detach().double()
    require(
        torch.equal(a.isnan(), b.isnan()),
        f"{what}: {int((a.isnan() != b.isnan()).sum())} of {a.numel()} values are NaN in one only",
    )
    a, b = a.nan_to_num(0.0), b.nan_to_num(0.0)
    if a.numel():
        scale = torch.maximum(a.abs().max(), b.abs().max()).clamp(min=1e-12)
        distance = ((a - b).abs().max() / scale).item()
        require(distance <= limit, f"{what}: they differ by {distance:.2e} of the largest value, and {limit:.0e} is allowed")


def relative_distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """|a - b| / |b| over all tensors."""
    apart = sum(float((x.double() - y.double()).square().sum()) for x, y in zip(a, b, strict=True))
    length = sum(float(y.double().square().sum()) for y in b)
    return (apart / length) ** 0.5 if length else float(apart > 0)


@contextmanager
def own_random_only(what: str) -> Iterator[None]:
    """AssertionError where the block draws from torch's global generator."""
    before = torch.get_rng_state()
    yield
    require(torch.equal(before, torch.get_rng_state()), f"{what} draws from torch's global generator; key a generator of its own")


def twice(make: Callable[[], T], what: str) -> tuple[T, T]:
    """Two results, between which only the global generator was seeded anew."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        with own_random_only(what):
            first = make()
        torch.manual_seed(2)
        return first, make()
