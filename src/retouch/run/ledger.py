"""One rank's ledger of a training run: the file that holds every score, and every answer of a judge or a reward server.

And the identity of a run: the content of its tasks and its base weights, with which a resumed run is compared.

The ledger is opened before the rewards are built, so that calls to judges and reward servers go through its cache of answers.
"""

import json
import logging
import re
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import astuple
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from retouch.config import wings
from retouch.data.base import DataSets
from retouch.distributed.ranks import Ranks
from retouch.protocols import Reward
from retouch.records import files
from retouch.records.folder import RunFolder
from retouch.rewards.identity import changed_keys, changes, describe, fingerprint, remember_run, short
from retouch.rewards.judging import RewardScorer
from retouch.rewards.ledger.database import Database, ImageStore, JudgeUsage, image_hash, ledger_files, open_read_only, read_usage
from retouch.rewards.ledger.journal import Journal
from retouch.types import Codes, Json, Task

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

log = logging.getLogger("retouch")
SHOWN = 5
"""The most lines of a message about changed data."""


class Ledger:
    """The ledger of one rank in the folder ``run``.

    ``keep_images``: store every image that is scored. ``new_judge``: whether the run may continue with a different reward from the
    one that it began with. Raises ValueError if the file is damaged or was written by another version.
    """

    def __init__(self, run: Path, ranks: Ranks, *, keep_images: bool, new_judge: bool) -> None:
        self._ranks = ranks
        self._new_judge = new_judge
        self._images = ImageStore(run) if keep_images else None
        path = ledger_path(run, ranks.rank)
        self.is_new = not path.exists()
        self._database = Database(path)
        self._run = run
        self._usage: dict[Path, tuple[JudgeUsage, int]] = {}
        self._described: tuple[Reward, dict[str, Json]] | None = None

    @cached_property
    def cache(self) -> Any:
        """The cache of the answers of judges and reward servers (``retouch_judge/cache.py``)."""
        return wings.load("part.answer_cache")(self._database)

    def cached(self, reward: Reward) -> Reward:
        """Return the reward with its calls to judges and reward servers cached in the ledger; other rewards are unchanged."""
        if not any(hasattr(reward, name) for name in ("panel", "submit_with_stats")):
            return reward
        cached: Reward = wings.load("part.with_cache")(reward, self.cache)
        return cached

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
        # The description of a judge may be completed (``changes`` ignores what is new in it): its scores keep their fingerprint.
        key = last[0] if last is not None and same else short(about)
        if not same:
            with self._database.writing() as connection:
                connection.execute("INSERT INTO judges (fingerprint, about, since) VALUES (?, ?, ?)", (key, text, since))
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
            named = re.fullmatch(r"ledger(?:\.rank([1-9][0-9]*))?\.sqlite", path.name)
            if path == own or named is None:  # a file with another name is a copy, for example
                continue
            rank = int(named[1] or 0)
            if rank == self._ranks.rank or (self._ranks.is_main and rank >= self._ranks.world):
                with suppress(ValueError, sqlite3.Error):  # a statistic must not stop the run
                    self._add_usage(path, closing(open_read_only(path)))
        mine = sum((used for used, _ in self._usage.values()), JudgeUsage())
        total = JudgeUsage(*self._ranks.sum(torch.tensor(astuple(mine), dtype=torch.float64)).tolist())
        found = {
            "judge/requests": total.requests,
            "judge/retries": total.retries,
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


def record_identity(folder: RunFolder, weights: Mapping[str, str], sets: Sequence[DataSets]) -> None:
    """Store what the run is started with. ``weights``: the result of ``frozen_hashes``."""
    folder.require_owner()
    files.write_json(folder.identity, {"weights": weights, **_data(sets)})


def stored_identity(folder: RunFolder) -> Mapping[str, Any]:
    """Read what ``record_identity`` stored; empty if the file is missing. Raises ValueError for a damaged file."""
    found = files.read_record(folder.identity) if folder.identity.exists() else {}
    if not isinstance(found, dict) or not all(isinstance(part, dict) for part in found.values()):
        raise ValueError(f"{folder.identity} was changed: restore it from a backup, or start over with --fresh")
    return found


def require_same_data(folder: RunFolder, sets: Sequence[DataSets], ranks: Ranks) -> None:
    """Raise ValueError, on every rank, if the content of the training rows or of the held-out tasks is not as at the start."""
    before = stored_identity(folder)
    changed = []
    if not before:
        log.warning("%s is missing: whether the data and the base weights are the same cannot be checked", folder.identity)
    elif ranks.is_main:
        now = _data(sets)
        known = {key: value for key, value in before["data"].items() if key in now["data"]}  # a check may decode fewer rows
        changed = [f"the training data: {line}" for line in changed_keys(known, {key: now["data"][key] for key in known})]
        changed += changed_tasks(before["tasks"], now["tasks"])
    if ranks.any(bool(changed)):
        more = [f"and {len(changed) - SHOWN} more"] if len(changed) > SHOWN else []
        raise ValueError(
            "the data are not those that the run began with:\n  "
            + "\n  ".join([*changed[:SHOWN], *more] or ["the message of rank 0 says how"])
            + "\nScores before and after could not be compared. Restore the data, give this run another name, or start over with "
            "--fresh (in Python: train(fresh=True)), which renames its folder"
        )


def require_same_weights(folder: RunFolder, weights: Mapping[str, str], ranks: Ranks | None = None) -> None:
    """Raise ValueError, on every rank, if a part has other frozen weights than at the start of the run. ``weights``: the result of
    ``frozen_hashes``; parts that are not loaded are not compared."""
    before = stored_identity(folder).get("weights", {})
    changed = [name for name, digest in weights.items() if before.get(name, digest) != digest]
    if bool(changed) if ranks is None else ranks.any(bool(changed)):
        raise ValueError(
            f"the base weights are not those of the run in {folder.root}: {', '.join(changed) or 'on another rank'} differs. Give "
            "the model that the run was trained on (from Python, also to load_run: model=...), or restore its files; a new run "
            "starts with another name, or with --fresh"
        )


def task_content(task: Task) -> dict[str, str]:
    """A hash of each field of a task that a model or a judge may see; its id and its source are not part of its content.

    An image is hashed as it was decoded and resized, so another file with the same pixels is the same. Images that a model decodes
    from tokens are left out, because their tokens are in ``meta``.
    """
    images = {} if Codes.SOURCE in task.meta else {f"source image {place}": each for place, each in enumerate(task.images, 1)}
    target = {} if Codes.TARGET in task.meta else {"target": task.target}
    pair = {"chosen image": task.chosen, "rejected image": task.rejected}
    images |= {name: each for name, each in {"mask": task.mask, "reference": task.reference, **target, **pair}.items() if each}
    values = {"instruction": task.instruction, "text": task.text, "tags": dict(task.tags), "columns": dict(task.meta)}
    return {name: image_hash(image)[:16] for name, image in images.items()} | {key: short(each) for key, each in values.items()}


def changed_tasks(before: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]) -> list[str]:
    """One line for each held-out task whose content differs; none if only the order or the ids differ."""
    if sorted(map(short, before.values())) == sorted(map(short, now.values())):
        return []
    lines = [f"the held-out task {line}" for line in changed_keys(dict.fromkeys(before), dict.fromkeys(now))]
    for name in before.keys() & now.keys():
        lines += [f"the held-out task {name}: {line}" for line in changed_keys(before[name], now[name])]
    return sorted(lines)


def _data(sets: Sequence[DataSets]) -> dict[str, Any]:
    phases = [f" of phase {place}" if place else "" for place in range(len(sets))]
    content = {f"{key}{phase}": value for phase, each in zip(phases, sets, strict=True) for key, value in each.content.items()}
    heldout = sets[0].heldout
    return {"data": content, "tasks": {task.id: task_content(task) for task in (heldout[i] for i in range(len(heldout)))}}
