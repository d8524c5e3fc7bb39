"""Votes together with the scores that the judges of the run gave to the images. The votes on stored samples contain the scores; the
scores of images from a queue are looked up in the run's ledger by the task and the hash of the image."""

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from retouch.rewards.ledger.database import decode_scores, encode_text, open_read_only
from retouch_view.votes.log import Side, Vote, VoteLog
from retouch_view.votes.reward import VotesReward

_Key: TypeAlias = tuple[str, str]
"""The id of a task and the hash of an image: judges score an image for its task, and several tasks may have the same image."""


def judged_votes(logs: Sequence[VoteLog]) -> list[Vote]:
    """All votes of the logs. A side without scores gets the scores from the ledgers in the log's folder or, if it has none, in the
    folder above.

    Columns of the reward ``votes`` are left out, because they were computed from the votes. Raises ValueError for a ledger of
    another version.
    """
    found: list[Vote] = []
    for log in logs:
        votes = log.read().votes
        missing = {_key(vote, side) for vote in votes for side in (vote.left, vote.right) if not side.scores}
        scores = _ledger_scores([log.folder, log.folder.parent], missing) if missing else {}
        found += [replace(vote, left=_judged(vote, vote.left, scores), right=_judged(vote, vote.right, scores)) for vote in votes]
    return found


def _key(vote: Vote, side: Side) -> _Key:
    return encode_text(vote.task), side.image


def _judged(vote: Vote, side: Side, scores: dict[_Key, dict[str, float]]) -> Side:
    found = scores.get(_key(vote, side))
    return side if side.scores or found is None else replace(side, scores=found)


def _ledger_scores(folders: Sequence[Path], wanted: set[_Key]) -> dict[_Key, dict[str, float]]:
    """The finite scores of the ``wanted`` images of a task, in the ledgers of the first folder with a ledger."""
    ledgers = next((found for folder in folders if (found := sorted(folder.glob("ledger*.sqlite")))), [])
    known: dict[_Key, dict[str, float]] = {}
    for path in ledgers:
        with closing(open_read_only(path)) as connection:
            for task, image, text in connection.execute("SELECT task, picture, scores FROM samples"):
                if (task, image) in wanted:
                    scores = decode_scores(text).items()
                    known[task, image] = {
                        name: value for name, value in scores if math.isfinite(value) and not _is_from_votes(name)
                    }
    return known


def _is_from_votes(column: str) -> bool:
    return column.rpartition("/")[2] in VotesReward.columns
