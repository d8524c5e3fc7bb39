"""Scores the images of a benchmark through a ledger: what was scored or answered before is not asked again."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from PIL.Image import Image

from retouch.benchmarks.image_files import ImageFolder, ImagePlace
from retouch.benchmarks.results import ImageRow
from retouch.benchmarks.suite import Suite
from retouch.recipe.reward_words import modules_typed, parse_reward, read_reward
from retouch.rewards import identity
from retouch.rewards.base import RewardSection
from retouch.rewards.judging import RewardScorer, ScoredBatch
from retouch.rewards.ledger.answers import AnswerCache
from retouch.rewards.ledger.caching import with_cache
from retouch.rewards.ledger.database import Database
from retouch.rewards.ledger.hashing import ImageHasher
from retouch.rewards.ledger.journal import Journal
from retouch.rewards.quota.quota import Quota
from retouch.rewards.vlm.base import JudgeClients, JudgeModel
from retouch.rewards.vlm.chat_client import ChatClient
from retouch.rewards.vlm.models import JUDGE_MODELS
from retouch.rewards.vlm.questions import JudgeClient
from retouch.types import Batch, Column, Sample, Task

_CHUNK = 16  # images
_MOST_CHUNKS = 8  # that are being scored at the same time


@dataclass(frozen=True)
class Scorer:
    """What scores a suite's images. ``own``: it is the suite's protocol, else a reward that the user named instead.

    ``name``: of its folder, and in the table.
    """

    suite: Suite
    section: RewardSection
    name: str
    own: bool

    @property
    def columns(self) -> Mapping[str, Column]:
        """The columns of a row: those of the suite, or of the reward that takes its place."""
        if self.own:
            return self.suite.columns
        known = self.section.known_columns() or {}
        return {name: column for name, column in known.items() if not column.diagnostic}

    @property
    def required(self) -> list[str]:
        """The columns that every image must have; a diagnostic one may not apply to it."""
        return [name for name, column in self.columns.items() if not column.diagnostic]

    @property
    def direction(self) -> int:
        """1 where more of the headline is better, else -1."""
        name = self.suite.headline_column if self.own else next(iter(self.columns))
        column = self.columns.get(name)
        return 1 if column is None or column.higher_is_better else -1


class CountedClients(JudgeClients):
    """Clients of one scoring among several. All clients of a model count their requests against one quota.

    ``quotas``: by model; kept between the scorings, and filled here.
    """

    def __init__(self, device: torch.device | str, quotas: dict[str, Quota]) -> None:
        super().__init__(device)
        self._quotas = quotas

    def open(self, model: JudgeModel) -> JudgeClient:
        """The model's client. ValueError as ``JudgeModel.open``."""
        client = super().open(model)
        if isinstance(client, ChatClient) and client.quota is not None:
            client.share_quota(self._quotas.setdefault(model.model_dump_json(), client.quota))
        return client


def choose_scorer(suite: Suite, judge: str | JudgeModel | RewardSection | None, *, name: str | None = None) -> Scorer:
    """The scorer that ``judge`` names.

    None: the suite's own, if it needs no judge. A vision-language model (its section, or the JSON of it) answers the suite's own
    questions. A reward (as `retouch score` names it, or a section) scores the images in place of the suite's protocol.

    Raises ValueError if there is no such model or reward, or the suite needs a judge and there is none.
    """
    if isinstance(judge, str):
        judge = _parse(judge)
    if isinstance(judge, RewardSection):
        return Scorer(suite, judge, _checked(name or judge.name), own=False)
    words = "own" if judge is None else judge.description.partition(" at ")[0].rpartition("/")[2]
    return Scorer(suite, suite.reward(judge), _checked(name or words), own=True)


def _parse(text: str) -> JudgeModel | RewardSection:
    if text.lstrip().startswith("{") and (document := json.loads(text)).get("kind") in JUDGE_MODELS.paths:
        found = JUDGE_MODELS.class_for(document)
        assert found is not None, "it is in the table"
        model: Any = found(**document)
        return cast(JudgeModel, model)
    return parse_reward(read_reward(text), allow_imports=modules_typed(text))


def _any_column(columns: Mapping[str, Column]) -> dict[str, float]:
    """A combination, which a scorer must have; a suite uses the columns themselves."""
    name = next(name for name, column in columns.items() if not column.diagnostic)
    return {name: 1.0 if columns[name].higher_is_better else -1.0}


def _checked(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name).strip("-.")[:60] or "own"


def score_images(
    scorer: Scorer,
    places: Sequence[ImagePlace],
    images: ImageFolder,
    *,
    ledger: Path,
    device: torch.device,
    clients: JudgeClients | None = None,
    noted: Callable[[int], None] = lambda count: None,
) -> list[ImageRow]:
    """A row for each image, in order. ``ledger``: the file of this rank's scores and answers. ``noted``: called after each chunk.

    ``clients``: open the clients of judges, and are closed at the end.

    An image that is missing or cannot be read has no score, and the row says why. Images that were scored before by the same scorer
    are not scored again, unless a score was missing. Raises ValueError as rewards do, for example when a budget is spent.
    """
    with closing(Database(ledger)) as database:
        cache = AnswerCache(database)
        reward = scorer.section.build(device=device, clients=clients, keep=lambda made: with_cache(made, cache))
        judging = RewardScorer(reward, _any_column(reward.columns), device=device)
        judging.journal = Journal(database, judge=identity.fingerprint(reward))
        try:
            wanted = [name for name, column in reward.columns.items() if not column.diagnostic]
            judging.journal.forget_missing(wanted, split="heldout", step=0)
            rows: list[ImageRow] = []
            for chunk in _scored(scorer, judging, places, images):
                rows += [_row(scorer, each, database) for each in chunk]
                noted(len(rows))
            return rows
        finally:
            judging.close()


@dataclass(frozen=True, slots=True)
class _Given:
    place: ImagePlace
    file: str
    picture: str
    scores: dict[str, float]
    reason: str


def _scored(scorer: Scorer, judging: RewardScorer, places: Sequence[ImagePlace], images: ImageFolder) -> Iterator[list[_Given]]:
    """The columns of the reward for each image, chunk by chunk, while a few further chunks are being scored."""
    score = judging.for_split("heldout", 0)
    waiting: deque[_Chunk] = deque()
    for first in range(0, len(places), _CHUNK):
        waiting.append(_start(scorer, score, places[first : first + _CHUNK], images))
        if len(waiting) == _MOST_CHUNKS:
            yield waiting.popleft().finish()
    while waiting:
        yield waiting.popleft().finish()


@dataclass(frozen=True, slots=True)
class _Chunk:
    places: Sequence[ImagePlace]
    files: Sequence[str]
    reasons: Mapping[int, str]
    pictures: Mapping[int, str]
    future: Future[ScoredBatch] | None

    def finish(self) -> list[_Given]:
        columns = {} if self.future is None else {name: each.tolist() for name, each in self.future.result().scores.items()}
        numbers = {row: number for number, row in enumerate(self.pictures)}
        return [
            _Given(
                place,
                self.files[row],
                self.pictures.get(row, ""),
                {name: values[numbers[row]] for name, values in columns.items()} if row in numbers else {},
                self.reasons.get(row, ""),
            )
            for row, place in enumerate(self.places)
        ]


def _start(scorer: Scorer, score: Any, places: Sequence[ImagePlace], images: ImageFolder) -> _Chunk:
    tasks: list[Task] = []
    samples: list[Sample] = []
    kept: list[int] = []
    reasons: dict[int, str] = {}
    for row, place in enumerate(places):
        try:
            task = task_at(scorer.suite, place, images)
            image = images.read(place)
        except ValueError as error:
            reasons[row] = str(error)
            continue
        tasks.append(task)
        samples.append(Sample(task, image))
        kept.append(row)
    hasher = ImageHasher()
    pictures = {row: hasher(sample.image) for row, sample in zip(kept, samples, strict=True)}
    batch = Batch(
        seed=0,
        step=0,
        tasks=tuple(tasks),
        group_ids=tuple(places[row].number for row in kept),
        group=tuple(range(len(kept))),
        slot=tuple(places[row].slot for row in kept),
    )
    files = [str(path) if (path := images.find(place)) is not None else "" for place in places]
    return _Chunk(places, files, reasons, pictures, score(batch, samples) if samples else None)


def task_at(suite: Suite, place: ImagePlace, images: ImageFolder) -> Task:
    """The task of one image; a later turn edits the image of the turn before. Raises ValueError if a file is missing."""
    previous: Image | None = None
    if place.turn:
        previous = images.read(ImagePlace(place.item, place.number, place.sample, place.turn - 1))
    return suite.task_for(place.item, turn=place.turn, previous=previous)


def _row(scorer: Scorer, given: _Given, database: Database) -> ImageRow:
    nothing = dict.fromkeys(scorer.columns, math.nan)
    scores, reason = dict(nothing), given.reason
    if given.scores:
        found = scorer.suite.score(given.place.item, given.scores) if scorer.own else given.scores
        if isinstance(found, str):
            reason = found
        else:
            scores = {name: float(found[name]) for name in nothing}
    if not reason and any(math.isnan(scores[name]) for name in scorer.required):
        reason = _fault(database, given.picture)
    item = given.place.item
    return ImageRow(
        item=item.id,
        category=item.category,
        cluster=item.cluster,
        sample=given.place.sample,
        turn=given.place.turn + 1,
        prompt=item.instruction(given.place.turn),
        image=given.file,
        scores=scores,
        reason=reason,
        given=given.scores,
    )


def _fault(database: Database, picture: str) -> str:
    """Why the newest call about an image failed."""
    query = "SELECT fault FROM answers WHERE picture = ? AND scores IS NULL ORDER BY number DESC LIMIT 1"
    with database.reading() as connection:
        found = connection.execute(query, (picture,)).fetchone()
    return found[0] if found is not None and found[0] else "the scorer gave no score"
