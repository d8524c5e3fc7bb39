"""The watcher of a run: scores images of held-out tasks every few steps, measures every step, and raises alarms.

Everything that an alarm depends on is stored: the observations, one file each, and the metrics. Scores of judges are stored in the
run's journal, so an observation that is repeated after a kill calls no judge twice, and the alarms equal those of an uninterrupted
run.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image

from retouch.assembly.assembly import Assembly
from retouch.assembly.hooks import Alarm, Hook, StepResult
from retouch.distributed.ranks import Ranks
from retouch.recipe.recipe import Recipe
from retouch.records import files
from retouch.records.folder import RunFolder
from retouch.rewards.judging import CLOSE_SECONDS, BatchScorer, ScoredBatch
from retouch.rewards.worker import WorkerThread, close_all
from retouch.training.evaluation import EVALUATION_STEP
from retouch.training.ledger import Ledger
from retouch.training.loop import Metrics, ScoredRollout, wait_for_chunks
from retouch.types import Batch, Sample, Scores
from retouch.watch.alarms import canary_shift, find_alarms, since_best
from retouch.watch.measures import build_measures, group_diversity
from retouch.watch.observations import Observation, ObservationStore

log = logging.getLogger("retouch")


class Watcher(Hook):
    """Makes and stores the observations of a run whose recipe has a ``watch``. The main rank writes.

    Raises ValueError if the held-out judge or the OCR model cannot be built.
    """

    station = "measure"

    def __init__(self, recipe: Recipe, folder: RunFolder, ranks: Ranks, ledger: Ledger) -> None:
        assert recipe.watch is not None
        self.watch = recipe.watch
        self.ranks = ranks
        self.measures = build_measures(self.watch, device=ranks.device, cached=ledger.cached)
        self.rolls_back = self.watch.rolls_back
        self._folder = folder
        self._ledger = ledger
        self._store = ObservationStore(folder.watch)
        self._observations: list[Observation] = []
        self._diversity: list[float] = []

    def attach(self, parts: Assembly) -> None:
        self._clock = parts.clock
        self._judge = parts.judge
        self._columns = parts.judge.reward.columns
        self.policy = parts.policy(parts.recipe.rollout)
        evaluator = parts.evaluator(parts.judge.for_split("heldout", 0))
        canaries = 0 if self.watch.canaries is None else self.watch.canaries.count
        self.evaluator = replace(evaluator, tasks=evaluator.tasks[: self.watch.tasks], pictures=canaries)

    def stored_alarms(self, step: int) -> list[Alarm]:
        """Return the alarms that the current rules raise on the stored observations after ``step`` steps."""
        observations = self._store.until(step)
        if not observations or observations[-1].step != step:
            return []
        return find_alarms(self.watch, observations, read_diversity(self._folder, step), self._columns)

    def catch_up(self, step: int) -> Iterator[Alarm]:
        """Load the observations of the first ``step`` steps. A new run makes its first observation.

        The observation of this step is made here if it is missing, because the budget was spent during that step. Raises ValueError
        if another held-out judge made the stored observations.
        """
        # The run may have been killed after it saved this step and before it recorded the stop.
        yield from self.stored_alarms(step)
        if self.measures.heldout is not None:
            self._ledger.attach_heldout(self.measures.heldout)
        self._observations = self._store.until(step)
        if any(each.judge != self._fingerprint for each in self._observations):
            raise ValueError(
                f"the observations in {self._folder.watch} were made with another held-out judge and cannot be compared: restore "
                "that judge, or start a new run with --fresh"
            )
        self._diversity = read_diversity(self._folder, step)
        if not self._observations:
            self._observe(step)
        elif step % self.watch.every == 0 and self._observations[-1].step != step:
            self._observe(step)
            yield from self._alarms(step)

    def after_step(self, step: StepResult, collected: ScoredRollout) -> None:
        """Measure the samples of the step, and make an observation if it is due."""
        with self._clock("watch"):
            if len(collected.images):
                self._diversity.append(group_diversity(collected.batch, collected.images, self.ranks))
                # Set before the observation, which may spend the budget: later alarms depend on this measurement of every step.
                step.metrics["watch/diversity"] = self._diversity[-1]
            if step.step % self.watch.every == 0:
                observation = self._observe(step.step)
                alarms = self._alarms(step.step)
                step.metrics |= self._metrics(observation) | {f"watch/alarm/{alarm.rule}": 1.0 for alarm in alarms}
                step.alarms += alarms

    def close(self) -> None:
        self.measures.close()

    def _alarms(self, step: int) -> list[Alarm]:
        """Return and log the alarms of the newest observation, which was made after ``step`` steps."""
        alarms = find_alarms(self.watch, self._observations, self._diversity, self._columns)
        for alarm in alarms:
            log.warning("ALARM at step %d: %s", step, alarm.text)
        return alarms

    def _observe(self, step: int) -> Observation:
        executor = WorkerThread("watch")
        try:
            evaluated = replace(self.evaluator, judge=self._judges(step, executor))(self.policy)
        finally:
            close_all([executor], seconds=CLOSE_SECONDS)
        if not self._observations:
            self._write_canaries(evaluated.images, evaluated.texts)
        tasks = tuple(task.id for task in evaluated.tasks)
        sources = tuple(evaluated.sources) if evaluated.has_shared_sources else ()
        observation = Observation(step, tasks, evaluated.scores, self._score_canaries(step), self._fingerprint, sources)
        if self.ranks.is_main:
            self._store.write(observation)
        self._observations.append(observation)
        return observation

    def _judges(self, step: int, executor: WorkerThread) -> BatchScorer:
        """Return the scorer of an observation: ``proxy`` (training reward), ``heldout`` (held-out judge) and all measures."""

        def score(batch: Batch, samples: Sequence[Sample]) -> "Future[ScoredBatch]":
            futures = {"proxy": self._judge.for_split("heldout", step)(batch, samples)}
            if self.measures.heldout is not None:
                futures["heldout"] = self.measures.heldout.for_split("watch", step)(batch, samples)
            return executor.submit(self._join_scores, samples, futures)

        return score

    def _join_scores(self, samples: Sequence[Sample], futures: "Mapping[str, Future[ScoredBatch]]") -> ScoredBatch:
        measured = self.measures.measure(samples)
        scores = {name: future.result().rewards for name, future in futures.items()}
        return ScoredBatch({**scores, **measured}, scores["proxy"], 0)

    @property
    def _fingerprint(self) -> str:
        heldout = self.measures.heldout
        return "" if heldout is None or heldout.journal is None else heldout.journal.judge

    def _write_canaries(self, images: Sequence[Image.Image | None], texts: Sequence[str | None]) -> None:
        """Store the first images of the main rank as canaries, with the completions that they were made from."""
        if self.ranks.is_main and images:
            self._folder.watch.mkdir(parents=True, exist_ok=True)
            present = [(index, image) for index, image in enumerate(images) if image is not None]
            for index, image in present:
                files.write_png(self._canary(index), image)
            files.write_json(self._folder.watch / "canaries.json", {index: texts[index] for index, _ in present})

    def _score_canaries(self, step: int) -> Scores:
        """Score the canaries again on the main rank. Returns the reward's columns (except diagnostics) on all ranks."""
        names = [name for name, column in self._judge.reward.columns.items() if not column.diagnostic]
        indices, samples = self._read_canaries() if self.ranks.is_main and self.watch.canaries is not None else ((), [])
        count = int(self.ranks.max(torch.tensor(float(len(samples)))))
        futures = []
        with self._ledger.cache.bypass():
            if samples:
                rows = tuple(range(len(samples)))
                tasks = tuple(sample.task for sample in samples)
                batch = Batch(seed=0, step=EVALUATION_STEP, tasks=tasks, group_ids=indices, group=rows, slot=(0,) * len(samples))
                futures = [self._judge.for_split("canary", step)(batch, samples)]
            results = wait_for_chunks(self.ranks, futures)
        table = torch.zeros(len(names), count, dtype=torch.float64)  # on all ranks, whatever the judge returns
        for judged in results:
            table = torch.stack([judged.scores[name] for name in names]).to(table.dtype)
        return dict(zip(names, self.ranks.sum(table), strict=True)) if count else {}

    def _read_canaries(self) -> tuple[tuple[int, ...], list[Sample]]:
        """Return the canaries: the indices of their tasks, and the images that were made for these tasks at the start."""
        texts = {int(index): text for index, text in files.read_record(self._folder.watch / "canaries.json").items()}
        tasks = self.evaluator.tasks
        samples = [Sample(tasks[index], _read(self._canary(index)), completion=text) for index, text in texts.items()]
        return tuple(texts), samples

    def _canary(self, index: int) -> Path:
        return self._folder.watch / f"canary-{index:03d}.png"

    def _metrics(self, observation: Observation) -> Metrics:
        """Return the observation as metrics, without the measures that have no score for any image."""
        means = {name: observation.mean(name) for name in observation.scores}
        metrics = {f"watch/{name}": mean for name, mean in means.items() if not math.isnan(mean) or name in ("proxy", "heldout")}
        if "heldout" in observation.scores:
            metrics["watch/heldout_missing"] = observation.scores["heldout"].isnan().double().mean().item()
            metrics["watch/heldout_sigmas"] = since_best(self._observations)[2].sigmas
        if observation.canaries:
            metrics["watch/canary_shift"] = canary_shift(observation, self._observations[0], self._judge.reward.columns)[1]
        return metrics


def read_diversity(folder: RunFolder, done: int) -> list[float]:
    """Read the group diversity of every step up to ``done`` from the metrics; NaN for a step without a value."""
    values = [line.get("watch/diversity") for line in folder.read_metrics() if line["step"] <= done]
    return [math.nan if value is None else value for value in values]


def _read(path: Path) -> Image.Image:
    with files.open_file(path) as file, Image.open(file) as image:
        return image.convert("RGB")
