"""The ``votes`` reward: people compare the images of each group while the run waits.

Votes become strengths by the model of Bradley and Terry (1952, Biometrika 39): P(i beats j) = sigmoid(s_i - s_j). A tie counts as
half a win for each side. A Gaussian prior keeps the strengths finite if one side won every vote.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from retouch.config.section import Count, NonNegative
from retouch.rewards.base import PathText, RewardSection, RunFacts, whole_group_problems
from retouch.types import Column, Sample, Scores

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float
    from numpy import ndarray
    from PIL.Image import Image

    from retouch_view.votes.queue import QueuedGroup, VoteQueue

    _Queued: TypeAlias = tuple[VoteQueue, list[tuple[QueuedGroup, dict[int, str]]], float]

POLL_SECONDS = 0.5
GROUP_PRIOR = 0.5
"""Precision of the prior of an image's strength, so that a single vote has limited influence."""


class VotesReward(RewardSection):
    """Human votes on the images of each group. The images are queued in a folder, the voting page shows them in pairs, and the run
    waits for the votes.

    Columns: ``preference``, 0 to 1, the probability that people prefer the image to another image of its group, in a Bradley-Terry
    model of the group's votes; ``voted``, a diagnostic, the share of the group's pairs with a vote. The score of an image without a
    vote is missing, also after a time-out. The score of an image that is alone in its group is missing too, for example in an
    evaluation. Equal images count as one.

    Example::

        >>> retouch.rewards.Votes(queue="runs/my-run/queue", pairs=6).kind
        'votes'
    """

    kind: Literal["votes"] = "votes"
    queue: PathText
    """The folder of the queue. The voting page looks for it in the run's folder: ``runs/NAME/queue``."""
    pairs: Count | None = None
    """Maximum number of pairs of a group to vote on; null asks for all pairs, k (k - 1) / 2 for k images."""
    wait: NonNegative | None = None
    """Time in seconds to wait for the votes on a batch after it is queued. Then the run continues with the existing votes, and the
    scores of images without a vote are missing. null waits until every pair has a vote."""
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
        """Queue the samples. Returns the queue, each group with the image hash of each of its rows, and the time."""
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
        return queue, groups, time.monotonic()

    def _collect(self, queued: _Queued, count: int) -> Scores:
        """Wait for the votes, and convert them to columns. Raises RuntimeError if the reward is closed while it waits."""
        import torch

        queue, groups, began = queued
        deadline = math.inf if self.wait is None else began + self.wait
        while any(queue.unanswered(group) for group, _ in groups) and time.monotonic() < deadline:
            if self.model.wait(min(POLL_SECONDS, max(0.0, deadline - time.monotonic()))):
                raise RuntimeError("the run was closed while it waited for votes")
        preference, voted = torch.full((count,), math.nan), torch.full((count,), math.nan)
        for group, of_row in groups:
            number = {image: index for index, (_, image) in enumerate(group.images)}
            votes = queue.log.read().by_pair
            points = [
                (number[vote.left.image], number[vote.right.image], vote.left_points)
                for pair in group.pairs
                for vote in votes.get(group.pair_id(pair), ())
            ]
            scores = preferences(points, count=len(number), prior=GROUP_PRIOR)
            share = 1 - len(queue.unanswered(group)) / len(group.pairs)
            for row, image in of_row.items():
                preference[row], voted[row] = scores[number[image]], share
            queue.close(group)
        return {"preference": preference, "voted": voted}


def fit(points: Sequence[tuple[int, int, float]], *, count: int, prior: float) -> tuple[Float[ndarray, " count"], ndarray, ndarray]:
    """Return the maximum a posteriori strengths of ``count`` sides, in log-odds with mean 0; the inverse Hessian of the negative
    log posterior; and the gradient of each vote (n, count).

    ``points``: for each vote the index of the first side, the index of the second side, and the points of the first side, 0 to 1.
    ``prior``: the precision (1 / variance) of the Gaussian prior of each strength, above 0.
    """
    import numpy as np

    design = np.zeros((len(points), count))
    rows = np.arange(len(points))
    design[rows, [first for first, _, _ in points]] += 1
    design[rows, [second for _, second, _ in points]] -= 1
    won = np.array([value for _, _, value in points], dtype=np.float64)
    found = np.zeros(count)
    for _ in range(100):
        expected = 1 / (1 + np.exp(-(design @ found)))
        gradient = design.T @ (won - expected) - prior * found
        hessian = design.T @ (design * (expected * (1 - expected))[:, None]) + prior * np.eye(count)
        step = np.linalg.solve(hessian, gradient)
        found = found + step * min(1.0, 2.0 / max(float(np.abs(step).max(initial=0.0)), 1e-12))
        if np.abs(step).max(initial=0.0) < 1e-10:
            break
    expected = 1 / (1 + np.exp(-(design @ found)))
    hessian = design.T @ (design * (expected * (1 - expected))[:, None]) + prior * np.eye(count)
    return found, np.linalg.inv(hessian), design * (won - expected)[:, None]


def preferences(points: Sequence[tuple[int, int, float]], *, count: int, prior: float) -> list[float]:
    """Return for each side its win probability, 0 to 1, averaged over all other sides; NaN for a side without a vote. The average
    includes sides without a vote, because the prior gives their strength. ``prior``: as in ``fit``."""
    found = fit(points, count=count, prior=prior)[0].tolist()
    compared = {side for first, second, _ in points for side in (first, second)}
    return [
        math.fsum(1 / (1 + math.exp(other - own)) for index, other in enumerate(found) if index != side) / (count - 1)
        if side in compared and count > 1
        else math.nan
        for side, own in enumerate(found)
    ]
