"""Who judges, put behind a ledger: judges question by question, reward servers sample by sample, and everyone else not at all.

A reward that computes in the run's own process is asked again rather than looked up; what it said in a run is in the journal.
"""

from typing import Protocol, runtime_checkable

from retouch.protocols import Reward
from retouch.rewards.judges.panel import Panel
from retouch.rewards.ledger.answers import Answers
from retouch.rewards.ledger.asking import RememberingAsker
from retouch.rewards.ledger.receipts import Receipted
from retouch.rewards.ledger.rewarding import RememberingReward


@runtime_checkable
class _OnPanel(Protocol):
    panel: Panel


def remembered(reward: Reward, answers: Answers) -> Reward:
    """The reward, or what takes its place; a judge's own panel asks through the ledger from now on, a user's own judge's too."""
    if isinstance(reward, _OnPanel) and isinstance(reward.panel, Panel):
        reward.panel = reward.panel.through(lambda asker: RememberingAsker(asker, answers))
    return RememberingReward(reward, answers) if isinstance(reward, Receipted) else reward
