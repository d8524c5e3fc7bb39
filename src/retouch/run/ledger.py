"""One rank's ledger of a training run: the file that holds every score, and every answer of a judge or a reward server.

It is opened before the rewards are built, so that calls to judges and reward servers go through its cache of answers.
"""

import json
import logging
import re
import sqlite3
from contextlib import closing, suppress
from dataclasses import astuple
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from retouch.distributed.ranks import Ranks
from retouch.protocols import Reward
from retouch.rewards.identity import changes, describe, fingerprint, remember_run, short
from retouch.rewards.judging import RewardScorer
from retouch.rewards.ledger.database import Database, JudgeUsage, ledger_files, open_read_only, read_usage
from retouch.rewards.ledger.journal import Journal
from retouch.types import Json

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from retouch.rewards.ledger.answers import AnswerCache

log = logging.getLogger("retouch")


class Ledger:
    """The ledger of one rank in the folder ``run``.

    ``keep_images``: store every image that is scored. ``new_judge``: whether the run may continue with a different reward from the
    one that it began with. Raises ValueError if the file is damaged or was written by another version.
    """

    def __init__(self, run: Path, ranks: Ranks, *, keep_images: bool, new_judge: bool) -> None:
        self._ranks = ranks
        self._new_judge = new_judge
        self._images = None
        if keep_images:
            from retouch.rewards.ledger.database import ImageStore

            self._images = ImageStore(run)
        path = ledger_path(run, ranks.rank)
        self.is_new = not path.exists()
        self._database = Database(path)
        self._run = run
        self._usage: dict[Path, tuple[JudgeUsage, int]] = {}
        self._described: tuple[Reward, dict[str, Json]] | None = None

    @cached_property
    def cache(self) -> "AnswerCache":
        """The cache of the answers of judges and reward servers."""
        from retouch.rewards.ledger.answers import AnswerCache

        return AnswerCache(self._database)

    def cached(self, reward: Reward) -> Reward:
        """Return the reward with its calls to judges and reward servers cached in the ledger; other rewards are unchanged."""
        if not any(hasattr(reward, name) for name in ("panel", "submit_with_stats")):
            return reward
        from retouch.rewards.ledger.caching import with_cache

        return with_cache(reward, self.cache)

    def require_same_judge(self, reward: Reward) -> None:
        """Raise ValueError, on every rank, if the run began with a different reward and ``new_judge`` is False."""
        known, now = self._last(), describe(reward)
        changed = [] if known is None else list(changes(known[1], now))
        if known is None and "unknown" in now:
            log.warning("not noticed when this run resumes, because its content is not known: a change of %s", now["unknown"])
        if not self._ranks.any(bool(changed)):
            return
        listed = "\n  ".join(changed) or "another rank's message says how"
        if not self._new_judge:
            raise ValueError(
                f"the judge is not the one that the run began with:\n  {listed}\n"
                "Rewards before and after could not be compared. Restore the old judge, start over with --fresh, or continue with "
                "this one with --new-judge"
            )
        log.warning("the run goes on with another judge:\n  %s", listed)

    def attach(self, judge: RewardScorer, *, since: int) -> None:
        """Attach the journal to the training judge, and record in the ledger that it scores from step ``since`` on."""
        about, last = describe(judge.reward), self._last()
        self._described = judge.reward, about
        text = json.dumps(about, sort_keys=True)
        same = last is not None and not any(changes(last[1], about))
        # An earlier release may have described the same judge in other words: its scores are stored under the old fingerprint.
        key = last[0] if last is not None and same else short(about)
        change: tuple[str, tuple[str | int, ...]] | None = None
        if not same:
            change = "INSERT INTO judges (fingerprint, about, since) VALUES (?, ?, ?)", (key, text, since)
        elif last is not None and "inputs" in about and "inputs" not in last[1]:
            log.warning("the run began with an earlier release: whether the reward uses the same code and values cannot be checked")
            change = "UPDATE judges SET about = ? WHERE fingerprint = ?", (text, key)
        if change is not None:
            with self._database.writing() as connection:
                connection.execute(*change)
        judge.journal = Journal(self._database, judge=key, images=self._images)

    @property
    def judge_since(self) -> int:
        """The step after which the run's latest judge scores; 0 if the judge never changed."""
        with self._database.reading() as connection:
            return int(connection.execute("SELECT since FROM judges ORDER BY number DESC").fetchone()[0])

    def attach_heldout(self, judge: RewardScorer) -> None:
        """Attach a journal to a judge that only evaluates. It must use other splits than the training judge."""
        judge.journal = Journal(self._database, judge=fingerprint(judge.reward))

    def usage(self) -> dict[str, float]:
        """Return the requests, tokens and cost of all judges since the run began, by metric name, summed over all ranks.

        All ranks must call it. It includes the judges of benchmarks, and the ledgers of an earlier start with more ranks. Empty
        before the first request. ``judge/cost`` (in dollars) is present only if a price is known; ``judge/unpriced_requests``
        counts the requests that the cost does not include.
        """
        own = self._database.path
        self._add_usage(own, self._database.reading())
        for path in ledger_files(self._run):
            rank = rank_of(path)
            if path == own or rank is None:
                continue
            if rank == self._ranks.rank or (self._ranks.is_main and rank >= self._ranks.world):
                with suppress(ValueError, sqlite3.Error):  # a statistic must not stop the run
                    self._add_usage(path, closing(open_read_only(path)))
        mine = sum((used for used, _ in self._usage.values()), JudgeUsage())
        total = JudgeUsage(*self._ranks.sum(torch.tensor(astuple(mine), dtype=torch.float64)).tolist())
        found = {
            "judge/requests": total.requests,
            "judge/input_tokens": total.input_tokens,
            "judge/output_tokens": total.output_tokens,
            "judge/unpriced_requests": total.unpriced,
        }
        cost = {} if total.known_cost is None else {"judge/cost": total.known_cost}
        return {name: value for name, value in found.items() if value} | cost

    def close(self) -> None:
        """Close the file. Close the judges first: they may still be recording."""
        if self._described is not None:
            remember_run(*self._described)
        self._database.close()

    def _add_usage(self, path: Path, connecting: "AbstractContextManager[sqlite3.Connection]") -> None:
        """Add the answers that are new in a ledger file to its usage."""
        before, last = self._usage.get(path, (JudgeUsage(), 0))
        with connecting as connection:
            used, last = read_usage(connection, after=last)
        self._usage[path] = before + used, last

    def _last(self) -> tuple[str, dict[str, Json]] | None:
        """Return the fingerprint and the description of the run's latest judge; None in a new run."""
        with self._database.reading() as connection:
            row = connection.execute("SELECT fingerprint, about FROM judges ORDER BY number DESC LIMIT 1").fetchone()
        return None if row is None else (row[0], json.loads(row[1]))


def ledger_path(run: Path, rank: int) -> Path:
    """Return the path of a rank's ledger in a run's folder."""
    return run / ("ledger.sqlite" if rank == 0 else f"ledger.rank{rank}.sqlite")


def rank_of(ledger: Path) -> int | None:
    """Return the rank that wrote a ledger file; None if its name is not one of ``ledger_path`` (for example, a copy)."""
    named = re.fullmatch(r"ledger(?:\.rank([1-9][0-9]*))?\.sqlite", ledger.name)
    return None if named is None else int(named[1] or 0)
