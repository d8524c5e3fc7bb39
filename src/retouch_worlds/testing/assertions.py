"""Assertions that all checks share."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def require(ok: bool | Tensor, message: str) -> None:
    """Raise AssertionError with ``message`` unless ``ok``; also under ``python -O``."""
    if not ok:
        raise AssertionError(message)


def require_close(a: Tensor, b: Tensor, *, limit: float, what: str) -> None:
    """Raise AssertionError if two tensors differ in shape, in NaN, or by more than ``limit`` times their largest absolute value."""
    require(a.shape == b.shape, f"{what}: shapes {tuple(a.shape)} and {tuple(b.shape)} differ")
    a, b = a.detach().double(), b.detach().double()
    require(
        torch.equal(a.isnan(), b.isnan()),
        f"{what}: {int((a.isnan() != b.isnan()).sum())} of {a.numel()} values are NaN in only one of them",
    )
    a, b = a.nan_to_num(0.0), b.nan_to_num(0.0)
    if a.numel():
        scale = torch.maximum(a.abs().max(), b.abs().max()).clamp(min=1e-12)
        distance = ((a - b).abs().max() / scale).item()
        require(distance <= limit, f"{what}: they differ by {distance:.2e} of the largest value; the limit is {limit:.0e}")


def relative_distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """|a - b| / |b| over all tensors together."""
    distance = sum(float((x.double() - y.double()).square().sum()) for x, y in zip(a, b, strict=True))
    length = sum(float(y.double().square().sum()) for y in b)
    return (distance / length) ** 0.5 if length else float(distance > 0)


@contextmanager
def no_global_draws(what: str) -> Iterator[None]:
    """Raise AssertionError if the block draws from torch's global generator."""
    before = torch.get_rng_state()
    yield
    require(torch.equal(before, torch.get_rng_state()), f"{what} draws from torch's global generator; use a generator of its own")


def call_twice(make: Callable[[], T], what: str) -> tuple[T, T]:
    """The results of two calls, with a different seed of the global generator before each."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        with no_global_draws(what):
            first = make()
        torch.manual_seed(2)
        return first, make()
