"""``retouch votes``: statistics, a preference data set for DPO, calibration of a judge, and simulated voters."""

from __future__ import annotations

import json
import math
import random
import shutil
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from retouch.protocols import Reward
from retouch.recipe.reward_arguments import parse_reward, read_reward
from retouch.records import files
from retouch.rewards.base import close
from retouch.rewards.judging import Calibration
from retouch.rewards.ledger.database import UNREADABLE, image_hash
from retouch.rewards.scoring import scores_of
from retouch.types import Sample, Task
from retouch_view.votes.log import Choice, Vote, VoteLog, logs_of
from retouch_view.votes.queue import QueuedGroup, VoteQueue
from retouch_view.votes.statistics import as_text, judged_votes, summarise

if TYPE_CHECKING:
    from jaxtyping import Float
    from numpy import ndarray

RESAMPLES = 500
FEWEST_TASKS = 10
_MOST_KNOTS = 65


def votes_command(arguments: Namespace) -> str:
    """The output of the command. Raises ValueError for a folder without votes, and the errors of the subcommands."""
    folder: Path = arguments.votes_of
    if arguments.what == "simulate":
        reward = parse_reward(read_reward(arguments.reward)).build()
        if arguments.column not in reward.columns:
            raise ValueError(f"the reward has no column {arguments.column!r}; its columns are {', '.join(reward.columns)}")
        preference = Preference(noise=arguments.noise, tie=arguments.tie)
        queue = folder if (folder / "groups").is_dir() or folder.name == "queue" else folder / "queue"
        voter = SimulatedVoter(queue, reward, arguments.column, preference, name=arguments.voter, seed=arguments.seed)
        try:
            voter.run(limit=arguments.limit, stop=lambda: False)
        finally:
            close(reward)
        return f"{voter.votes} votes in {queue}"
    logs = logs_of(folder)
    if arguments.what == "export":
        done = export(logs, arguments.to)
        return (
            f"{done.pairs} pairs in {arguments.to}; left out: {done.undecided} without a decision, {done.lost} without their images"
        )
    if arguments.what == "calibrate":
        made = calibrate(judged_votes(logs), arguments.column)
        made.save(arguments.to)
        ends = [f"{made.scores[k]:.4g}: {made.probability[k]:.2f} ({made.low[k]:.2f} to {made.high[k]:.2f})" for k in (0, -1)]
        return f"{arguments.to}: {made.votes} votes on {made.tasks} tasks; win probability at a score of {ends[0]}, of {ends[1]}"
    found = summarise(logs)
    return json.dumps(files.jsonable(found), indent=2) if arguments.json else as_text(found)


def isotonic(scores: Sequence[float], values: Sequence[float], weights: Iterable[float]) -> tuple[list[float], list[float]]:
    """Fit the isotonic regression of the values on the scores. Returns the distinct scores in order, and the value at each score.

    The algorithm is pool adjacent violators: neighbouring values in the wrong order are replaced by their weighted mean until all
    values are in order. Points with weight 0 are ignored.
    """
    sums: dict[float, list[float]] = {}
    for score, value, weight in zip(scores, values, weights, strict=True):
        if weight > 0:
            place = sums.setdefault(score, [0.0, 0.0])
            place[0] += weight * value
            place[1] += weight
    ordered = sorted(sums)
    blocks: list[list[float]] = []  # mean, weight, number of scores
    for score in ordered:
        total, weight = sums[score]
        blocks.append([total / weight, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, weight, size = blocks.pop()
            last = blocks[-1]
            last[0] = (last[0] * last[1] + mean * weight) / (last[1] + weight)
            last[1] += weight
            last[2] += size
    return ordered, [mean for mean, _, size in blocks for _ in range(int(size))]


def calibrate(votes: Iterable[Vote], column: str, *, resamples: int = RESAMPLES, seed: int = 0) -> Calibration:
    """Fit the map of a column, from a judge's score to the probability that people prefer the image, on all votes whose two images
    both have a score in this column.

    The map is the isotonic regression (Ayer et al. 1955, Annals of Mathematical Statistics 26) of one point for each image of a
    vote: its score, and 1 (won), 0.5 (tie) or 0 (lost). Its uncertainty is that of a bootstrap over tasks.

    Raises ValueError if these votes are on fewer than 10 tasks.
    """
    used = [vote for vote in votes if column in vote.left.scores and column in vote.right.scores]
    tasks = sorted({vote.task for vote in used})
    if len(tasks) < FEWEST_TASKS:
        raise ValueError(
            f"{len(tasks)} tasks have votes on images with a score {column!r}; a calibration needs at least {FEWEST_TASKS}"
        )
    number = {task: index for index, task in enumerate(tasks)}
    scores = [side.scores[column] for vote in used for side in (vote.left, vote.right)]
    won = [points for vote in used for points in (vote.left_points, 1 - vote.left_points)]
    members = np.array([number[vote.task] for vote in used for _ in range(2)])
    knots = sorted(set(scores))
    if len(knots) > _MOST_KNOTS:  # evenly spaced in rank
        knots = sorted({knots[round(k * (len(knots) - 1) / (_MOST_KNOTS - 1))] for k in range(_MOST_KNOTS)})

    def curve(weights: Iterable[float]) -> Float[ndarray, " k"]:
        return np.interp(knots, *isotonic(scores, won, weights))

    drawn = np.random.default_rng([seed, len(tasks)]).multinomial(len(tasks), np.full(len(tasks), 1 / len(tasks)), size=resamples)
    curves = np.stack([curve(counts[members]) for counts in drawn])
    low, high = np.quantile(curves, [0.025, 0.975], axis=0)
    return Calibration(
        column,
        tuple(knots),
        tuple(curve(np.ones(len(scores))).tolist()),
        tuple(curves.std(axis=0, ddof=1).tolist()),
        tuple(low.tolist()),
        tuple(high.tolist()),
        len(used),
        len(tasks),
    )


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export. ``pairs``: number of pairs written. ``undecided``: number of pairs with equal votes for both images.
    ``lost``: number of pairs with an image that is missing or has changed."""

    pairs: int
    undecided: int
    lost: int


def export(logs: Sequence[VoteLog], folder: Path) -> Exported:
    """Write a folder of images with ``metadata.jsonl``, on which DPO trains without rollouts (``data.kind: 'folder'``,
    ``objective: { kind: 'dpo', pairs: 'data' }``): a line with a chosen and a rejected image for each pair in which a majority of
    votes prefers one image. Pairs with only ties and "both bad" votes are left out.

    Raises ValueError if the folder exists, or if no pair remains.
    """
    if folder.exists():
        raise ValueError(f"--to: {folder} exists; name a new folder")
    by_pair: dict[str, list[tuple[Path, Vote]]] = defaultdict(list)
    for log in logs:
        for vote in log.read().votes:
            by_pair[vote.pair].append((log.folder, vote))
    lines: list[dict[str, Any]] = []
    undecided = lost = 0
    folder.mkdir(parents=True)
    try:
        for pair, given in sorted(by_pair.items()):
            root, vote = given[0]
            # An image may have been on the left in one vote, and on the right in another.
            points = (each.left_points if each.left.image == vote.left.image else 1 - each.left_points for _, each in given)
            for_left = math.fsum(points) / len(given)
            if for_left == 0.5:
                undecided += 1
                continue
            line = _line(root, vote, folder, pair=pair, left_is_better=for_left > 0.5, votes=len(given))
            lost += line is None
            lines += [] if line is None else [line]
        if not lines:
            raise ValueError(f"there is no pair to export: {undecided} are undecided, and {lost} have missing or changed images")
        files.write_lines(folder / "metadata.jsonl", lines)
    except BaseException:
        shutil.rmtree(folder)
        raise
    return Exported(len(lines), undecided, lost)


def _line(root: Path, vote: Vote, folder: Path, *, pair: str, left_is_better: bool, votes: int) -> dict[str, Any] | None:
    chosen, rejected = (vote.left, vote.right) if left_is_better else (vote.right, vote.left)
    named = {"chosen": chosen.file, "rejected": rejected.file, "image": vote.source, "mask": vote.mask}
    try:
        images = {name: _open(root, file) for name, file in named.items() if file is not None}
    except UNREADABLE:
        return None
    if (image_hash(images["chosen"]), image_hash(images["rejected"])) != (chosen.image, rejected.image):
        return None
    for name, image in images.items():
        files.write_png(folder / f"{pair}-{name}.png", image)
    text = {} if vote.text is None else {"text": vote.text}
    stored = {name: f"{pair}-{name}.png" for name in images}
    return {"id": pair, "instruction": vote.instruction, "source": vote.task, "votes": votes, **text, **stored}


def _open(root: Path, file: str) -> Image.Image:
    """Read the image of a file in the folder of the votes, or in another run next to this folder. Raises an error of ``UNREADABLE``
    if there is none."""
    path = (root / file).resolve()
    if not path.is_relative_to(root.resolve().parent):
        raise ValueError(f"{file} is outside of the runs")
    with Image.open(path) as opened:
        opened.load()
        return opened


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """How a simulated voter chooses: P(left) = sigmoid((left - right) / ``noise``), and a tie if the scores differ by less than
    ``tie``. ``noise`` 0 always prefers the higher score."""

    noise: float = 0.0
    tie: float = 0.0

    def choose(self, left: float, right: float, *, uniform: float) -> Choice:
        """The choice between two scores. ``uniform``: a random number, 0 to 1. Raises ValueError if a score is missing (NaN)."""
        difference = left - right
        if math.isnan(difference):
            raise ValueError("the simulated voter has no score for an image; use a column that scores every image of the queue")
        if abs(difference) < self.tie or difference == 0:
            return "tie"
        if self.noise == 0:
            return "left" if difference > 0 else "right"
        return "left" if uniform < 1 / (1 + math.exp(-max(-500.0, min(500.0, difference / self.noise)))) else "right"


class SimulatedVoter:
    """Votes on the pairs of a queue, by the scores of ``column`` of a reward. ``votes``: number of votes given."""

    def __init__(
        self, queue: Path, reward: Reward, column: str, preference: Preference, *, name: str = "simulated", seed: int = 0
    ) -> None:
        self._queue, self._reward, self._column, self._preference = VoteQueue(queue), reward, column, preference
        self._name, self._seed = name, seed
        self._scores: dict[str, list[float]] = {}
        self.votes = 0

    def answer(self, *, most: int | None = None) -> int:
        """Vote on the pairs of all open groups without a vote, at most ``most`` (None: all); returns the number of votes."""
        given = 0
        for group in self._queue.open_groups():
            for pair in self._queue.unanswered(group):
                if most is not None and given >= most:
                    return given
                self._queue.log.add(group.pair(pair).vote(self._choice(group, pair), voter=self._name))
                given += 1
                self.votes += 1
        return given

    def run(self, *, limit: int | None, stop: Callable[[], bool], poll_seconds: float = 0.2) -> None:
        """Vote until ``stop`` returns True or ``limit`` votes are given."""
        while not stop() and (limit is None or self.votes < limit):
            if not self.answer(most=None if limit is None else limit - self.votes):
                time.sleep(poll_seconds)

    def _choice(self, group: QueuedGroup, pair: tuple[int, int]) -> Choice:
        if group.id not in self._scores:
            root = self._queue.root
            source = () if group.source is None else (_open(root, group.source),)
            mask = None if group.mask is None else _open(root, group.mask)
            task = Task(group.task, group.instruction, source, mask, text=group.text, tags=group.tags, meta=group.meta)
            samples = [Sample(task, _open(root, file)) for file, _ in group.images]
            self._scores[group.id] = scores_of(self._reward, samples)[self._column].tolist()
        left, right = (self._scores[group.id][index] for index in pair)
        return self._preference.choose(left, right, uniform=random.Random(f"{self._seed} {group.id} {pair}").random())
