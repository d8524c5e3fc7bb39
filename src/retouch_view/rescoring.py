"""Score the stored images of a run with another reward, into rescored/NAME.sqlite; the ledger of the run does not change.

An interrupted command continues where it stopped: only samples without scores, or with missing scores, are scored. A reward that
compares the samples of a task scores the whole groups of these samples.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from retouch.data.tasks import Subset, UnindexedTasks, draw, further_tasks
from retouch.distributed.ranks import scoring_device
from retouch.protocols import Reward
from retouch.recipe.recipe import Recipe, parse
from retouch.recipe.reward_arguments import default_name, modules_in_argument, parse_reward, read_reward
from retouch.records import files
from retouch.records.folder import RunFolder
from retouch.rewards import identity
from retouch.rewards.base import close, compares_groups
from retouch.rewards.ledger.database import Database, encode_text
from retouch.rewards.ledger.journal import Journal, JournalRow, rows_to_score
from retouch.rewards.scoring import scores_of
from retouch.run.build import sets_of, steps_of
from retouch.types import Codes, Sample, Task
from retouch_judge.cache import AnswerCache, with_cache
from retouch_view.ledger import RESCORED, LedgerSample, LedgerView, RunImages, select_samples

_MAX_CHUNK = 64  # samples


class RunTasks:
    """The tasks of a run. Raises ValueError if the data cannot be found at the path in the recipe. A task with a source image as
    tokens is available only if the data has the image too."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._phases = recipe.resolved_phases()
        self._sets = sets_of(recipe, self._phases, size=recipe.image_size)
        self._steps = steps_of(self._phases, self._sets)
        self._drawn = cache(self._draw)

    def __call__(self, sample: LedgerSample) -> Task:
        """The task of the sample. Raises ValueError if the data has changed since the sample was scored, or has tokens but no
        image."""
        if sample.split == "train":
            step = sample.step - 1
            phase = next(number for number, steps in enumerate(self._steps) if step in steps)
            turn, place = divmod(sample.group, self._phases[phase].tasks_per_step)  # as ``collect_refilled`` numbers groups
            task = self._drawn(phase, step, turn)[place]
        else:
            task = self._sets[0].heldout[sample.group]
        if encode_text(task.id) != sample.task:
            raise ValueError(f"the data has the task {task.id!r} where the run scored {sample.task!r}; use the data of the run")
        if Codes.SOURCE in task.meta and not task.images:
            raise ValueError(
                f"the source image of the task {task.id!r} is given only as tokens, and no model is loaded to decode them; prepare "
                "the data with `retouch data tokenize --pictures` to score it again"
            )
        return task

    def _draw(self, phase: int, step: int, turn: int) -> Sequence[Task]:
        """The tasks of a step, or with ``turn`` above 0 those of a round of ``rollout.refill``."""
        tasks, count = self._sets[phase].train, self._phases[phase].tasks_per_step
        seed, own_step = self._recipe.seed, step - self._steps[phase].start
        if turn == 0:
            return draw(tasks, seed=seed, step=own_step, count=count, places=range(count))
        assert not isinstance(tasks, UnindexedTasks), "rollout.refill refuses streams"
        return Subset(tasks, further_tasks(seed=seed, step=own_step, count=count, size=len(tasks), turn=turn))


def rescore(
    run: Path, words: str, *, name: str | None, split: str | None, steps: tuple[int, int] | None
) -> tuple[dict[str, Any], str]:
    """Score the samples of a split and steps (None: all) with the reward ``words`` (``recipe/reward_arguments.py``).

    Returns a summary as JSON and as text.

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
            own = identity.fingerprint(reward)
            with database.reading() as connection:
                judges = [judge for (judge,) in connection.execute("SELECT DISTINCT judge FROM samples")]
            if set(judges) - {own}:
                raise ValueError(f"{database.path} has the scores of another reward; give another --name, or remove the file")
            journal = Journal(database, judge=own)
            new, absent = _score(reward, journal, with_image, images=images, tasks=tasks)
        finally:
            close(reward)
    judged = len(with_image) - absent
    without = len(samples) - judged
    columns = [f"{called}:{column}" for column in reward.columns]
    listed = sorted({sample.step for sample in with_image})
    found = {"name": called, "columns": columns, "samples": len(samples), "judged": judged, "judged_now": new}
    found |= {"without_image": without, "steps": listed}
    left = f"; {without} have no stored image" if without else ""
    lines = [
        f"{judged} of {len(samples)} samples have scores of {called}, {new} new{left}",
        f"steps with images: {', '.join(map(str, listed[:20]))}{', ...' if len(listed) > 20 else ''}",
        f"columns: {', '.join(columns)}",
    ]
    return found, "\n".join(lines)


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
