"""The memory of the reward models that run in the training process: their weights. Activations of their small batches are not
counted."""

from collections.abc import Iterator
from typing import Any

from retouch.assembly.model import DTYPES
from retouch.memory.plan import MemoryRow
from retouch.memory.sizes import reward_model, stored_count
from retouch.models.common.pretrained import find_language_model
from retouch.models.language import read_description
from retouch.rewards.base import RewardSection


def reward_rows(reward: RewardSection, *, device: str) -> Iterator[tuple[str, MemoryRow]]:
    """Yield the device and the bytes of the weights of each reward model in the training process. ``device``: the device of models
    for which none is set."""
    models = dict.fromkeys(model for _, _, part in reward.parts() for model in part.loaded_models())
    for model in models:
        if (described := _described(model.path)) is not None:
            size = stored_count(described) * DTYPES[model.dtype].itemsize
            yield model.device or device, MemoryRow(f"reward, {model.path}", size)


def uncounted_rewards(reward: RewardSection) -> list[str]:
    """Kinds of the rewards with a model whose configuration is not packaged."""
    unknown = [part.name for _, _, part in reward.parts() for model in part.loaded_models() if _described(model.path) is None]
    return list(dict.fromkeys(unknown))


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
