"""What the models of a run's rewards keep on its devices: their weights; what they compute with comes and goes in small batches."""

from collections.abc import Iterator
from typing import Any

from retouch.assembly.model import DTYPES
from retouch.memory.plan import MemoryRow
from retouch.memory.sizes import judge, stored_count
from retouch.models.common.pretrained import find_writer
from retouch.models.language import read_description
from retouch.rewards.base import RewardSection


def judge_rows(reward: RewardSection, *, device: str) -> Iterator[tuple[str, MemoryRow]]:
    """Device and weights of each model that judges in the run's own process; ``device``: of those that name none."""
    models = dict.fromkeys(model for _, _, part in reward.parts() for model in part.loaded_models())
    for model in models:
        if (described := _described(model.path)) is not None:
            size = stored_count(described) * DTYPES[model.dtype].itemsize
            yield model.device or device, MemoryRow(f"reward, {model.path}", size)


def uncounted(reward: RewardSection) -> list[str]:
    """Kinds of rewards whose models have no configuration that is known here."""
    unknown = [part.name for _, _, part in reward.parts() for model in part.loaded_models() if _described(model.path) is None]
    return list(dict.fromkeys(unknown))


def _described(path: str) -> dict[str, Any] | None:
    """The model's class and configuration; None where it is not known, or of a class that cannot be counted."""
    try:
        folder = find_writer(path) if "/" in path else None
        described = judge(path) if folder is None else read_description(folder)
        if described is not None:
            stored_count(described)
    except ValueError:
        return None
    return described
