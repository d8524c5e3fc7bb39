"""All kinds of rewards: those of ``parts.py``, several of them at once, and one of them with calibrated scores.

A package of yours adds a kind by an entry point ``reward.NAME`` of the group ``retouch.plugins``; its class derives from
``retouch.rewards.base.RewardSection``.
"""

from typing import Annotated, TypeAlias

from retouch.config.kinds import Kinds
from retouch.rewards.base import RewardSection
from retouch.rewards.parts import SINGLE

_TABLE = {
    **SINGLE,
    "several": "retouch.rewards.combine.several:SeveralRewards",
    "calibrated": "retouch.rewards.combine.calibrated:CalibratedReward",
}

KINDS = Kinds("reward", _TABLE)

AnyReward: TypeAlias = Annotated[RewardSection, KINDS]
"""A reward of any kind, as the type of a field."""

RunReward: TypeAlias = Annotated[RewardSection, Kinds("reward", {**_TABLE, "none": "retouch.rewards.base:NoReward"})]
"""The reward of a run, which may have none."""
