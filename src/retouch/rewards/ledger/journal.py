"""The journal: the scores of every sample of a run, so that a resumed run does not score the same images again.

A sample is found by its place in the run: split, step, group and slot. Its scores are used again only for the same task, image and
completion, scored by the same judge. Scores that could not be given are kept as missing. Each rank has a journal of its own.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool
from PIL.Image import Image
from torch import Tensor

from retouch.rewards.ledger.database import Database, all_finite, decode_scores, encode_scores, encode_text
from retouch.rewards.ledger.hashing import ImageHasher
from retouch.types import Batch, Sample, Scores

if TYPE_CHECKING:
    from retouch.rewards.ledger.kept_images import KeptImages

Split: TypeAlias = Literal["train", "heldout", "ceiling", "best", "watch", "canary"]


class JournalRow(NamedTuple):
    """A sample's place in the run (``split`` to ``slot``, the table's primary key) and what was scored there.

    ``step``: steps of the run before it. ``group``: the task's number in the step's global order. ``image``: the image's SHA-256,
    empty where the policy made none.
    """

    split: Split
    step: int
    group: int
    slot: int
    task: str
    image: str
    completion: str | None


def journal_rows(batch: Batch, samples: Iterable[Sample], *, split: Split, step: int) -> list[JournalRow]:
    """The journal's row for each sample of a batch. Hashes every image once."""
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


@dataclass(frozen=True, eq=False)
class Journal:
    """The journal in a ledger's file. Every call is one transaction; calls may come from several threads.

    ``judge``: the fingerprint of the reward; rows that another judge scored are not found. ``images``: where to keep every image
    that was scored; None keeps none.
    """

    database: Database
    judge: str = ""
    images: "KeptImages | None" = None

    def recall(self, rows: Sequence[JournalRow], columns: Iterable[str]) -> tuple[Bool[Tensor, " b"], Scores]:
        """Which rows are known with all of these columns, and the scores: (b,) each, NaN if missing or not known.

        All rows have one split and one step.
        """
        names = list(columns)
        kept = self._kept(rows)
        known = [row in kept and kept[row].keys() >= set(names) for row in rows]
        found = [kept[row] if is_known else dict.fromkeys(names, torch.nan) for row, is_known in zip(rows, known, strict=True)]
        scores = {name: torch.tensor([values[name] for values in found], dtype=torch.float32) for name in names}
        return torch.tensor(known, dtype=torch.bool), scores

    def record(
        self,
        rows: Sequence[JournalRow],
        scores: Scores,
        *,
        images: Sequence[Image | None] = (),
        seconds: float = 0.0,
    ) -> None:
        """Keep every row's scores, (b,) each, in place of older ones; all or none, and on the disk when this returns.

        ``images``: the rows' images, for a journal that keeps images. ``seconds``: how long scoring one sample took. An evaluation
        fills its last batch up with the last task, so rows can share a place; the first of them is kept.
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
        """Delete the rows of a split and step that miss one of these columns, so that they are scored again."""
        names = list(columns)
        with self.database.writing() as connection:
            kept = connection.execute("SELECT group_id, slot, scores FROM samples WHERE split = ? AND step = ?", (split, step))
            missing = [(split, step, group, slot) for group, slot, given in kept.fetchall() if _misses(decode_scores(given), names)]
            connection.executemany("DELETE FROM samples WHERE split = ? AND step = ? AND group_id = ? AND slot = ?", missing)

    def _kept(self, rows: Sequence[JournalRow]) -> dict[JournalRow, dict[str, float]]:
        """What this judge scored in the rows' split, step and range of groups, where all scores are finite."""
        if not rows:
            return {}
        (split, step), *others = {row[:2] for row in rows}
        assert not others, "the rows of one batch"
        query = (
            "SELECT split, step, group_id, slot, task, picture, written, scores FROM samples "
            "WHERE split = ? AND step = ? AND group_id BETWEEN ? AND ? AND judge = ?"
        )
        groups = [row.group for row in rows]
        with self.database.reading() as connection:
            found = connection.execute(query, (split, step, min(groups), max(groups), self.judge)).fetchall()
        decoded = ((JournalRow(*row), decode_scores(scores)) for *row, scores in found)
        return {row: scores for row, scores in decoded if all_finite(scores)}


def _misses(scores: Mapping[str, float], names: Iterable[str]) -> bool:
    return any(name in scores and scores[name] != scores[name] for name in names)
