"""Converts the arguments ``reward_funcs`` and ``reward_weights`` of a ``Trainer`` to the rewards of a recipe."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from retouch.recipe.reward_arguments import modules_in_argument, parse_reward, read_combined
from retouch.rewards.base import RewardSection
from retouch.rewards.function import FunctionReward
from retouch.rewards.kinds import KINDS as REWARDS
from retouch.trainer.models import plain

RewardLike: TypeAlias = Any
"""A reward object, a function, or a reward's kind (``"pickscore"``), with its path after a colon (``"clip:FOLDER"``)."""


def reward_document(
    given: RewardLike | Sequence[RewardLike] | None, weights: Sequence[float] | Mapping[str, float] | str | None
) -> tuple[dict[str, Any], Mapping[str, float] | str, dict[str, Any]]:
    """The document of the rewards, their combination, and the reward functions by name."""
    if given is None:
        if weights is not None:
            raise ValueError("reward_weights: there are no reward_funcs to weight; give both, or neither")
        return {"kind": "none"}, {}, {}
    listed = as_list(given)
    if not listed:
        raise ValueError("reward_funcs: empty; give at least one reward")
    sections: dict[str, RewardSection] = {}
    for one in listed:
        section = _reward(one)
        if section.name in sections:
            raise ValueError(f"reward_funcs: two rewards are called {section.name!r}; rename one of the functions")
        sections[section.name] = section
    functions = {section.live_name: section.load("cpu") for section in sections.values() if isinstance(section, FunctionReward)}
    combine = _combine(list(sections.values()), weights)
    if len(sections) == 1:
        (only,) = sections.values()
        document = REWARDS.document(only)
        return {**document, "combine": combine}, combine or only.combine, functions
    parts = {name: _without_shared(REWARDS.document(section)) for name, section in sections.items()}
    return {"kind": "several", "rewards": parts}, combine, functions


def as_list(given: RewardLike | Sequence[RewardLike]) -> list[RewardLike]:
    return list(given) if isinstance(given, list | tuple) else [given]


def _reward(given: RewardLike) -> RewardSection:
    if isinstance(given, RewardSection):
        return given
    if isinstance(given, str):
        return parse_reward(read_combined(given), allow_imports=modules_in_argument(given))
    return FunctionReward.of(given)


def _combine(
    sections: Sequence[RewardSection], weights: Sequence[float] | Mapping[str, float] | str | None
) -> Mapping[str, float] | str:
    """The combination of the columns: a formula, weights by column, or one weight per reward, by default 1 each."""
    if isinstance(weights, str | Mapping):
        return weights if isinstance(weights, str) else {name: plain(name, weight) for name, weight in weights.items()}
    if weights is not None and len(weights) != len(sections):
        raise ValueError(f"reward_weights: {len(weights)} weights for {len(sections)} rewards; give one for each")
    each = [1.0] * len(sections) if weights is None else [float(weight) for weight in weights]
    if len(sections) == 1 and weights is None and sections[0].combine:
        return sections[0].combine
    combined = {}
    for section, weight in zip(sections, each, strict=True):
        columns = section.known_columns() or {}
        scores = [name for name, column in columns.items() if not column.diagnostic]
        if section.combine and isinstance(section.combine, dict):
            scores = list(section.combine)
        if len(scores) != 1:
            raise ValueError(
                f"reward_weights: {section.name} has the columns {', '.join(columns) or '(not known yet)'}; say which train, for "
                f"example reward_weights={{{(scores or ['column'])[0]!r}: 1.0}}"
            )
        combined[scores[0] if len(sections) == 1 else f"{section.name}/{scores[0]}"] = weight
    return combined


def _without_shared(document: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key not in ("combine", "max_missing")}
