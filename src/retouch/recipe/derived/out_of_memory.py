"""Advice when a device is out of memory: which keys of the recipe reduce the memory of a stage.

These keys change only memory, time and rounding, so a run may resume with other values than it started with.
"""

from retouch.recipe.document import value_at
from retouch.recipe.recipe import Recipe

_ROLLOUT = ("rollout.chunk",)
_RENDER = ("renderer.batch", "renderer.encoder_batch")
_UPDATE = ("microbatch", "policy.logits_at_once", "policy.gradient_checkpointing")
KEYS: dict[str, tuple[str, ...]] = {
    "loading": (),
    "trial step": (*_ROLLOUT, *_UPDATE),
    "evaluation": ("eval.batch", *_RENDER),
    "rollout": _ROLLOUT,
    "render": (*_RENDER, *_ROLLOUT),
    "encode": _UPDATE,
    "update": _UPDATE,
    "judge": (),
}
MEMORY_KEYS = frozenset(key for keys in KEYS.values() for key in keys)
_FEWEST = {"policy.logits_at_once": 32}


class OutOfMemory(ValueError):
    """A device is full; the message names the keys to change."""


def explained(recipe: Recipe, stage: str, error: str) -> OutOfMemory:
    """The error for the user, with advice. ``stage``: what the run was doing. ``error``: torch's message."""
    first, *_ = [*error.splitlines(), ""]
    return OutOfMemory(f"the {stage} does not fit: {first}\n{_advice(recipe, stage)}")


def suggestions(recipe: Recipe, stage: str) -> list[str]:
    """Overrides for ``--set`` that need less memory: each key of the stage with half its value, or switched on. Keys that are at
    their limit are left out."""
    found, document = [], recipe.document()
    for key in KEYS.get(stage, ()):
        value = value_at(document, key)
        if value is False:
            found.append(f"{key}=true")
        elif isinstance(value, int) and value > _FEWEST.get(key, 1):
            found.append(f"{key}={max(value // 2, 1)}")
    return found


def _advice(recipe: Recipe, stage: str) -> str:
    lower = suggestions(recipe, stage)
    if lower:
        said = " ".join(f"--set {each}" for each in lower)
        return f"Continue from the last checkpoint with settings that change only memory and time: {said}"
    if stage == "loading":
        return "`retouch doctor RECIPE` reports the memory of the weights and the settings that would fit"
    if stage == "judge":
        return "The judge needs this memory: give the judge its own device, or serve it from another process (`retouch serve`)"
    return "No setting is left that needs less memory without changing the results: use smaller images, fewer tokens or more memory"
