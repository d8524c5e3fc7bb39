"""Scores the images of a benchmark through a ledger, so that existing scores and answers are used again."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from PIL.Image import Image

from retouch.recipe.reward_arguments import modules_in_argument, parse_reward, read_combined, read_reward
from retouch.rewards import identity
from retouch.rewards.base import JudgeClients, RewardSection, close
from retouch.rewards.function import FunctionReward
from retouch.rewards.judging import RewardScorer, ScoredBatch
from retouch.rewards.ledger.database import Database, ImageHasher
from retouch.rewards.ledger.journal import Journal
from retouch.types import Batch, Column, Sample, Task
from retouch_bench.images import ImageFolder, ImageKey
from retouch_bench.results import ImageRow, missing_images
from retouch_bench.suite import Suite
from retouch_judge.cache import AnswerCache, with_cache
from retouch_judge.kinds import JUDGE_MODELS
from retouch_judge.models import JudgeModel
from retouch_judge.quota import Quota

Judge: TypeAlias = "str | JudgeModel | RewardSection | Callable[..., Any] | None"
_CHUNK = 16  # images
_MOST_CHUNKS = 8  # chunks that are scored at the same time


@dataclass(frozen=True)
class Scorer:
    """The reward that scores the images of a suite. ``own``: it follows the protocol of the suite; otherwise the user chose it.
    ``name``: the name of the folder of the scores, and in the table. ``columns``: of a row, those of the suite, or of the reward
    that replaces its protocol."""

    suite: Suite
    section: RewardSection
    name: str
    own: bool
    columns: Mapping[str, Column]

    @property
    def required(self) -> list[str]:
        """The columns that every image must have. A diagnostic column does not apply to every image."""
        return [name for name, column in self.columns.items() if not column.diagnostic]

    @property
    def direction(self) -> int:
        """1 if a higher headline is better, otherwise -1."""
        name = self.suite.headline_column if self.own else next(iter(self.columns))
        column = self.columns.get(name)
        return 1 if column is None or column.higher_is_better else -1


class CountedClients(JudgeClients):
    """Opens the clients of judges for several calls of scoring, which count the requests to one model against the same quota.

    ``quotas``: the quotas by model. The caller keeps them between the calls; new models are added here.
    """

    def __init__(self, device: torch.device | str, quotas: dict[str, Quota]) -> None:
        super().__init__(device)
        self._quotas = quotas

    def open(self, model: JudgeModel) -> Any:
        """Open the client of a model. Raises ValueError as ``JudgeModel.open`` does."""
        client = super().open(model)
        if getattr(client, "quota", None) is not None:
            client.share_quota(self._quotas.setdefault(model.model_dump_json(), client.quota))
        return client


def choose_scorer(suite: Suite, judge: Judge, *, name: str | None = None) -> Scorer:
    """Return the scorer for ``judge``.

    None: the protocol of the suite, if it needs no judge. A vision-language model (a section, or its JSON): answers the questions
    of the suite. A reward (section, function, or name as in `retouch score`) scores the images instead of the suite's protocol.

    Raises ValueError if there is no such model or reward, or if the suite needs a judge and ``judge`` is None.
    """
    if isinstance(judge, str):
        if judge.lstrip().startswith("{") and (document := read_combined(judge)).get("kind") in JUDGE_MODELS.paths:
            found: Any = JUDGE_MODELS.class_for(document)
            judge = cast(JudgeModel, found(**document))
        else:
            judge = parse_reward(read_reward(judge), allow_imports=modules_in_argument(judge))
    elif callable(judge) and not isinstance(judge, RewardSection):
        judge = FunctionReward.of(judge)
    columns = suite.columns
    if isinstance(judge, RewardSection):
        section, words = judge, getattr(judge, "class_", judge.name).rpartition(":")[2]
        if (known := section.known_columns()) is None:  # a class or function of the user, or a reward behind a server
            made = section.build(device="cpu")
            known = dict(made.columns)
            close(made)
        columns = {name: column for name, column in known.items() if not column.diagnostic}
    else:
        section = suite.reward(judge)
        words = "own" if judge is None else judge.description.partition(" at ")[0].rpartition("/")[2]
    plain = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name or words)
    return Scorer(suite, section, plain.strip("-.")[:60] or "own", section is not judge, columns)


def score_images(
    scorer: Scorer,
    places: Sequence[ImageKey],
    images: ImageFolder,
    *,
    ledger: Path,
    device: torch.device,
    clients: JudgeClients | None = None,
    noted: Callable[[int], None] = lambda count: None,
) -> list[ImageRow]:
    """Return a row for each image, in order.

    ``ledger``: the file with the scores and answers of this rank. ``clients``: opens the clients of judges; they are closed at the
    end. ``noted``: called after each chunk with the number of images scored.

    An image that is missing or cannot be read has no score, and its row says why. Images that the same scorer has scored before are
    not scored again, unless a score was missing. Raises the ValueError of a reward, for example if a budget is spent.
    """
    with closing(Database(ledger)) as database:
        cache = AnswerCache(database)
        reward = scorer.section.build(device=device, clients=clients, keep=lambda made: with_cache(made, cache))
        wanted = [name for name, column in reward.columns.items() if not column.diagnostic]
        # A scorer must have a combination, but a suite uses the columns themselves.
        combine = {wanted[0]: 1.0 if reward.columns[wanted[0]].higher_is_better else -1.0}
        judging = RewardScorer(reward, combine, device=device)
        judging.journal = Journal(database, judge=identity.fingerprint(reward))
        try:
            judging.journal.forget_missing(wanted, split="heldout", step=0)
            score = judging.for_split("heldout", 0)
            rows: list[ImageRow] = []
            waiting: deque[tuple[list[_Shown], Future[ScoredBatch] | None]] = deque()
            for first in range(0, len(places), _CHUNK):
                waiting.append(_start(scorer, score, places[first : first + _CHUNK], images))
                while len(waiting) == _MOST_CHUNKS or (waiting and first + _CHUNK >= len(places)):
                    shown, future = waiting.popleft()
                    table = {} if future is None else {name: each.tolist() for name, each in future.result().scores.items()}
                    numbers = count()
                    for each in shown:
                        number = None if each.sample is None else next(numbers)
                        given = {} if number is None else {name: values[number] for name, values in table.items()}
                        rows.append(_row(scorer, each, given, database))
                    noted(len(rows) - len(missing_images(rows, scorer.required)))
            return rows
        finally:
            judging.close()


@dataclass(slots=True)
class _Shown:
    """An image with its sample and the hash of its pixels; without them if it cannot be read, with the reason."""

    place: ImageKey
    file: str
    sample: Sample | None = None
    picture: str = ""
    reason: str = ""


def _start(
    scorer: Scorer, score: Any, places: Sequence[ImageKey], images: ImageFolder
) -> tuple[list[_Shown], Future[ScoredBatch] | None]:
    hasher = ImageHasher()
    shown, samples, given = [], [], []
    for place in places:
        each = _Shown(place, str(images.find(place) or ""))
        shown.append(each)
        try:
            each.sample = Sample(task_at(scorer.suite, place, images), images.read(place))
        except ValueError as error:
            each.reason = str(error)
            continue
        each.picture = hasher(each.sample.image)
        samples.append(each.sample)
        given.append(place)
    tasks, numbers, slots = (sample.task for sample in samples), (each.number for each in given), (each.slot for each in given)
    batch = Batch(seed=0, step=0, tasks=(*tasks,), group_ids=(*numbers,), group=(*range(len(given)),), slot=(*slots,))
    return shown, score(batch, samples) if samples else None


def task_at(suite: Suite, place: ImageKey, images: ImageFolder) -> Task:
    """Return the task of one image. A later turn edits the image of the previous turn. Raises ValueError if a file is missing."""
    previous: Image | None = None
    if place.turn:
        previous = images.read(ImageKey(place.item, place.number, place.sample, place.turn - 1))
    return suite.task_for(place.item, turn=place.turn, previous=previous)


def _row(scorer: Scorer, shown: _Shown, given: Mapping[str, float], database: Database) -> ImageRow:
    item, turn = shown.place.item, shown.place.turn
    scores = dict.fromkeys(scorer.columns, math.nan)
    reason = shown.reason
    if given:
        found = scorer.suite.score(item, given) if scorer.own else given
        if isinstance(found, str):
            reason = found
        else:
            scores = {name: float(found[name]) for name in scores}
    if not reason and any(math.isnan(scores[name]) for name in scorer.required):
        query = "SELECT fault FROM answers WHERE picture = ? AND scores IS NULL ORDER BY number DESC LIMIT 1"
        with database.reading() as connection:
            newest = connection.execute(query, (shown.picture,)).fetchone()
        reason = newest[0] if newest is not None and newest[0] else "the scorer gave no score"
    return ImageRow(
        item=item.id,
        category=item.category,
        cluster=item.cluster,
        sample=shown.place.sample,
        turn=turn + 1,
        prompt=item.instruction(turn),
        image=shown.file,
        scores=scores,
        reason=reason,
        given=given,
    )
