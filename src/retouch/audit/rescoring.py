"""A run's pictures, judged again by another reward, whose scores go to rescored/NAME.sqlite; the run's own ledger is left alone.

What was judged again is not judged a third time, so a command that was stopped goes on where it was; what could not be judged is.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from retouch.assembly.reward import build_reward
from retouch.audit.images import Shown
from retouch.audit.opening import RESCORED, LedgerView, Scored, chosen
from retouch.audit.tasks import RunTasks
from retouch.protocols import Reward
from retouch.recipe.recipe import parse
from retouch.recipe.reward_words import parse_reward, read_reward
from retouch.records.folder import RunFolder
from retouch.rewards import identity
from retouch.rewards.closing import close
from retouch.rewards.ledger.answers import AnswerCache
from retouch.rewards.ledger.caching import with_cache
from retouch.rewards.ledger.database import Database
from retouch.rewards.ledger.journal import Journal, JournalRow
from retouch.rewards.scoring import scores_of
from retouch.types import Sample

_ROWS = 64


def rescore(run: Path, words: str, *, name: str | None, split: str | None, steps: tuple[int, int] | None) -> dict[str, Any]:
    """Judge what is left by the reward that ``words`` name (``recipe/reward_words.py``), under ``name``. What was done, as JSON.

    ValueError: no such reward, no picture is left, or the name holds the scores of another judge.
    """
    called = name or default_name(words)
    if not re.fullmatch(r"[A-Za-z0-9._-]+", called):
        raise ValueError(f"{called!r} cannot be the name of a judge: letters, digits, dots and dashes; give one with --name")
    section = parse_reward(read_reward(words))
    samples = chosen(LedgerView.open(run).samples, split=split, steps=steps)
    shown = Shown(run)
    pictured = [sample for sample in samples if shown.path(sample) is not None]
    if not pictured:
        raise ValueError(
            f"none of the {len(samples)} samples has a picture left; a run keeps every one with `ledger: {{keep_images: true}}`, "
            "and some every samples.every steps"
        )
    tasks = RunTasks(parse(RunFolder(run).read_recipe()["recipe"]))
    with closing(Database(run / RESCORED / f"{called}.sqlite")) as database:
        answers = AnswerCache(database)
        reward = build_reward(section, device=_device(), keep=lambda made: with_cache(made, answers))
        try:
            fresh, absent = _judge(reward, Journal(database, judge=_only(database, reward)), pictured, shown=shown, tasks=tasks)
        finally:
            close(reward)
    return {
        "name": called,
        "columns": [f"{called}:{column}" for column in reward.columns],
        "samples": len(samples),
        "judged": len(pictured) - absent,
        "judged_now": fresh,
        "without_picture": len(samples) - len(pictured) + absent,
        "steps": sorted({sample.step for sample in pictured}),
    }


def default_name(words: str) -> str:
    """A name for a judge that was named so: ``clip:/models/b`` becomes ``clip-b``."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", re.sub(r"[^:=]*/", "", words)).strip("-.")[:40]


def _judge(reward: Reward, journal: Journal, samples: Sequence[Scored], *, shown: Shown, tasks: RunTasks) -> tuple[int, int]:
    """How many samples were judged now, and how many pictures were not those of the ledger any more."""
    fresh = absent = 0
    wanted = [name for name, column in reward.columns.items() if not column.diagnostic]
    for split, step in dict.fromkeys(_row(sample)[:2] for sample in samples):
        journal.forget_missing(wanted, split=split, step=step)
    for chunk in _chunks(samples):
        made = [(_row(sample), Sample(tasks(sample), shown.image(sample), sample.written)) for sample in chunk]
        there = [(row, sample) for row, sample in made if sample.image is not None]
        absent += len(made) - len(there)
        known, _ = journal.recall([row for row, _ in there], reward.columns)
        new = [pair for pair, is_known in zip(there, known.tolist(), strict=True) if not is_known]
        if new:
            journal.record([row for row, _ in new], scores_of(reward, [sample for _, sample in new]))
        fresh += len(new)
    return fresh, absent


def _chunks(samples: Sequence[Scored]) -> Iterator[list[Scored]]:
    """The samples of one split and step at a time, whole groups together where they are not too many."""
    for _, same_step in groupby(samples, key=lambda sample: (sample.split, sample.step)):
        chunk: list[Scored] = []
        for _, members in groupby(same_step, key=lambda sample: sample.group):
            group = list(members)
            if chunk and len(chunk) + len(group) > _ROWS:
                yield chunk
                chunk = []
            chunk += group
        yield chunk


def _row(sample: Scored) -> JournalRow:
    """The sample's row in the journal, which counts the steps before a training step."""
    step = sample.step - 1 if sample.split == "train" else sample.step
    split: Any = sample.split
    return JournalRow(split, step, sample.group, sample.slot, sample.task, sample.picture, sample.written)


def _only(database: Database, reward: Reward) -> str:
    """The reward's fingerprint. ValueError where the file holds another one's scores."""
    own = identity.fingerprint(reward)
    with database.reading() as connection:
        others = [judge for (judge,) in connection.execute("SELECT DISTINCT judge FROM samples") if judge != own]
    if others:
        raise ValueError(f"{database.path} holds the scores of another judge; give this one another --name, or remove the file")
    return own


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
