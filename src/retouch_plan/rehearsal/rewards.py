"""The weights of reward models that run in the training process. A rehearsal does not run these models, so it counts no
activations of them."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from retouch.models.common.pretrained import find_language_model
from retouch.models.language import read_description
from retouch.models.sizes import reward_model, stored_count
from retouch.recipe.keys import Devices
from retouch.recipe.recipe import Recipe
from retouch.rewards.facts import LoadedModel


def reward_weights(recipe: Recipe) -> dict[int, Counter[str]]:
    """Return the bytes of each reward model's weights, by the index of the accelerator that they are on.

    Models in CPU memory and models whose configuration is not known are not counted.
    """
    devices = recipe.devices or Devices()
    default = devices.reward or devices.policy or recipe.device
    found: dict[int, Counter[str]] = {}
    for model in _models(recipe):
        index, described = _index(model.device or default), _described(model.path)
        if index is not None and described is not None:
            size = stored_count(described) * getattr(torch, model.dtype).itemsize
            found.setdefault(index, Counter())[f"weights: reward {model.path}"] = size
    return found


def uncounted_rewards(recipe: Recipe) -> list[str]:
    """Return the paths of the reward models whose configuration is not known."""
    return [model.path for model in _models(recipe) if _described(model.path) is None]


def _models(recipe: Recipe) -> Iterator[LoadedModel]:
    yield from dict.fromkeys(model for _, _, part in recipe.reward.parts() for model in part.loaded_models())


def _index(device: str) -> int | None:
    """The index of an accelerator in torch's notation; None for CPU memory."""
    return None if device == "cpu" else int(device.partition(":")[2] or 0)


def _described(path: str) -> dict[str, Any] | None:
    """The model's class and configuration; None if it is not known, or if its parameters cannot be counted."""
    try:
        folder = find_language_model(path) if "/" in path else None
        described = reward_model(path) if folder is None else read_description(folder)
        if described is not None:
            stored_count(described)
    except ValueError:
        return None
    return described
