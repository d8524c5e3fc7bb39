"""The kinds of rewards: those of the core (``parts.py``), ``several`` and ``calibrated`` rewards, which contain other rewards, and
those that the wings name in ``pyproject.toml`` (``reward.NAME``).

The class of a kind is imported when a recipe names the kind. A package of your own adds a kind with an entry point ``reward.NAME``
in the group ``retouch.plugins``; its class derives from ``retouch.rewards.base.RewardSection``.
"""

from typing import Annotated, TypeAlias

from retouch.config.section import Kinds
from retouch.rewards.base import RewardSection
from retouch.rewards.parts import SINGLE

_TABLE = {
    **SINGLE,
    "several": "retouch.rewards.several:SeveralRewards",
    "calibrated": "retouch.rewards.several:CalibratedReward",
}

KINDS = Kinds("reward", _TABLE, with_wings=True)

AnyReward: TypeAlias = Annotated[RewardSection, KINDS]
"""Type of a field that contains a reward of any kind."""

RunReward: TypeAlias = Annotated[
    RewardSection, Kinds("reward", {**_TABLE, "none": "retouch.rewards.base:NoReward"}, with_wings=True)
]
"""Type of the ``reward`` field of a run: a reward of any kind, or ``none``."""
