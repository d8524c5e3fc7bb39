"""The journal: the scores of all samples of a run, so that a resumed run does not score the same images again.

The key of a sample is its position in the run: split, step, group and slot. Its scores are reused only for the same task, image,
completion and judge. Missing scores are stored too. Each rank has its own journal.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool
from PIL.Image import Image
from torch import Tensor

from retouch.rewards.ledger.database import Database, ImageHasher, all_finite, decode_scores, encode_scores, encode_text
from retouch.types import Batch, Sample, Scores

if TYPE_CHECKING:
    from retouch.rewards.ledger.database import ImageStore

Split: TypeAlias = Literal["train", "heldout", "ceiling", "best", "turns", "guided", "watch", "canary"]


class JournalRow(NamedTuple):
    """The position of a sample in the run (``split`` to ``slot``, the primary key of the table), and what was scored.

    ``step``: number of completed steps. ``group``: the number of the task in the global order of the step. ``task``: the task's id.
    ``image``: the SHA-256 of the image, empty if the policy made none.
    """

    split: Split
    step: int
    group: int
    slot: int
    task: str
    image: str
    completion: str | None


def journal_rows(batch: Batch, samples: Iterable[Sample], *, split: Split, step: int) -> list[JournalRow]:
    """The journal row of each sample of a batch. Each image is hashed once."""
    hasher = ImageHasher()
    return [
        JournalRow(
            split,
            step,
            batch.group_ids[group],
            slot,
            encode_text(sample.task.id),
            hasher(sample.image),
            None if sample.completion is None else encode_text(sample.completion),
        )
        for group, slot, sample in zip(batch.group, batch.slot, samples, strict=True)
    ]


def rows_to_score(rows: Sequence[JournalRow], known: Sequence[bool], *, whole_groups: bool) -> list[int]:
    """The indices of the rows that are not ``known``; with ``whole_groups``, for a reward that compares the samples of a task, also
    of the other rows of their groups."""
    incomplete = {row.group for row, is_known in zip(rows, known, strict=True) if not is_known} if whole_groups else set()
    return [index for index, row in enumerate(rows) if not known[index] or row.group in incomplete]


@dataclass(frozen=True, eq=False)
class Journal:
    """The journal in the file of a ledger. Each call is one transaction; calls may come from several threads.

    ``judge``: the fingerprint of the reward; rows of another judge are not found. ``images``: stores each image that is scored;
    None stores no images.
    """

    database: Database
    judge: str = ""
    images: "ImageStore | None" = None

    def recall(self, rows: Sequence[JournalRow], columns: Iterable[str]) -> tuple[Bool[Tensor, " b"], Scores]:
        """Look up rows. Returns which rows are stored with all of these columns, and the scores, (b,) each: NaN if missing or not
        stored.

        All rows must have the same split and step.
        """
        names = list(columns)
        kept: dict[JournalRow, dict[str, float]] = {}
        if rows:  # this judge's scores in the rows' split, step and range of groups, without rows that have an infinite score
            (split, step), *others = {row[:2] for row in rows}
            assert not others, "the rows of one batch"
            query = (
                "SELECT split, step, group_id, slot, task, picture, written, scores FROM samples "
                "WHERE split = ? AND step = ? AND group_id BETWEEN ? AND ? AND judge = ?"
            )
            groups = [row.group for row in rows]
            with self.database.reading() as connection:
                stored = connection.execute(query, (split, step, min(groups), max(groups), self.judge)).fetchall()
            decoded = ((JournalRow(*row), decode_scores(scores)) for *row, scores in stored)
            kept = {row: scores for row, scores in decoded if all_finite(scores)}
        known = [row in kept and kept[row].keys() >= set(names) for row in rows]
        found = [kept[row] if is_known else dict.fromkeys(names, torch.nan) for row, is_known in zip(rows, known, strict=True)]
        scores = {name: torch.tensor([values[name] for values in found], dtype=torch.float64) for name in names}
        return torch.tensor(known, dtype=torch.bool), scores

    def record(
        self,
        rows: Sequence[JournalRow],
        scores: Scores,
        *,
        images: Sequence[Image | None] = (),
        seconds: float = 0.0,
    ) -> None:
        """Store the scores of all rows, (b,) each, in one transaction; older scores are replaced. They are on the disk when this
        returns.

        ``images``: the images of the rows, for a journal that stores images. ``seconds``: the time to score one sample. An
        evaluation fills up its last batch with the last task, so several rows can have the same position; the first of them is
        stored.
        """
        if self.images is not None:
            for row, image in zip(rows, images, strict=True):
                if image is not None:
                    self.images.save(row.image, image)
        now = time.time()
        columns = {name: column.tolist() for name, column in scores.items()}
        values: dict[tuple[object, ...], tuple[object, ...]] = {}
        for index, row in enumerate(rows):
            given = encode_scores({name: column[index] for name, column in columns.items()})
            values.setdefault(row[:4], (*row, self.judge, given, seconds, now))
        with self.database.writing() as connection:
            connection.executemany(f"INSERT OR REPLACE INTO samples VALUES (?{', ?' * 10})", values.values())

    def forget_missing(self, columns: Iterable[str], *, split: Split, step: int) -> None:
        """Delete the rows of a split and step with a missing score in one of these columns, so that they are scored again."""
        names = list(columns)
        with self.database.writing() as connection:
            kept = connection.execute("SELECT group_id, slot, scores FROM samples WHERE split = ? AND step = ?", (split, step))
            found = [(group, slot, decode_scores(given)) for group, slot, given in kept.fetchall()]
            missing = [
                (split, step, group, slot)
                for group, slot, scores in found
                if any(name in scores and scores[name] != scores[name] for name in names)
            ]
            connection.executemany("DELETE FROM samples WHERE split = ? AND step = ? AND group_id = ? AND slot = ?", missing)
