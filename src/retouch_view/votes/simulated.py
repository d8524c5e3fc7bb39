"""Simulated voters with a known preference and known noise: for tests, and to try out a recipe before people are asked."""

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from retouch.protocols import Reward
from retouch.rewards.scoring import scores_of
from retouch.types import Sample, Task
from retouch_view.votes.log import Choice
from retouch_view.votes.queue import QueuedGroup, VoteQueue


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
            self._scores[group.id] = self._score(group)
        left, right = (self._scores[group.id][index] for index in pair)
        return self._preference.choose(left, right, uniform=random.Random(f"{self._seed} {group.id} {pair}").random())

    def _score(self, group: QueuedGroup) -> list[float]:
        source = () if group.source is None else (_open(self._queue.root / group.source),)
        mask = None if group.mask is None else _open(self._queue.root / group.mask)
        task = Task(group.task, group.instruction, source, mask, text=group.text, tags=group.tags, meta=group.meta)
        images = [_open(self._queue.root / file) for file, _ in group.images]
        return scores_of(self._reward, [Sample(task, image) for image in images])[self._column].tolist()


def _open(path: Path) -> Image.Image:
    with Image.open(path) as opened:
        opened.load()
        return opened
