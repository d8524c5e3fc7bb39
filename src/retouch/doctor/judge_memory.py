"""What the models of a run's rewards keep on its devices: their weights; what they compute with comes and goes in small batches."""

from collections.abc import Iterator
from typing import Any

import torch

from retouch.assembly.model import DTYPES
from retouch.memory.plan import Row
from retouch.memory.sizes import judge, model_in, stored_count
from retouch.models.common.pretrained import find_writer
from retouch.recipe import reward_local as local
from retouch.recipe.judges import InProcess, JudgeReward
from retouch.recipe.reward import Part, Reward
from retouch.recipe.reward_classes import parts_of

_WITH_MODELS = (local.ClipReward, local.PickScoreReward, local.AestheticReward, local.DinoReward, local.LpipsReward)


def judge_rows(reward: Reward, *, device: str) -> Iterator[tuple[str, Row]]:
    """Device and weights of each model that judges in the run's own process; ``device``: of those that name none."""
    told = set()
    for _, _, part in parts_of(reward):
        found = _model(part)
        if found is None or found in told or (described := _described(found[0])) is None:
            continue
        told.add(found)
        path, dtype, own = found
        yield own or device, Row(f"reward, {path}", stored_count(described) * dtype.itemsize)


def uncounted(reward: Reward) -> list[str]:
    """Kinds of rewards whose models have no configuration that is known here."""
    models = [(part.kind, _model(part)) for _, _, part in parts_of(reward)]
    unknown = [kind for kind, found in models if found is not None and _described(found[0]) is None]
    return list(dict.fromkeys(unknown))


def _model(part: Part) -> tuple[str, torch.dtype, str | None] | None:
    """Path, type and device of the part's own model; judges of the same weights share one."""
    if isinstance(part, _WITH_MODELS):
        return getattr(part, "path", part.kind), torch.float32, part.device
    if isinstance(part, JudgeReward) and isinstance(part.judge, InProcess):
        return part.judge.path, DTYPES[part.judge.dtype], part.judge.device
    return None


def _described(path: str) -> dict[str, Any] | None:
    """The model's class and configuration; None where it is not known, or of a class that cannot be counted."""
    try:
        folder = find_writer(path) if "/" in path else None
        described = judge(path) if folder is None else model_in(folder)
        if described is not None:
            stored_count(described)
    except ValueError:
        return None
    return described
