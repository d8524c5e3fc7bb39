"""Statistics of votes: strengths of arms, win rates, agreement of judges with people, consistency of voters.

An arm is a set of images, for example the images of a run after a step. Votes on the same task are not independent, so each
interval is clustered by task.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any, Literal

import numpy as np

from retouch.core.intervals import ShareInterval, estimate_share, t_quantile
from retouch.rewards.ledger.database import decode_scores, encode_text, open_read_only
from retouch_view.report.markup import aligned
from retouch_view.votes.log import CHOICES, Side, Vote, VoteLog
from retouch_view.votes.reward import VotesReward, fit

FEWEST_REPEATS = 10
MOST_TAG_VALUES = 8
_NUMBERS = re.compile(r"(\d+)", re.ASCII)
TABLE_PRIOR = 0.05
"""Precision of the prior in a table of arms: negligible in comparison with a hundred votes."""


@dataclass(frozen=True, slots=True)
class ArmStrength:
    """A row of the table: an arm, its number of votes, its strength in log-odds (the mean over all arms is 0) with a 95 % interval,
    and the probability that it wins against an arm of strength 0."""

    arm: str
    votes: int
    strength: float
    low: float
    high: float
    wins_against_mean: float


def table(votes: Iterable[Vote]) -> list[ArmStrength]:
    """Return the arms of the votes, the strongest first; empty if fewer than two arms were compared.

    Intervals are t intervals. The variance is the cluster-robust (sandwich) variance, clustered by task, or the variance of the
    model if it is larger, for example if one arm has won every vote. With a single task, the intervals are infinite.
    """
    used = [vote for vote in votes if vote.left.arm and vote.right.arm and vote.left.arm != vote.right.arm]
    arms = sorted({side.arm for vote in used for side in (vote.left, vote.right)})
    if len(arms) < 2:
        return []
    number = {arm: index for index, arm in enumerate(arms)}
    points = [(number[vote.left.arm], number[vote.right.arm], vote.left_points) for vote in used]
    found, inverse, gradients = fit(points, count=len(arms), prior=TABLE_PRIOR)
    at = {task: index for index, task in enumerate(sorted({vote.task for vote in used}))}
    groups = len(at)
    sums = np.zeros((groups, len(arms)))
    np.add.at(sums, [at[vote.task] for vote in used], gradients)
    if groups > 1:
        centre = np.eye(len(arms)) - 1 / len(arms)
        robust = inverse @ (groups / (groups - 1) * sums.T @ sums) @ inverse
        model = centre @ inverse @ centre
        half = t_quantile(0.975, groups - 1) * np.sqrt(np.maximum(np.diag(robust), np.diag(model)))
    else:
        half = np.full(len(arms), math.inf)
    rows = []
    for k, arm in enumerate(arms):
        count, strength, bound = sum(k in pair[:2] for pair in points), float(found[k]), float(half[k])
        rows.append(ArmStrength(arm, count, strength, strength - bound, strength + bound, 1 / (1 + math.exp(-strength))))
    return sorted(rows, key=lambda row: -row.strength)


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
            # "step 9" before "step 10"
            first, second = sorted(
                (vote.left.arm, vote.right.arm),
                key=lambda name: [(int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBERS.split(name)],
            )
            won = vote.left_points if vote.left.arm == second else 1 - vote.left_points
            points[first, second].append((won, vote.task, vote.is_decided))
    return [
        WinRate(second, first, _share((won, task) for won, task, _ in rows), ties=sum(not is_decided for _, _, is_decided in rows))
        for (first, second), rows in sorted(points.items())
    ]


def _share(rows: Iterable[tuple[float, str]]) -> ShareInterval:
    """The share of rows (points from 0 to 1, task)."""
    rows = list(rows)
    return estimate_share([points for points, _ in rows], [task for _, task in rows])


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
    return [JudgeAgreement(*key, _share(rows[key]), sum(right == 0.5 for right, _ in rows[key])) for key in order]


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
    found = []
    for name, given in sorted(by_name.items()):
        decided = [vote for vote in given if vote.is_decided]
        before: dict[str, str] = {}
        same: list[tuple[float, str]] = []
        for vote in given:
            answer = _preferred(vote)
            if vote.repeat and vote.pair in before:
                same.append((float(before[vote.pair] == answer), vote.task))
            before[vote.pair] = answer
        consistency = _share(same)
        ties = 1 - len(decided) / len(given)
        by_chance = (1 - ties) ** 2 / 2 + ties**2
        status: Status = "unknown"
        if consistency.count >= FEWEST_REPEATS:
            status = "consistent" if consistency.low > by_chance else "inconsistent"
        left = _share((float(vote.choice == "left"), vote.task) for vote in decided)
        found.append(Voter(name, len(given), len(given) - len(decided), left, consistency, by_chance, status))
    return found


def _preferred(vote: Vote) -> str:
    """The hash of the preferred image; empty for a tie."""
    return {"left": vote.left.image, "right": vote.right.image}.get(vote.choice, "")


def voter_agreement(votes: Iterable[Vote]) -> ShareInterval:
    """How often two voters with a decided vote on the same pair preferred the same image."""
    by_pair: dict[str, dict[str, Vote]] = defaultdict(dict)
    for vote in votes:
        if vote.is_decided:
            by_pair[vote.pair].setdefault(vote.voter, vote)
    pairs = (pair for given in by_pair.values() for pair in combinations(given.values(), 2))
    return _share((float(_preferred(one) == _preferred(other)), one.task) for one, other in pairs)


def judged_votes(logs: Sequence[VoteLog]) -> list[Vote]:
    """All votes of the logs. A side without scores gets the scores from the ledgers in the log's folder or, if it has none, in the
    folder above.

    Columns of the reward ``votes`` are left out, because they were computed from the votes. Raises ValueError for a ledger of
    another version.
    """
    found: list[Vote] = []
    for log in logs:
        votes = log.read().votes
        # Judges score an image for its task, and several tasks may have the same image.
        missing = {(encode_text(vote.task), side.image) for vote in votes for side in (vote.left, vote.right) if not side.scores}
        known: dict[tuple[str, str], dict[str, float]] = {}
        folders = [log.folder, log.folder.parent] if missing else []
        for path in next((ledgers for folder in folders if (ledgers := sorted(folder.glob("ledger*.sqlite")))), []):
            with closing(open_read_only(path)) as connection:
                for task, image, text in connection.execute("SELECT task, picture, scores FROM samples"):
                    if (task, image) in missing:
                        scores = {name: value for name, value in decode_scores(text).items() if math.isfinite(value)}
                        known[task, image] = {
                            name: value for name, value in scores.items() if name.rpartition("/")[2] not in VotesReward.columns
                        }

        def judged(vote: Vote, side: Side, known: Mapping[tuple[str, str], Mapping[str, float]] = known) -> Side:
            return replace(side, scores=side.scores or known.get((encode_text(vote.task), side.image), {}))

        found += [replace(vote, left=judged(vote, vote.left), right=judged(vote, vote.right)) for vote in votes]
    return found


def summarise(logs: Sequence[VoteLog]) -> dict[str, Any]:
    """All statistics of the votes in several logs: ``win_rates``, ``arms``, ``judges``, ``voters`` and ``voter_agreement``."""
    read = [log.read() for log in logs]
    votes = judged_votes(logs)
    return {
        "votes": len(votes),
        "tasks": len({vote.task for vote in votes}),
        "pairs": len({vote.pair for vote in votes}),
        "undone": sum(found.undone for found in read),
        "damaged": sum(found.damaged for found in read),
        "choices": {choice: sum(vote.choice == choice for vote in votes) for choice in CHOICES},
        "win_rates": [asdict(row) for row in win_rates(votes)],
        "arms": [asdict(row) for row in table(votes)],
        "judges": [asdict(row) for row in judge_agreement(votes)],
        "voters": [asdict(row) for row in voters(votes)],
        "voter_agreement": asdict(voter_agreement(votes)),
    }


def as_text(found: Mapping[str, Any]) -> str:
    """The summary as tables for the command line."""

    def share(of: Mapping[str, Any]) -> str:
        return f"{of['value']:.3f} ({of['low']:.3f} to {of['high']:.3f}), n {of['count']}" if of["count"] else "-"

    lines = [f"{found['votes']} votes on {found['pairs']} pairs of {found['tasks']} tasks"]
    if found["undone"] or found["damaged"]:
        lines.append(f"{found['undone']} votes were taken back, {found['damaged']} lines are damaged")
    sections = {
        "win rates (ties count one half)": [
            [row["arm"], "against", row["other"], share(row["share"]), f"{row['ties']} ties"] for row in found["win_rates"]
        ],
        "Bradley-Terry (log-odds, 0 is the mean)": [
            [row["arm"], f"{row['strength']:+.2f} ({row['low']:+.2f} to {row['high']:+.2f})", f"{row['votes']} votes"]
            for row in found["arms"]
        ],
        "agreement of judges with people": [[row["column"], row["category"], share(row["share"])] for row in found["judges"]],
        "voters (consistency on hidden repeats)": [
            [row["name"], f"{row['votes']} votes", share(row["consistency"]), row["status"]] for row in found["voters"]
        ],
    }
    for title, rows in sections.items():
        if rows:
            lines += ["", title, *aligned(rows)]
    if found["voter_agreement"]["count"]:
        lines += ["", f"agreement of two voters on the same pair: {share(found['voter_agreement'])}"]
    return "\n".join(lines)
