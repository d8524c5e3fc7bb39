"""Votes together with the scores that the judges of the run gave to the images. The votes on stored samples contain the scores; the
scores of images from a queue are looked up in the run's ledger by the hash of the image."""

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from retouch.rewards.ledger.database import decode_scores, open_read_only
from retouch.rewards.votes.log import Side, Vote, VoteLog
from retouch.rewards.votes.reward import VotesReward


def judged_votes(logs: Sequence[VoteLog]) -> list[Vote]:
    """All votes of the logs. A side without scores gets the scores from the ledgers in the log's folder or, if it has none, in the
    folder above.

    Columns of the reward ``votes`` are left out, because they were computed from the votes. Raises ValueError for a ledger of
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
    """The finite scores of these images, by image, in the ledgers of the first folder with a ledger."""
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
