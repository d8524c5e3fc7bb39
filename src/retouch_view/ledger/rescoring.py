"""Score the stored images of a run with another reward, into rescored/NAME.sqlite; the ledger of the run does not change.

An interrupted command continues where it stopped: only samples without scores, or with missing scores, are scored. A reward that
compares the samples of a task scores the whole groups of these samples.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any

from retouch.distributed.ranks import scoring_device
from retouch.protocols import Reward
from retouch.recipe.recipe import parse
from retouch.recipe.reward_arguments import default_name, modules_in_argument, parse_reward, read_reward
from retouch.records import files
from retouch.records.folder import RunFolder
from retouch.rewards import identity
from retouch.rewards.base import close, compares_groups
from retouch.rewards.ledger.answers import AnswerCache
from retouch.rewards.ledger.caching import with_cache
from retouch.rewards.ledger.database import Database
from retouch.rewards.ledger.journal import Journal, JournalRow, rows_to_score
from retouch.rewards.scoring import scores_of
from retouch.types import Sample
from retouch_view.ledger.images import RunImages
from retouch_view.ledger.ledger_view import RESCORED, LedgerSample, LedgerView, select_samples
from retouch_view.ledger.tasks import RunTasks

_MAX_CHUNK = 64  # samples


def rescore(run: Path, words: str, *, name: str | None, split: str | None, steps: tuple[int, int] | None) -> dict[str, Any]:
    """Score the samples of a split and steps (None: all) with the reward ``words`` (``recipe/reward_arguments.py``).

    Returns a summary as JSON.

    ``name``: prefix of the new columns. Raises ValueError if the reward does not exist, no image is stored, or the file of ``name``
    has scores of another reward.
    """
    called = name or default_name(words)
    if not re.fullmatch(r"[A-Za-z0-9._-]+", called):
        raise ValueError(f"{called!r} cannot be a name: use letters, digits, dots, dashes and underscores; give one with --name")
    section = parse_reward(read_reward(words), allow_imports=modules_in_argument(words))
    samples = select_samples(LedgerView.open(run).samples, split=split, steps=steps)
    images = RunImages(run)
    with_image = [sample for sample in samples if images.path(sample) is not None]
    if not with_image:
        raise ValueError(
            f"none of the {len(samples)} samples has a stored image; a run stores all images with `ledger: {{keep_images: true}}`, "
            "and a few every samples.every steps"
        )
    tasks = RunTasks(parse(RunFolder(run).read_recipe()["recipe"]))
    with closing(Database(files.inside(run, RESCORED) / f"{called}.sqlite")) as database:
        cache = AnswerCache(database)
        reward = section.build(device=scoring_device(), keep=lambda made: with_cache(made, cache))
        try:
            journal = Journal(database, judge=_require_same_judge(database, reward))
            new, absent = _score(reward, journal, with_image, images=images, tasks=tasks)
        finally:
            close(reward)
    return {
        "name": called,
        "columns": [f"{called}:{column}" for column in reward.columns],
        "samples": len(samples),
        "judged": len(with_image) - absent,
        "judged_now": new,
        "without_image": len(samples) - len(with_image) + absent,
        "steps": sorted({sample.step for sample in with_image}),
    }


def _score(
    reward: Reward, journal: Journal, samples: Sequence[LedgerSample], *, images: RunImages, tasks: RunTasks
) -> tuple[int, int]:
    """Score the samples without scores. Returns the number of these samples, and the number of images that are missing or changed
    on the disk."""
    scored = absent = 0
    wanted = [name for name, column in reward.columns.items() if not column.diagnostic]
    for split, step in dict.fromkeys(_row(sample)[:2] for sample in samples):
        journal.forget_missing(wanted, split=split, step=step)
    for chunk in _chunks(samples):
        made = [(_row(sample), Sample(tasks(sample), images.image(sample), sample.completion)) for sample in chunk]
        there = [(row, sample) for row, sample in made if sample.image is not None]
        absent += len(made) - len(there)
        rows = [row for row, _ in there]
        known, _ = journal.recall(rows, reward.columns)
        new = [there[index] for index in rows_to_score(rows, known.tolist(), whole_groups=compares_groups(reward))]
        if new:
            journal.record([row for row, _ in new], scores_of(reward, [sample for _, sample in new]))
        scored += len(new)
    return scored, absent


def _chunks(samples: Sequence[LedgerSample]) -> Iterator[list[LedgerSample]]:
    """Split the samples into chunks of one split and step each. A chunk has whole groups, and more than ``_MAX_CHUNK`` samples only
    if a single group is larger."""
    for _, same_step in groupby(samples, key=lambda sample: (sample.split, sample.step)):
        chunk: list[LedgerSample] = []
        for _, members in groupby(same_step, key=lambda sample: sample.group):
            group = list(members)
            if chunk and len(chunk) + len(group) > _MAX_CHUNK:
                yield chunk
                chunk = []
            chunk += group
        yield chunk


def _row(sample: LedgerSample) -> JournalRow:
    """The row of the sample in the journal, which counts training steps from 0."""
    step = sample.step - 1 if sample.split == "train" else sample.step
    split: Any = sample.split
    return JournalRow(split, step, sample.group, sample.slot, sample.task, sample.image, sample.completion)


def _require_same_judge(database: Database, reward: Reward) -> str:
    """The fingerprint of the reward. Raises ValueError if the file has scores of another reward."""
    own = identity.fingerprint(reward)
    with database.reading() as connection:
        others = [judge for (judge,) in connection.execute("SELECT DISTINCT judge FROM samples") if judge != own]
    if others:
        raise ValueError(f"{database.path} has the scores of another reward; give another --name, or remove the file")
    return own
