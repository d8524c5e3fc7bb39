"""Monitors of a run: they score images of held-out tasks every few steps, measure every step, and raise alarms.

Everything that an alarm depends on is stored: the observations, one file each, and the metrics. Scores of judges are in the run's
journal. So an observation that is repeated after a kill calls no judge twice, and a resumed run raises the same alarms.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from retouch.config import wings
from retouch.core.intervals import MeanEstimate, estimate_mean
from retouch.distributed.ranks import Ranks
from retouch.protocols import Reward
from retouch.recipe.keys import Diversity, Factor, HeldOutJudge, Shift, Watch
from retouch.recipe.recipe import Recipe
from retouch.records import files
from retouch.records.folder import RunFolder
from retouch.rewards.judging import CLOSE_SECONDS, BatchScorer, RewardScorer, ScoredBatch
from retouch.rewards.pixels import AppearanceReward, to_tensor
from retouch.rewards.worker import WorkerThread, close_all
from retouch.run.build import Assembly
from retouch.run.evaluation import EVALUATION_STEP, build_evaluator, column_of
from retouch.run.hooks import Alarm, Hook, StepResult
from retouch.run.ledger import Ledger
from retouch.run.step import ScoredRollout, wait_for_chunks
from retouch.types import Batch, Column, Sample, Scores


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """The measurements after ``step`` steps.

    ``scores``: by name, one score per task (n,), NaN if it could not be measured. ``canaries``: by reward column, the scores (k,)
    of the canary images. ``judge``: the fingerprint of the held-out judge, or "". ``sources``: the source of each task; empty if no
    tasks share a source.
    """

    step: int
    tasks: tuple[str, ...]
    scores: Scores
    canaries: Scores = field(default_factory=dict)
    judge: str = ""
    sources: tuple[str, ...] = ()

    def mean(self, name: str) -> float:
        """Return the mean over the tasks with a score."""
        return self.scores[name].double().nanmean().item()

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "judge": self.judge,
            "tasks": list(self.tasks),
            **({"sources": list(self.sources)} if self.sources else {}),
            "scores": {name: column.tolist() for name, column in self.scores.items()},
            "canaries": {name: column.tolist() for name, column in self.canaries.items()},
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Observation":
        """Read the result of ``to_json``."""
        scores, canaries = (
            {name: column_of(each, torch.float32) for name, each in record[part].items()} for part in ("scores", "canaries")
        )
        return cls(record["step"], tuple(record["tasks"]), scores, canaries, record["judge"], tuple(record.get("sources", ())))


def paired_change(before: Observation, after: Observation, name: str) -> MeanEstimate:
    """Estimate the mean change of the scores ``name`` over the tasks that both observations scored."""
    change = (after.scores[name] - before.scores[name]).double().tolist()
    return estimate_mean(change, after.sources or [""] * len(change))


def read_observations(folder: Path, step: int) -> list[Observation]:
    """Return the observations that are stored in ``folder`` up to and including ``step``, in order."""
    found = [Observation.from_json(files.read_record(path)) for path in folder.glob("step-*.json")]
    return sorted((each for each in found if each.step <= step), key=lambda each: each.step)


def find_alarms(
    watch: Watch, observations: Sequence[Observation], diversity: Sequence[float], columns: Mapping[str, Column]
) -> list[Alarm]:
    """Return the alarms at the last observation. The first observation was made before training.

    ``diversity``: the group diversity of every step so far. ``columns``: the reward's columns, in which the canaries are scored.
    """
    found: dict[str, str] = {}  # every comparison is false for NaN, so what could not be measured raises no alarm
    for name, rule in watch.rules.items():
        match rule:
            case HeldOutJudge():
                best, proxy, heldout = since_best(observations)
                if heldout.sigmas < -rule.sigmas and proxy.mean >= 0:
                    found[name] = (
                        f"the reward and the held-out judge diverge: since step {best.step} the mean score of the held-out judge "
                        f"fell by {-heldout.mean:.3g} ({-heldout.sigmas:.1f} standard errors), while the mean reward rose by "
                        f"{proxy.mean:.3g}"
                    )
            case Diversity():
                ratio, window = diversity_ratio(diversity, rule.window), rule.window
                if ratio < rule.limit:
                    found[name] = (
                        f"the images of a group become alike: their difference is {ratio:.0%} of that in the first {window} steps"
                    )
            case Factor():
                start, now = _means(name, observations)
                if now > start * rule.limit or now < start / rule.limit:
                    found[name] = f"the {name} of the images has changed: from {start:.3g} at the start to {now:.3g}"
            case Shift():
                start, now = _means(name, observations)
                kept = name == "preservation"
                if (start - now if kept else abs(now - start)) > rule.limit:
                    what = "the source outside the mask is no longer preserved" if kept else f"the images' {name} has changed"
                    found[name] = f"{what}: from {start:.3f} at the start to {now:.3f}"
    if watch.canaries is not None:
        column, shift = canary_shift(observations[-1], observations[0], columns)
        if shift > watch.canaries.limit:
            found["canaries"] = (
                "the judge itself has changed: the same images get other scores than at the start, "
                f"{column} by {shift:.1%} of its range"
            )
    if watch.text is not None:
        start, now = _means("text_to_judge", observations)
        if now - start > watch.text.limit:
            found["text"] = f"{now:.0%} of the images contain text that addresses a judge, {start:.0%} at the start"
    return [Alarm(name, text, watch.rules[name].on_alarm) for name, text in found.items()]


def since_best(observations: Sequence[Observation]) -> tuple[Observation, MeanEstimate, MeanEstimate]:
    """Return the observation with the best held-out score, and the changes of the training reward and of the held-out score since.

    Source: the signature of reward over-optimisation (Gao et al. 2022, arXiv 2210.10760).
    """
    best = max(observations, key=lambda each: -math.inf if math.isnan(each.mean("heldout")) else each.mean("heldout"))
    now = observations[-1]
    proxy, heldout = (paired_change(best, now, name) for name in ("proxy", "heldout"))
    return best, proxy, heldout


def canary_shift(observation: Observation, start: Observation, columns: Mapping[str, Column]) -> tuple[str, float]:
    """Return the column whose canary scores changed most since ``start``, and its mean absolute change as a fraction of its range.

    The change is NaN if no canary has a score in both observations.
    """
    shifts = {}
    for name, scores in observation.canaries.items():
        width = columns[name].high - columns[name].low
        shift = (scores - start.canaries[name]).abs().double().nanmean().item() / width
        if not math.isnan(shift):
            shifts[name] = shift
    return max(shifts.items(), key=lambda item: item[1]) if shifts else ("", math.nan)


def diversity_ratio(diversity: Sequence[float], window: int) -> float:
    """Return the mean of the last ``window`` steps divided by the mean of the first ``window``; NaN before 2 * ``window`` steps."""
    known = [value for value in diversity if not math.isnan(value)]
    if len(known) < 2 * window:
        return math.nan
    first = math.fsum(known[:window])
    return math.fsum(known[-window:]) / first if first > 0 else math.nan


def _means(name: str, observations: Sequence[Observation]) -> tuple[float, float]:
    """Return the means of the first and the last observation over the tasks that both scored; NaN if there are none."""
    start, now = observations[0].scores[name].double(), observations[-1].scores[name].double()
    known = ~(start.isnan() | now.isnan())
    return start[known].mean().item(), now[known].mean().item()


_SIDE = 32


def build_measures(
    watch: Watch, *, device: torch.device | str, cached: Callable[[Reward], Reward] = lambda reward: reward
) -> tuple[RewardScorer | None, list[Reward]]:
    """Build the held-out judge of the recipe's ``watch``, None without one, and its rewards that ask no judge. ``cached``: wraps
    the judge in the ledger's cache.

    Raises ValueError if the held-out judge or the OCR model cannot be built.
    """
    section = None if watch.judge is None else watch.judge.reward
    heldout = None if section is None else RewardScorer(section.build(device=device, keep=cached), section.combine)
    return heldout, [AppearanceReward(), *([] if watch.text is None else [wings.load("reward.unrequested_text")()])]


def group_diversity(batch: Batch, images: Sequence[Image.Image | None], ranks: Ranks) -> float:
    """Return the root mean square difference, 0 to 1, of two images of a group, over all pairs of all groups and all ranks.

    Images are compared in RGB at 32 x 32 pixels (area-averaged), so content counts and fine detail does not. The mean squared
    difference of two images of a group is twice the group's sample variance, whose sums can be added over ranks. Rows without an
    image are left out; NaN if no group has two images.
    """
    groups = int(ranks.max(torch.tensor(float(max(batch.group_ids)))).item()) + 1
    sums = torch.zeros(groups, 2 + 3 * _SIDE * _SIDE, dtype=torch.float64)
    for group, image in zip(batch.group, images, strict=True):
        if image is not None:
            small = to_tensor(image.convert("RGB").resize((_SIDE, _SIDE), Image.Resampling.BOX)).flatten()
            sums[batch.group_ids[group]] += torch.cat([torch.ones(1, dtype=torch.float64), small.square().sum()[None], small])
    sums = ranks.sum(sums)
    sums = sums[sums[:, 0] > 1]
    count, squares, total = sums[:, 0], sums[:, 1], sums[:, 2:]
    variance = (squares - total.square().sum(dim=1) / count).clamp(min=0) / (count - 1)
    pairs = count * (count - 1)
    return float(((2 * variance / total.shape[1] * pairs).sum() / pairs.sum()).sqrt())


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
        self.heldout, self.measures = build_measures(self.watch, device=ranks.device, cached=ledger.cached)
        self.rolls_back = self.watch.rolls_back
        self._folder = folder
        self._ledger = ledger
        self._observations: list[Observation] = []
        self._diversity: list[float] = []

    def attach(self, parts: Assembly) -> None:
        self._clock = parts.clock
        self._judge = parts.judge
        self._columns = parts.judge.reward.columns
        self.policy = parts.policy(parts.recipe.rollout)
        evaluator = build_evaluator(parts, parts.judge.for_split("heldout", 0))
        canaries = 0 if self.watch.canaries is None else self.watch.canaries.count
        self.evaluator = replace(evaluator, tasks=evaluator.tasks[: self.watch.tasks], pictures=canaries)

    def stored_alarms(self, step: int) -> list[Alarm]:
        """Return the alarms that the current rules raise on the stored observations after ``step`` steps."""
        observations = read_observations(self._folder.watch, step)
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
        if self.heldout is not None:
            self._ledger.attach_heldout(self.heldout)
        self._observations = read_observations(self._folder.watch, step)
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
                step.alarms += alarms
                for name in observation.scores:  # without the measures that have no score for any image
                    if name in ("proxy", "heldout") or not math.isnan(observation.mean(name)):
                        step.metrics[f"watch/{name}"] = observation.mean(name)
                if "heldout" in observation.scores:
                    step.metrics["watch/heldout_missing"] = observation.scores["heldout"].isnan().double().mean().item()
                    step.metrics["watch/heldout_sigmas"] = since_best(self._observations)[2].sigmas
                if observation.canaries:
                    shift = canary_shift(observation, self._observations[0], self._judge.reward.columns)[1]
                    step.metrics["watch/canary_shift"] = shift
                step.metrics |= {f"watch/alarm/{alarm.rule}": 1.0 for alarm in alarms}

    def close(self) -> None:
        if self.heldout is not None:
            self.heldout.close()

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
        if not self._observations and self.ranks.is_main and evaluated.images:
            # The first images of the main rank become the canaries, with the completions that they were made from.
            self._folder.watch.mkdir(parents=True, exist_ok=True)
            present = [(index, image) for index, image in enumerate(evaluated.images) if image is not None]
            for index, image in present:
                files.write_png(self._canary(index), image)
            files.write_json(self._folder.watch / "canaries.json", {index: evaluated.texts[index] for index, _ in present})
        tasks = tuple(task.id for task in evaluated.tasks)
        sources = tuple(evaluated.sources) if evaluated.has_shared_sources else ()
        observation = Observation(step, tasks, evaluated.scores, self._score_canaries(step), self._fingerprint, sources)
        if self.ranks.is_main:
            self._folder.watch.mkdir(parents=True, exist_ok=True)
            files.write_json(self._folder.watch / f"step-{step:06d}.json", observation.to_json())
        self._observations.append(observation)
        return observation

    def _judges(self, step: int, executor: WorkerThread) -> BatchScorer:
        """Return the scorer of an observation: ``proxy`` (training reward), ``heldout`` (held-out judge) and all measures."""

        def score(batch: Batch, samples: Sequence[Sample]) -> "Future[ScoredBatch]":
            futures = {"proxy": self._judge.for_split("heldout", step)(batch, samples)}
            if self.heldout is not None:
                futures["heldout"] = self.heldout.for_split("watch", step)(batch, samples)
            return executor.submit(joined, samples, futures)

        def joined(samples: Sequence[Sample], futures: "Mapping[str, Future[ScoredBatch]]") -> ScoredBatch:
            measured: Scores = {}
            rows = [row for row, sample in enumerate(samples) if sample.image is not None]
            for reward in self.measures:
                columns = reward([samples[row] for row in rows])
                for name in reward.columns:  # NaN for a sample without an image
                    measured[name] = torch.full((len(samples),), torch.nan)
                    measured[name][rows] = columns[name]
            scores = {name: future.result().rewards for name, future in futures.items()}
            return ScoredBatch({**scores, **measured}, scores["proxy"], 0)

        return score

    @property
    def _fingerprint(self) -> str:
        return "" if self.heldout is None or self.heldout.journal is None else self.heldout.journal.judge

    def _score_canaries(self, step: int) -> Scores:
        """Score the canaries again on the main rank. Returns the reward's columns (except diagnostics) on all ranks."""
        names = [name for name, column in self._judge.reward.columns.items() if not column.diagnostic]
        indices: tuple[int, ...] = ()
        samples: list[Sample] = []
        if self.ranks.is_main and self.watch.canaries is not None:
            texts = {int(index): text for index, text in files.read_record(self._folder.watch / "canaries.json").items()}
            for index, text in texts.items():
                with files.open_file(self._canary(index)) as file, Image.open(file) as stored:
                    samples.append(Sample(self.evaluator.tasks[index], stored.convert("RGB"), completion=text))
            indices = tuple(texts)
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

    def _canary(self, index: int) -> Path:
        return self._folder.watch / f"canary-{index:03d}.png"


def read_diversity(folder: RunFolder, done: int) -> list[float]:
    """Read the group diversity of every step up to ``done`` from the metrics; NaN for a step without a value."""
    values = [line.get("watch/diversity") for line in folder.read_metrics() if line["step"] <= done]
    return [math.nan if value is None else value for value in values]
