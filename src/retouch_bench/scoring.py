"""Scores the images of a benchmark through a ledger, so that existing scores and answers are used again."""

from __future__ import annotations

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

from retouch.recipe.reward_arguments import modules_in_argument, parse_reward, read_combined, read_reward
from retouch.rewards import identity
from retouch.rewards.base import JudgeClients, RewardSection
from retouch.rewards.judging import RewardScorer, ScoredBatch
from retouch.rewards.ledger.database import Database, ImageHasher
from retouch.rewards.ledger.journal import Journal
from retouch.types import Batch, Column, Sample, Task
from retouch_bench.image_files import ImageFolder, ImageKey
from retouch_bench.results import ImageRow, missing_images
from retouch_bench.suite import Suite
from retouch_judge.cache import AnswerCache, with_cache
from retouch_judge.kinds import JUDGE_MODELS
from retouch_judge.models import JudgeModel
from retouch_judge.quota import Quota

_CHUNK = 16  # images
_MOST_CHUNKS = 8  # chunks that are scored at the same time


@dataclass(frozen=True)
class Scorer:
    """The reward that scores the images of a suite. ``own``: it follows the protocol of the suite; otherwise the user chose it.

    ``name``: the name of the folder of the scores, and in the table.
    """

    suite: Suite
    section: RewardSection
    name: str
    own: bool

    @property
    def columns(self) -> Mapping[str, Column]:
        """The columns of a row: those of the suite, or of the reward that replaces its protocol."""
        if self.own:
            return self.suite.columns
        known = self.section.known_columns() or {}
        return {name: column for name, column in known.items() if not column.diagnostic}

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


def choose_scorer(suite: Suite, judge: str | JudgeModel | RewardSection | None, *, name: str | None = None) -> Scorer:
    """Return the scorer for ``judge``.

    None: the protocol of the suite, if it needs no judge. A vision-language model (a section, or its JSON): answers the questions
    of the suite. A reward (a section, or a name as in `retouch score`): scores the images instead of the protocol of the suite.

    Raises ValueError if there is no such model or reward, or if the suite needs a judge and ``judge`` is None.
    """
    if isinstance(judge, str):
        judge = _parse(judge)
    if isinstance(judge, RewardSection):
        return Scorer(suite, judge, _checked(name or judge.name), own=False)
    words = "own" if judge is None else judge.description.partition(" at ")[0].rpartition("/")[2]
    return Scorer(suite, suite.reward(judge), _checked(name or words), own=True)


def _parse(text: str) -> JudgeModel | RewardSection:
    if text.lstrip().startswith("{") and (document := read_combined(text)).get("kind") in JUDGE_MODELS.paths:
        found = JUDGE_MODELS.class_for(document)
        assert found is not None, "the kind is in the table"
        model: Any = found(**document)
        return cast(JudgeModel, model)
    return parse_reward(read_reward(text), allow_imports=modules_in_argument(text))


def _any_column(columns: Mapping[str, Column]) -> dict[str, float]:
    """Return an arbitrary combination: a scorer must have one, but a suite uses the columns themselves."""
    name = next(name for name, column in columns.items() if not column.diagnostic)
    return {name: 1.0 if columns[name].higher_is_better else -1.0}


def _checked(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name).strip("-.")[:60] or "own"


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
        judging = RewardScorer(reward, _any_column(reward.columns), device=device)
        judging.journal = Journal(database, judge=identity.fingerprint(reward))
        try:
            wanted = [name for name, column in reward.columns.items() if not column.diagnostic]
            judging.journal.forget_missing(wanted, split="heldout", step=0)
            rows: list[ImageRow] = []
            scored = 0
            for chunk in _scored(scorer, judging, places, images):
                made = [_row(scorer, each, database) for each in chunk]
                scored += len(made) - len(missing_images(made, scorer.required))
                rows += made
                noted(scored)
            return rows
        finally:
            judging.close()


@dataclass(frozen=True, slots=True)
class _Given:
    place: ImageKey
    file: str
    picture: str
    scores: dict[str, float]
    reason: str


def _scored(scorer: Scorer, judging: RewardScorer, places: Sequence[ImageKey], images: ImageFolder) -> Iterator[list[_Given]]:
    """Yield the columns of the reward for each image, chunk by chunk. Up to ``_MOST_CHUNKS`` chunks are scored concurrently."""
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
    places: Sequence[ImageKey]
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


def _start(scorer: Scorer, score: Any, places: Sequence[ImageKey], images: ImageFolder) -> _Chunk:
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


def task_at(suite: Suite, place: ImageKey, images: ImageFolder) -> Task:
    """Return the task of one image. A later turn edits the image of the previous turn. Raises ValueError if a file is missing."""
    previous: Image | None = None
    if place.turn:
        previous = images.read(ImageKey(place.item, place.number, place.sample, place.turn - 1))
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
    """Return why the newest failed call about an image failed."""
    query = "SELECT fault FROM answers WHERE picture = ? AND scores IS NULL ORDER BY number DESC LIMIT 1"
    with database.reading() as connection:
        found = connection.execute(query, (picture,)).fetchone()
    return found[0] if found is not None and found[0] else "the scorer gave no score"
