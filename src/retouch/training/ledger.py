"""A rank's ledger while the run goes on: opened before the judge is built, so that it stands between the run and whoever judges."""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from retouch.distributed.ranks import Ranks
from retouch.protocols import Reward
from retouch.records.kept_images import KeptPictures
from retouch.rewards import identity
from retouch.rewards.judging import Judge
from retouch.rewards.ledger.answers import Answers
from retouch.rewards.ledger.database import Database
from retouch.rewards.ledger.keeping import remembered
from retouch.training.journal import Journal, JournaledJudge
from retouch.types import Json

log = logging.getLogger("retouch")


class Ledger:
    """``run``: the run's folder. ``keep_images``: every picture that is judged stays. ``new_judge``: the run may go on with another
    judge than it had. ValueError: the file is damaged, or another version's.
    """

    def __init__(self, run: Path, ranks: Ranks, *, keep_images: bool, new_judge: bool) -> None:
        self._ranks = ranks
        self._new_judge = new_judge
        self._pictures = KeptPictures(run) if keep_images else None
        self._database = Database(ledger_path(run, ranks.rank))
        self.answers = Answers(self._database)
        self.judged: JournaledJudge | None = None
        self._beside: list[JournaledJudge] = []

    def keep(self, reward: Reward) -> Reward:
        """A reward put behind the ledger, where it asks somebody."""
        return remembered(reward, self.answers)

    def meet(self, reward: Reward) -> None:
        """ValueError, on every rank, where this is another judge than the run had and nobody said that it may be."""
        known = self._last()
        changed = [] if known is None else list(_changes(known, identity.describe(reward)))
        if not self._ranks.any(bool(changed)):
            return
        told = "\n  ".join(changed) or "as another rank's message says"
        if not self._new_judge:
            raise ValueError(
                f"what judges is not what it was when the run began:\n  {told}\n"
                "Rewards before and after could not be compared. Bring the old judge back, start anew with --fresh, or go on with "
                "this one with --new-judge"
            )
        log.warning("from here on another judge, as --new-judge allows:\n  %s", told)

    def open(self, judge: Judge, *, since: int) -> JournaledJudge:
        """The judge with its journal; it is noted that it judges since the run had so many steps."""
        about = identity.describe(judge.reward)
        fingerprint = identity.short(about)
        if (last := self._last()) is None or identity.short(last) != fingerprint:
            with self._database.writing() as connection:
                row = (fingerprint, json.dumps(about, sort_keys=True), since)
                connection.execute("INSERT INTO judges (fingerprint, about, since) VALUES (?, ?, ?)", row)
        self.judged = JournaledJudge(judge, Journal(self._database, judge=fingerprint), pictures=self._pictures)
        return self.judged

    def beside(self, judge: Judge) -> JournaledJudge:
        """A judge that trains nothing, with its journal, in which it needs pages of its own."""
        made = JournaledJudge(judge, Journal(self._database, judge=identity.fingerprint(judge.reward)))
        self._beside.append(made)
        return made

    def close(self) -> None:
        """End the journals' threads and let go of the file; the judges are closed first."""
        for judged in (self.judged, *self._beside):
            if judged is not None:
                judged.close()
        self._database.close()

    def _last(self) -> dict[str, Json] | None:
        """What judged last; None in a new run."""
        with self._database.reading() as connection:
            row = connection.execute("SELECT about FROM judges ORDER BY number DESC LIMIT 1").fetchone()
        return None if row is None else json.loads(row[0])


def ledger_path(run: Path, rank: int) -> Path:
    """Where a rank keeps its ledger in a run's folder."""
    return run / ("ledger.sqlite" if rank == 0 else f"ledger.rank{rank}.sqlite")


def _changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """A line for each thing that is no more what it was."""
    for key in now:
        if was.get(key) == now[key]:
            continue
        if key == "source":
            yield f"the code of {now['class']} was changed"
        else:
            yield f"{key}: {was.get(key)} in the run, {now[key]} now"
