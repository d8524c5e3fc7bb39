"""What judges, built from a recipe's section of it."""

from collections.abc import Callable
from typing import Any

import torch

from retouch.assembly.judge_clients import Askers
from retouch.config.imports import build_class
from retouch.protocols import Reward
from retouch.recipe import judges as recipe_judges
from retouch.recipe import reward as recipe_reward
from retouch.recipe import reward_local as recipe_reward_local
from retouch.recipe.reward_classes import reward_class
from retouch.recipe.reward_section import RewardSection
from retouch.renderers.answers import answer_in
from retouch.rewards.client.client import RemoteReward
from retouch.rewards.combine.composite import CompositeReward
from retouch.rewards.judges.panel import Panel
from retouch.rewards.text.paddle_reader import PaddleReader

_PANEL = {"judge", "n_evals", "temperature", "seed"}


def build_reward(
    section: recipe_reward.Reward, *, device: torch.device | str = "cpu", keep: Callable[[Reward], Reward] = lambda made: made
) -> Reward:
    """What judges, its weights loaded; those whose section names no device go to ``device``. ``keep``: puts each reward behind a
    ledger.

    ValueError: weights or keys that are not there, servers that do not answer or give other columns than declared, or a reward of
    the user's own that is none.
    """
    askers = Askers(device)
    if isinstance(section, recipe_reward.Several):
        return CompositeReward({name: keep(_build(part, device, askers)) for name, part in section.rewards.items()})
    return keep(_build(section, device, askers))


def _build(section: recipe_reward.Part, device: torch.device | str, askers: Askers) -> Reward:
    match section:
        case recipe_reward_local.ImportedReward():
            made = build_class(section.class_, section.args, device=torch.device(device))
            if not isinstance(made, Reward):
                raise ValueError(f"{section.class_} is no reward: it needs `columns` and to be callable with samples")
            return made
        case recipe_reward.RemoteReward():
            return _remote(section)
        case recipe_reward_local.PromptQualityReward():
            made = reward_class(section)(answer=answer_in)
        case recipe_reward_local.OcrReward(reader=recipe_reward_local.PaddleOcr(model=model)):
            reader = PaddleReader(threads=section.threads, model=model)
            made = reward_class(section)(reader, where=section.where, line_width=section.line_width)
        case recipe_judges.JudgeReward():
            panel = Panel(askers.open(section.judge), repeats=section.n_evals, temperature=section.temperature, seed=section.seed)
            made = reward_class(section)(panel, **_arguments(section, without=_PANEL))
        case _:
            arguments = _arguments(section, without=set())
            if "device" in arguments and arguments["device"] is None:
                arguments["device"] = device
            made = reward_class(section)(**arguments)
    assert isinstance(made, Reward)
    return made


def _remote(section: recipe_reward.RemoteReward) -> RemoteReward:
    reward = RemoteReward(**_arguments(section, without={"columns"}))
    for name, (low, high) in (section.columns or {}).items():
        given = reward.columns.get(name)
        if given is None or (given.low, given.high) != (low, high):
            found = "have no such column" if given is None else f"give it from {given.low:g} to {given.high:g}"
            has = ", ".join(f"{column} {c.low:g} to {c.high:g}" for column, c in reward.columns.items())
            reward.close()
            raise ValueError(f"reward.columns: {name} is to be from {low:g} to {high:g}, and the servers {found}; they give {has}")
    return reward


def _arguments(section: RewardSection, *, without: set[str]) -> dict[str, Any]:
    """The section's own keys, as its class takes them."""
    return {
        name: getattr(section, name)
        for name in type(section).model_fields
        if name not in without | {"kind", "combine", "max_missing"}
    }
