"""Code that the renderers of completions share: the noise of each row, batches of similar rows, and a deterministic sampler.

Noise is drawn on the CPU. Its key is (seed, step, group), and the slot if the samples of a group have different noise.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from retouch.protocols import DenoisingModel
    from retouch.types import Completion, Conditioning

T = TypeVar("T")


@runtime_checkable
class HasCompletions(Protocol):
    """The field of a trajectory that a renderer of completions reads."""

    @property
    def outputs(self) -> Sequence[Completion]: ...


class OdeSampler:
    """Samples from a frozen flow-matching model: deterministic Euler steps along the model's own sigmas.

    ``guidance_scale``: 1 needs no negative branch; above 1, the two branches are combined as in the model's own pipeline. The
    constructor freezes the transformer and sets it to eval mode. Raises ValueError for fewer than 1 step, or a scale below 1.

    Source: diffusers' FlowMatchEulerDiscreteScheduler.
    """

    def __init__(self, model: DenoisingModel, *, num_steps: int, guidance_scale: float = 1.0) -> None:
        if num_steps < 1 or guidance_scale < 1.0:
            raise ValueError(
                f"num_steps {num_steps}, guidance_scale {guidance_scale}: use at least 1 step, and a scale of at least 1"
            )
        self.model = model
        self.num_steps = num_steps
        self.guidance_scale = guidance_scale
        model.module.requires_grad_(False).eval()

    @property
    def guided(self) -> bool:
        return self.guidance_scale > 1.0

    def __call__(self, conditioning: Conditioning, generators: Sequence[torch.Generator]) -> list[Image | None]:
        """Sample an image for each row, from the noise of its generator; None if the result is not finite.

        With guidance, ``conditioning.negative`` is the negative branch of each row.
        """
        import torch

        model, negative = self.model, conditioning.negative
        assert self.guided == (negative is not None)
        with torch.no_grad():
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
            images = iter(model.decode(x[finite], conditioning) if finite.any() else [])
        return [next(images) if usable else None for usable in finite.tolist()]


def noise_generators(completions: Sequence[Completion], *, shared: bool) -> list[torch.Generator]:
    """Return a generator for the initial noise of each row. ``shared``: all rows of a group have the same noise.

    Raises ValueError for a completion without a key.
    """
    from retouch.core.random import generator

    keys = []
    for row, completion in enumerate(completions):
        if completion.key is None:
            raise ValueError(
                f"output {row} has no key for its noise; set its key to (seed, step, group, slot), as a policy's rollout does"
            )
        keys.append(completion.key)
    if shared:
        return [generator(seed, "noise", step, group) for seed, step, group, _ in keys]
    return [generator(seed, "noise", step, group, slot) for seed, step, group, slot in keys]


def bucket(rows: Sequence[int], *, size: Callable[[int], Hashable], length: Callable[[int], int], batch: int) -> list[list[int]]:
    """Split the rows into batches of at most ``batch`` rows of equal size, with rows of similar lengths together.

    If all rows of one size fit into one batch, they keep their order.
    """
    buckets: dict[Hashable, list[int]] = {}
    for row in rows:
        buckets.setdefault(size(row), []).append(row)
    return [each for same_size in buckets.values() for each in sort_by_length(same_size, length=length, batch=batch)]


def sort_by_length(rows: Sequence[int], *, length: Callable[[int], int], batch: int) -> list[list[int]]:
    """Split the rows into ceil(rows / batch) batches, with rows of similar lengths together; one batch keeps their order."""
    if len(rows) <= batch:
        return [list(rows)] if rows else []
    order = sorted(rows, key=length)
    return [order[first : first + batch] for first in range(0, len(order), batch)]


def unique_objects(items: Sequence[T]) -> tuple[list[T], list[int]]:
    """Return the distinct objects (by identity), and for each item the index of its object among them."""
    numbers: dict[int, int] = {}
    index = [numbers.setdefault(id(item), len(numbers)) for item in items]
    first = {number: place for place, number in reversed(list(enumerate(index)))}
    return [items[first[number]] for number in range(len(numbers))], index
