"""Votes with what the judges of the run gave to their images. Stored samples bring their scores along; those of a queue are in the
run's ledger, where they are found by the hash of the image."""

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from retouch.rewards.ledger.database import decode_scores, open_read_only
from retouch.rewards.votes.log import Side, Vote, VoteLog
from retouch.rewards.votes.reward import VotesReward


def judged_votes(logs: Sequence[VoteLog]) -> list[Vote]:
    """All votes of the logs. A side without scores gets those of the ledgers in the log's folder, or in the folder above a queue.

    Columns of the reward ``votes`` itself are left out, because they were made from the votes. Raises ValueError for a ledger of
    another version.
    """
    found: list[Vote] = []
    for log in logs:
        votes = log.read().votes
        missing = {side.image for vote in votes for side in (vote.left, vote.right) if not side.scores}
        scores = _ledger_scores([log.folder, log.folder.parent], missing) if missing else {}
        found += [replace(vote, left=_judged(vote.left, scores), right=_judged(vote.right, scores)) for vote in votes]
    return found


def _judged(side: Side, scores: dict[str, dict[str, float]]) -> Side:
    return side if side.scores or side.image not in scores else replace(side, scores=scores[side.image])


def _ledger_scores(folders: Sequence[Path], images: set[str]) -> dict[str, dict[str, float]]:
    """The finite scores of these images in the ledgers of the first folder that has one."""
    ledgers = next((found for folder in folders if (found := sorted(folder.glob("ledger*.sqlite")))), [])
    known: dict[str, dict[str, float]] = {}
    for path in ledgers:
        with closing(open_read_only(path)) as connection:
            for image, text in connection.execute("SELECT picture, scores FROM samples"):
                if image in images:
                    scores = decode_scores(text).items()
                    known[image] = {name: value for name, value in scores if math.isfinite(value) and not _is_from_votes(name)}
    return known


def _is_from_votes(column: str) -> bool:
    return column.rpartition("/")[2] in VotesReward.columns
