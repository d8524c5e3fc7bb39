"""The ``votes`` reward: people compare the images of each group while the run waits."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from retouch.config.section import Count, NonNegative
from retouch.rewards.base import RewardSection
from retouch.rewards.facts import PathText, RunFacts, whole_group_problems
from retouch.types import Column, Sample, Scores

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from retouch_view.votes.queue import QueuedGroup, VoteQueue

POLL_SECONDS = 0.5
GROUP_PRIOR = 0.5
"""Precision of the prior of an image's strength, so that a single vote has limited influence."""


class VotesReward(RewardSection):
    """Human votes on the images of each group. The images are queued in a folder, the voting page shows them in pairs, and the run
    waits for the votes.

    Columns: ``preference``, 0 to 1, the probability that people prefer the image to another image of its group; ``voted``, a
    diagnostic, the share of the group's pairs with a vote. The score of an image without a vote is missing, also after a time-out.
    The score of an image that is alone in its group is missing too, for example in an evaluation. Equal images count as one.

    Example::

        >>> retouch.rewards.Votes(queue="runs/my-run/queue", pairs=6).estimate
        'bradley_terry'
    """

    kind: Literal["votes"] = "votes"
    queue: PathText
    """The folder of the queue. The voting page looks for it in the run's folder: ``runs/NAME/queue``."""
    pairs: Count | None = None
    """Maximum number of pairs of a group to vote on; null asks for all pairs, k (k - 1) / 2 for k images."""
    wait: NonNegative | None = None
    """Time in seconds to wait for the votes on a batch after it is queued. Then the run continues with the existing votes, and the
    scores of images without a vote are missing. null waits until every pair has a vote."""
    estimate: Literal["bradley_terry", "win_rate"] = "bradley_terry"
    """How ``preference`` is computed. ``bradley_terry``: the mean win probability against the other images in a Bradley-Terry model
    of the group, which also takes the strength of the opponents into account. ``win_rate``: the mean result of the image's own
    votes, in which a tie counts one half."""

    columns: ClassVar[Mapping[str, Column]] = {"preference": Column(0.0, 1.0), "voted": Column(0.0, 1.0, diagnostic=True)}
    changeable: ClassVar[frozenset[str]] = frozenset({"device", "queue", "wait"})
    compares_groups: ClassVar[bool] = True

    def load(self, device: torch.device | str) -> threading.Event:
        """Return the event that ``close`` sets."""
        return threading.Event()

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Wait for the votes or for the end of ``wait``, and return the columns, (b,), float32."""
        return self._collect(self._put(samples), len(samples))

    def submit(self, samples: Sequence[Sample]) -> Future[Scores]:
        """Queue the samples immediately, so that voters see all chunks of a step, and return a future of the columns."""
        future: Future[Scores] = Future()
        queued = self._put(samples)

        def collect() -> None:
            try:
                scores = self._collect(queued, len(samples))
            except BaseException as error:  # noqa: BLE001  (the future raises it)
                future.set_exception(error)
            else:
                future.set_result(scores)

        threading.Thread(target=collect, name="votes", daemon=True).start()
        return future

    def close(self) -> None:
        """Stop waiting. Queued groups stay in the queue, and a resumed run finds the votes on them."""
        self.model.set()

    def problems(self, path: str, prefix: str, run: RunFacts) -> Iterator[str]:
        """Yield a message if evaluation, which has one image per task, uses the column, and if a chunk splits groups."""
        yield from super().problems(path, prefix, run)
        yield from whole_group_problems(run, column=f"{prefix}preference", reward="votes")

    def _put(self, samples: Sequence[Sample]) -> _Queued:
        from retouch.rewards.ledger.database import image_hash
        from retouch_view.votes.queue import VoteQueue

        queue = VoteQueue(Path(self.queue))
        members: dict[str, list[int]] = {}
        for row, sample in enumerate(samples):
            members.setdefault(sample.task.id, []).append(row)
        groups = []
        for rows in members.values():
            images: dict[str, Image] = {}
            of_row: dict[int, str] = {}
            for row in rows:
                image = samples[row].image
                if image is not None:
                    of_row[row] = image_hash(image)
                    images.setdefault(of_row[row], image)
            if len(images) > 1:
                group = queue.put(samples[rows[0]].task, list(images.values()), pairs=self.pairs)
                groups.append((group, of_row))
        return _Queued(queue, groups, time.monotonic())

    def _collect(self, queued: _Queued, count: int) -> Scores:
        """Wait for the votes, and convert them to columns. Raises RuntimeError if the reward is closed while it waits."""
        import torch

        deadline = math.inf if self.wait is None else queued.began + self.wait
        while any(queued.queue.unanswered(group) for group, _ in queued.groups) and time.monotonic() < deadline:
            if self.model.wait(min(POLL_SECONDS, max(0.0, deadline - time.monotonic()))):
                raise RuntimeError("the run was closed while it waited for votes")
        preference, voted = torch.full((count,), math.nan), torch.full((count,), math.nan)
        for group, of_row in queued.groups:
            scores = self._preferences(queued.queue, group)
            share = 1 - len(queued.queue.unanswered(group)) / len(group.pairs)
            for row, image in of_row.items():
                preference[row], voted[row] = scores[image], share
            queued.queue.close(group)
        return {"preference": preference, "voted": voted}

    def _preferences(self, queue: VoteQueue, group: QueuedGroup) -> dict[str, float]:
        """Return the preference of each image of the group, by its hash; NaN for an image without a vote."""
        from retouch_view.votes.bradley_terry import preferences

        number = {image: index for index, (_, image) in enumerate(group.images)}
        votes = queue.log.read().by_pair
        points = [
            (number[vote.left.image], number[vote.right.image], vote.left_points)
            for pair in group.pairs
            for vote in votes.get(group.pair_id(pair), ())
        ]
        if self.estimate == "bradley_terry":
            found = preferences(points, count=len(number), prior=GROUP_PRIOR)
        else:
            found = _means(points, len(number))
        return dict(zip(number, found, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class _Queued:
    """Queued samples. ``groups``: each group with the image hash of each of its rows. ``began``: the time of ``time.monotonic``."""

    queue: VoteQueue
    groups: list[tuple[QueuedGroup, dict[int, str]]]
    began: float


def _means(points: Sequence[tuple[int, int, float]], count: int) -> list[float]:
    won: list[list[float]] = [[] for _ in range(count)]
    for first, second, value in points:
        won[first].append(value)
        won[second].append(1 - value)
    return [math.fsum(values) / len(values) if values else math.nan for values in won]
