"""What the renderers of completions share: a row's noise, batches of rows that go together, and a deterministic sampler.

Noise is keyed by (seed, step, group), and by the slot too where samples of a group are not to start alike; it is drawn on the CPU.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
from PIL.Image import Image
from torch import nn

from retouch.core.random import generator
from retouch.protocols import DenoisingModel
from retouch.types import Completion, Conditioning

CutOff: TypeAlias = Literal["draw", "fault"]
T = TypeVar("T")


@runtime_checkable
class Completed(Protocol):
    """What a renderer of completions reads of a trajectory."""

    @property
    def outputs(self) -> Sequence[Completion]: ...


class OdeSampler:
    """Draws with a frozen flow-matching model: Euler steps along its own sigmas, without noise on the way.

    ``guidance_scale`` above 1 asks for the negative branch and combines the two as the model's own pipeline does; at 1 there is
    none. The transformer is frozen and set to eval mode by this. ValueError for what is no such setting.
    """

    def __init__(self, model: DenoisingModel, *, num_steps: int, guidance_scale: float = 1.0) -> None:
        if num_steps < 1 or guidance_scale < 1.0:
            raise ValueError(
                f"num_steps {num_steps}, guidance_scale {guidance_scale}: give at least 1 step, and 1 (no guidance) or more"
            )
        self.model = model
        self.num_steps = num_steps
        self.guidance_scale = guidance_scale
        module: nn.Module = model.module
        module.requires_grad_(False).eval()

    @property
    def guided(self) -> bool:
        return self.guidance_scale > 1.0

    @torch.no_grad()
    def __call__(self, conditioning: Conditioning, generators: Sequence[torch.Generator]) -> list[Image | None]:
        """A picture for each row, of noise from its generator; None where the result is not finite.

        Under guidance ``conditioning.negative`` holds the other branch, row by row.
        """
        model, negative = self.model, conditioning.negative
        assert self.guided == (negative is not None)
        x = model.initial_noise(conditioning, generators)
        sigmas = model.sigmas(self.num_steps, conditioning).to(x.device)
        for k in range(self.num_steps):
            sigma = sigmas[k].expand(len(x))
            velocity = model.velocity(model.module, x, sigma, conditioning)
            if negative is not None:
                other = model.velocity(model.module, x, sigma, negative)
                velocity = model.combine(velocity, other, self.guidance_scale)
            x = x + (sigmas[k + 1] - sigmas[k]) * velocity
        finite = x.flatten(1).isfinite().all(dim=1)
        drawn = iter(model.decode(x[finite], conditioning) if finite.any() else [])
        return [next(drawn) if usable else None for usable in finite.tolist()]


def noise(outputs: Sequence[Completion], *, shared: bool) -> list[torch.Generator]:
    """A generator for each row's initial noise; ``shared``: equal for all rows of a group. ValueError: an output without a key."""
    keys = []
    for row, output in enumerate(outputs):
        if output.key is None:
            raise ValueError(
                f"output {row} has no key to draw its noise by; set its (seed, step, group, slot), as a policy's rollout does"
            )
        keys.append(output.key)
    if shared:
        return [generator(seed, "noise", step, group) for seed, step, group, _ in keys]
    return [generator(seed, "noise", step, group, slot) for seed, step, group, slot in keys]


def batches(rows: Sequence[int], *, size: Callable[[int], Hashable], length: Callable[[int], int], at_most: int) -> list[list[int]]:
    """The rows, cut into batches of one size each, with rows of similar lengths beside one another.

    Where all rows of a size fit into one batch they stay in order.
    """
    buckets: dict[Hashable, list[int]] = {}
    for row in rows:
        buckets.setdefault(size(row), []).append(row)
    return [batch for bucket in buckets.values() for batch in by_length(bucket, length=length, at_most=at_most)]


def by_length(rows: Sequence[int], *, length: Callable[[int], int], at_most: int) -> list[list[int]]:
    """The rows in ceil(rows / at_most) batches, whatever their lengths; rows of similar lengths are together."""
    if len(rows) <= at_most:
        return [list(rows)] if rows else []
    order = sorted(rows, key=length)
    return [order[first : first + at_most] for first in range(0, len(order), at_most)]


def once(items: Sequence[T]) -> tuple[list[T], list[int]]:
    """The objects that occur, and for each place the number of its object; objects are told apart by identity."""
    numbers: dict[int, int] = {}
    index = [numbers.setdefault(id(item), len(numbers)) for item in items]
    first = {number: place for place, number in reversed(list(enumerate(index)))}
    return [items[first[number]] for number in range(len(numbers))], index
