"""Shares with confidence intervals from votes: win rates of arms, agreement of judges with people, and consistency of voters.

An arm is a set of images, for example the images of a run after a step. Votes on the same task are not independent, so each
interval is clustered by task.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from retouch.core.intervals import ShareInterval, estimate_share
from retouch_view.votes.log import Vote

FEWEST_REPEATS = 10
MOST_TAG_VALUES = 8


@dataclass(frozen=True, slots=True)
class WinRate:
    """How often images of ``arm`` were preferred to images of ``other``; ties, and votes that both are bad, count one half."""

    arm: str
    other: str
    share: ShareInterval
    ties: int


def win_rates(votes: Iterable[Vote]) -> list[WinRate]:
    """The win rate of each pair of arms that were compared. ``arm`` is the later arm in the order of the names; numbers in names
    are ordered by value."""
    points: dict[tuple[str, str], list[tuple[float, str, bool]]] = defaultdict(list)
    for vote in votes:
        if vote.left.arm and vote.right.arm and vote.left.arm != vote.right.arm:
            first, second = sorted((vote.left.arm, vote.right.arm), key=_natural)
            won = vote.left_points if vote.left.arm == second else 1 - vote.left_points
            points[first, second].append((won, vote.task, vote.is_decided))
    shares = {arms: estimate_share([won for won, _, _ in rows], [task for _, task, _ in rows]) for arms, rows in points.items()}
    return [
        WinRate(second, first, shares[first, second], ties=sum(not is_decided for _, _, is_decided in rows))
        for (first, second), rows in sorted(points.items())
    ]


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key that orders "step 9" before "step 10"."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name, flags=re.ASCII)]


@dataclass(frozen=True, slots=True)
class JudgeAgreement:
    """How often a column of a judge prefers the image that people preferred. Equal scores count one half; ``ties``: their number.
    ``category``: "all", or a tag of the tasks as ``tag=value``."""

    column: str
    category: str
    share: ShareInterval
    ties: int


def judge_agreement(votes: Iterable[Vote]) -> list[JudgeAgreement]:
    """The agreement of each column with the decided votes, over all tasks and by category.

    A higher score counts as better for all columns, so the share of a column of which a lower score is better is below one half.
    Tags with more than 8 values are not used as categories.
    """
    votes = [vote for vote in votes if vote.is_decided]
    values: dict[str, set[str]] = defaultdict(set)
    for vote in votes:
        for tag, value in vote.tags.items():
            values[tag].add(value)
    rows: dict[tuple[str, str], list[tuple[float, str]]] = defaultdict(list)
    for vote in votes:
        tags = sorted((tag, value) for tag, value in vote.tags.items() if len(values[tag]) <= MOST_TAG_VALUES)
        better, worse = (vote.left, vote.right) if vote.choice == "left" else (vote.right, vote.left)
        for column in better.scores.keys() & worse.scores.keys():
            difference = better.scores[column] - worse.scores[column]
            right = 1.0 if difference > 0 else 0.0 if difference < 0 else 0.5
            for category in ("all", *(f"{tag}={value}" for tag, value in tags)):
                rows[column, category].append((right, vote.task))
    order = sorted(rows, key=lambda key: (key[0], key[1] != "all", key[1]))
    return [
        JudgeAgreement(
            *key,
            estimate_share([right for right, _ in rows[key]], [task for _, task in rows[key]]),
            sum(right == 0.5 for right, _ in rows[key]),
        )
        for key in order
    ]


Status = Literal["consistent", "inconsistent", "unknown"]


@dataclass(frozen=True, slots=True)
class Voter:
    """The statistics of a voter. ``left``: the share of the left image among decided votes. ``consistency``: the share of hidden
    repeats with the same answer as before. ``by_chance``: the expected consistency of a voter who guesses, with the same share of
    ties.

    ``status``: unknown with fewer than 10 repeats; consistent if the interval of ``consistency`` is above ``by_chance``; otherwise
    inconsistent.
    """

    name: str
    votes: int
    ties: int
    left: ShareInterval
    consistency: ShareInterval
    by_chance: float
    status: Status


def voters(votes: Sequence[Vote]) -> list[Voter]:
    """The statistics of each voter, ordered by name."""
    by_name: dict[str, list[Vote]] = defaultdict(list)
    for vote in votes:
        by_name[vote.voter].append(vote)
    return [_voter(name, given) for name, given in sorted(by_name.items())]


def _voter(name: str, votes: Sequence[Vote]) -> Voter:
    decided = [vote for vote in votes if vote.is_decided]
    before: dict[str, str] = {}
    same: list[tuple[float, str]] = []
    for vote in votes:
        answer = _preferred(vote)
        if vote.repeat and vote.pair in before:
            same.append((float(before[vote.pair] == answer), vote.task))
        before[vote.pair] = answer
    consistency = estimate_share([value for value, _ in same], [task for _, task in same])
    ties = 1 - len(decided) / len(votes)
    by_chance = (1 - ties) ** 2 / 2 + ties**2
    status: Status = "unknown"
    if consistency.count >= FEWEST_REPEATS:
        status = "consistent" if consistency.low > by_chance else "inconsistent"
    left = estimate_share([float(vote.choice == "left") for vote in decided], [vote.task for vote in decided])
    return Voter(name, len(votes), len(votes) - len(decided), left, consistency, by_chance, status)


def _preferred(vote: Vote) -> str:
    """The hash of the preferred image; empty for a tie."""
    return {"left": vote.left.image, "right": vote.right.image}.get(vote.choice, "")


def voter_agreement(votes: Iterable[Vote]) -> ShareInterval:
    """How often two voters with a decided vote on the same pair preferred the same image."""
    by_pair: dict[str, dict[str, Vote]] = defaultdict(dict)
    for vote in votes:
        if vote.is_decided:
            by_pair[vote.pair].setdefault(vote.voter, vote)
    rows = [
        (float(_preferred(one) == _preferred(other)), one.task)
        for given in by_pair.values()
        for one, other in combinations(given.values(), 2)
    ]
    return estimate_share([value for value, _ in rows], [task for _, task in rows])
