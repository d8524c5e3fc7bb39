"""All kinds of rewards: the single rewards of ``parts.py``, ``several`` rewards, and a ``calibrated`` reward.

A package of your own adds a kind with an entry point ``reward.NAME`` in the group ``retouch.plugins``; its class derives from
``retouch.rewards.base.RewardSection``.
"""

from typing import Annotated, TypeAlias

from retouch.config.kinds import Kinds
from retouch.rewards.base import RewardSection
from retouch.rewards.parts import RENAMED, SINGLE

_TABLE = {
    **SINGLE,
    "several": "retouch.rewards.combine.several:SeveralRewards",
    "calibrated": "retouch.rewards.combine.calibrated:CalibratedReward",
}

KINDS = Kinds("reward", _TABLE, renamed=RENAMED, with_wings=True)

AnyReward: TypeAlias = Annotated[RewardSection, KINDS]
"""Type of a field that contains a reward of any kind."""

RunReward: TypeAlias = Annotated[
    RewardSection, Kinds("reward", {**_TABLE, "none": "retouch.rewards.base:NoReward"}, renamed=RENAMED, with_wings=True)
]
"""Type of the ``reward`` field of a run: a reward of any kind, or ``none``."""
