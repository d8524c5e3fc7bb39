"""Watches a run for reward hacking: looks at held-out pictures every so often, measures every step, and raises alarms.

All that decides an alarm is kept: the looks, a file each, and the metrics. Judges of a look are asked through the run's journal, so
a look that is made again after a kill asks nobody twice, and the alarms are those of a run that was left alone.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from retouch.assembly.assembly import Assembly
from retouch.recipe.watch import Watch
from retouch.records import files
from retouch.records.folder import RunFolder
from retouch.rewards.judging import Judge, JudgeBatch, ScoredBatch
from retouch.training.evaluation import EVALUATION_STEP, Evaluator
from retouch.training.ledger import Ledger
from retouch.training.loop import Collected, Metrics, wait_for_chunks
from retouch.types import Batch, Sample, Scores
from retouch.watch.alarms import Raised, canary_shift, raised, since_best
from retouch.watch.diversity import group_diversity
from retouch.watch.looks import Look, Looks
from retouch.watch.watchers import Watchers

log = logging.getLogger("retouch")


class Watcher:
    """Looks, measures and keeps. Every rank makes the same calls; the first writes.

    ``evaluator``: of the run's held-out tasks. ``policy``: what makes the pictures. ``open`` it before anything is seen.
    """

    def __init__(self, watch: Watch, folder: RunFolder, *, evaluator: Evaluator, watchers: Watchers, policy: Any) -> None:
        self.watch = watch
        self.watchers = watchers
        self.policy = policy
        canaries = 0 if watch.canaries is None else watch.canaries.count
        self.evaluator = replace(evaluator, tasks=evaluator.tasks[: watch.tasks], pictures=canaries)
        self.ranks = evaluator.ranks
        self._folder = folder
        self._files = Looks(folder.watch)
        self._looks: list[Look] = []
        self._diversity: list[float] = []

    def open(self, ledger: Ledger, judge: Judge, *, done: int) -> None:
        """Take up what was seen in ``done`` steps, with which the metrics end; a run that has seen nothing takes its first look.

        ``judge``: what trains. ValueError where the held-out judge is another one than the looks were made with.
        """
        self._ledger = ledger
        self._judge = judge
        if self.watchers.heldout is not None:
            ledger.attach_heldout(self.watchers.heldout)
        self._looks = self._files.until(done)
        if any(look.judge != self._fingerprint for look in self._looks):
            raise ValueError(
                f"the held-out judge is not the one that made the looks in {self._folder.watch}, so they could not be compared: "
                "bring it back, or start anew with --fresh"
            )
        self._diversity = kept_diversity(self._folder, done)
        if not self._looks or (done % self.watch.every == 0 and self._looks[-1].step < done):  # a spent budget left one out
            self._look(done)

    def after(self, done: int, collected: Collected) -> tuple[Metrics, list[Raised]]:
        """Watch what a step collected, and look where one is due: metrics for the step's line, and the alarms."""
        metrics: Metrics = {}
        if len(collected.images):
            self._diversity.append(group_diversity(collected.batch, collected.images, self.ranks))
            metrics["watch/diversity"] = self._diversity[-1]
        if done % self.watch.every:
            return metrics, []
        look = self._look(done)
        found = raised(self.watch, self._looks, self._diversity, self._judge.reward.columns)
        for one in found:
            log.warning("ALARM at step %d: %s", done, one.text)
        return {**metrics, **self._figures(look), **{f"watch/alarm/{one.rule}": 1.0 for one in found}}, found

    def _look(self, step: int) -> Look:
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="watch") as joining:
            evaluated = replace(self.evaluator, judge=self._at(step, joining))(self.policy)
        if not self._looks:
            self._keep_canaries(evaluated.images, evaluated.texts)
        tasks = tuple(task.id for task in evaluated.tasks)
        look = Look(step, tasks, evaluated.scores, self._canaries(step), self._fingerprint)
        if self.ranks.is_main:
            self._files.write(look)
        self._looks.append(look)
        return look

    def _at(self, step: int, joining: ThreadPoolExecutor) -> JudgeBatch:
        """What is seen of pictures after so many steps: ``proxy`` and ``heldout``, the two judges' numbers, and every measure."""

        def see(batch: Batch, samples: Sequence[Sample]) -> "Future[ScoredBatch]":
            asked = {"proxy": self._judge.for_split("heldout", step)(batch, samples)}
            if self.watchers.heldout is not None:
                asked["heldout"] = self.watchers.heldout.for_split("watch", step)(batch, samples)
            return joining.submit(self._joined, samples, asked)

        return see

    def _joined(self, samples: Sequence[Sample], asked: "Mapping[str, Future[ScoredBatch]]") -> ScoredBatch:
        measured = self.watchers.measured(samples)
        scores = {name: future.result().rewards for name, future in asked.items()}
        return ScoredBatch({**scores, **measured}, scores["proxy"], 0)

    @property
    def _fingerprint(self) -> str:
        heldout = self.watchers.heldout
        return "" if heldout is None or heldout.journal is None else heldout.journal.judge

    def _keep_canaries(self, images: Sequence[Image.Image | None], texts: Sequence[str | None]) -> None:
        """The first rank's first pictures, the only ones that are kept as such, and what was written for them."""
        if self.ranks.is_main and images:
            self._folder.watch.mkdir(parents=True, exist_ok=True)
            drawn = [(place, image) for place, image in enumerate(images) if image is not None]
            for place, image in drawn:
                image.save(self._canary(place))
            files.write_json(self._folder.watch / "canaries.json", {place: texts[place] for place, _ in drawn})

    def _canaries(self, step: int) -> Scores:
        """The reward's scores of the kept pictures, asked anew by the first rank and told to all; diagnostics are left out."""
        names = [name for name, column in self._judge.reward.columns.items() if not column.diagnostic]
        places, samples = self._kept_canaries() if self.ranks.is_main and self.watch.canaries is not None else ((), [])
        count = int(self.ranks.max(torch.tensor(float(len(samples)))))
        asked = []
        with self._ledger.cache.bypass():
            if samples:
                rows = tuple(range(len(samples)))
                tasks = tuple(sample.task for sample in samples)
                batch = Batch(seed=0, step=EVALUATION_STEP, tasks=tasks, group_ids=places, group=rows, slot=(0,) * len(samples))
                asked = [self._judge.for_split("canary", step)(batch, samples)]
            said = wait_for_chunks(self.ranks, asked)
        table = torch.zeros(len(names), count)
        for judged in said:
            table = torch.stack([judged.scores[name] for name in names])
        return dict(zip(names, self.ranks.sum(table), strict=True)) if count else {}

    def _kept_canaries(self) -> tuple[tuple[int, ...], list[Sample]]:
        """Places among the tasks, and the pictures that were made there at the start."""
        kept = {int(place): text for place, text in files.read_json(self._folder.watch / "canaries.json").items()}
        tasks = self.evaluator.tasks
        pictures = [Sample(tasks[place], _read(self._canary(place)), completion=text) for place, text in kept.items()]
        return tuple(kept), pictures

    def _canary(self, place: int) -> Path:
        return self._folder.watch / f"canary-{place:03d}.png"

    def _figures(self, look: Look) -> Metrics:
        """What a look says, as metrics; measures that apply to no picture are left out."""
        means = {name: look.mean(name) for name in look.scores}
        figures = {f"watch/{name}": mean for name, mean in means.items() if not math.isnan(mean) or name in ("proxy", "heldout")}
        if "heldout" in look.scores:
            figures["watch/heldout_missing"] = look.scores["heldout"].isnan().double().mean().item()
            figures["watch/heldout_sigmas"] = since_best(self._looks)[2].sigmas
        if look.canaries:
            figures["watch/canary_shift"] = canary_shift(look, self._looks[0], self._judge.reward.columns)[1]
        return figures


def watcher_of(parts: Assembly, folder: RunFolder, watchers: Watchers) -> Watcher:
    """The watcher of a run whose recipe has a ``watch``."""
    assert parts.recipe.watch is not None
    return Watcher(
        parts.recipe.watch,
        folder,
        evaluator=parts.evaluator(parts.judge.for_split("heldout", 0)),
        watchers=watchers,
        policy=parts.policy(parts.recipe.rollout),
    )


def kept_diversity(folder: RunFolder, done: int) -> list[float]:
    """The diversity of every step up to ``done``, as the metrics have it; NaN where a step had none."""
    values = [line.get("watch/diversity") for line in folder.read_metrics() if line["step"] <= done]
    return [math.nan if value is None else value for value in values]


def _read(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")
