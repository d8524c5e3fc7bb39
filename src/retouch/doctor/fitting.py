"""Finds the smallest change of a recipe with which the run fits into memory, among changes that cost only time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress

from retouch.recipe.document import value_at
from retouch.recipe.recipe import Recipe, parse

Settings = Mapping[str, tuple[str, ...]]
"""Key of the recipe to the values to try, each of which needs less memory than the one before."""


def smallest_fit(recipe: Recipe, fits: Callable[[Recipe], bool]) -> tuple[str, ...] | None:
    """The fewest ``--set`` changes with which ``fits`` is true, each as small as possible; None if no changes suffice.

    A single change is preferred to several. The changes affect only memory, time and rounding.
    """

    def fit(changes: Iterable[str]) -> bool:
        try:
            return fits(parse(recipe.document(), tuple(changes)))
        except ValueError:  # the recipe's checks refuse this combination
            return False

    settings = _settings(recipe)
    for key, values in settings.items():
        for value in values:
            if fit([f"{key}={value}"]):
                return (f"{key}={value}",)
    chosen: dict[str, str] = {}
    for key, values in settings.items():
        together = {**chosen, key: values[-1]}
        with suppress(ValueError):  # the recipe's checks refuse this setting
            parse(recipe.document(), tuple(_written(together)))
            chosen = together
    if not fit(_written(chosen)):
        return None
    for key in reversed(list(chosen)):
        without = {other: value for other, value in chosen.items() if other != key}
        if fit(_written(without)):
            chosen = without
    for key in chosen:
        milder = next(value for value in settings[key] if value == chosen[key] or fit(_written({**chosen, key: value})))
        chosen[key] = milder
    return tuple(_written(chosen))


def _written(chosen: Mapping[str, str]) -> Iterator[str]:
    return (f"{key}={value}" for key, value in chosen.items())


def _settings(recipe: Recipe) -> Settings:
    """The settings that need less memory, the cheapest first: fewer rows at once, recomputed activations, weights in CPU memory,
    sharding."""
    document = recipe.document()
    found: dict[str, tuple[str, ...]] = {}
    for key in ("rollout.chunk", "eval.batch", "renderer.batch", "renderer.encoder_batch"):
        found[key] = _halved(value_at(document, key))
    found["policy.gradient_checkpointing"] = () if recipe.policy.gradient_checkpointing else ("true",)
    found["microbatch"] = _halved(recipe.microbatch)
    if recipe.renderer is not None and not (recipe.devices is not None and recipe.devices.offload):
        found["devices.offload"] = ("true",)
    if (recipe.ranks or 1) > 1 and recipe.sharding != "fsdp2":
        found["sharding"] = ("fsdp2",)
    if (recipe.ranks or 1) > 1 and (recipe.devices is None or recipe.devices.weights is None):
        found["devices.weights"] = ("cpu",)  # only accepted together with sharding
    return {key: values for key, values in found.items() if values}


def _halved(value: object) -> tuple[str, ...]:
    """Half of a number, a quarter, and so on to 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        return ()
    return tuple(str(value >> shift) for shift in range(1, value.bit_length()))
