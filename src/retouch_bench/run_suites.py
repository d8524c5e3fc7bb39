"""Runs the suites of ``eval.suites`` on the policy during training, with the code and the file formats of `retouch bench`."""

import json
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retouch.distributed.ranks import Ranks
from retouch.recipe.keys import SuiteKeys
from retouch.recipe.recipe import Recipe
from retouch.records.folder import RunFolder
from retouch.run.build import Assembly
from retouch.run.hooks import Alarm, Hook, StepResult
from retouch.run.step import ScoredRollout
from retouch_bench.comparison import compared
from retouch_bench.images import ImageFolder, PolicyGenerator
from retouch_bench.kinds import find_suite
from retouch_bench.results import ALL, BenchmarkResult
from retouch_bench.running import Items, choose_items, make_images, own_image_keys, score
from retouch_bench.scoring import CountedClients, Scorer, choose_scorer
from retouch_judge.quota import Quota
from retouch_judge.short_audit import audit_judges

log = logging.getLogger("retouch")

_WINDOW = 10  # steps over which the training reward is averaged
_REWARD = "reward/mean"


@dataclass(frozen=True)
class OpenSuite:
    """A suite of the recipe with its items and its scorer. ``quotas``: the quotas of its judges, counted over the whole run."""

    keys: SuiteKeys
    scorer: Scorer
    items: Items
    quotas: dict[str, Quota] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The suite's name."""
        return self.scorer.suite.name

    def alarm(self, text: str) -> Alarm:
        """Return an alarm of this suite, with the response of the recipe."""
        return Alarm(f"suite {self.name}", text, self.keys.on_alarm)


def open_suites(recipe: Recipe, ranks: Ranks) -> list[OpenSuite]:
    """Read the items of the recipe's suites, and audit their judges if ``eval.audit`` is true, before any image is made.

    Raises ValueError, on every rank, if a suite, its data or its judge does not exist, a suite is named twice, or a judge fails its
    audit.
    """
    names = [keys.suite for keys in recipe.eval.suites]
    if len(set(names)) < len(names):
        raise ValueError(f"eval.suites: {names} names a suite twice; name each once")
    if recipe.sharding == "fsdp2" and ranks.world > 1:
        raise ValueError("eval.suites: ranks that share weights with fsdp2 cannot make different images; run `retouch bench` later")
    found = []
    for index, keys in enumerate(recipe.eval.suites):
        try:
            suite = find_suite(keys.suite, keys.options)
            judge = None if keys.judge is None else json.dumps(keys.judge)
            found.append(OpenSuite(keys, choose_scorer(suite, judge), choose_items(suite, keys.data, subset=keys.subset)))
        except ValueError as error:
            raise ValueError(f"eval.suites.{index}: {error}") from error
    for opened in found if recipe.eval.audit else ():
        audit_judges(opened.scorer.section, ranks=ranks, clients=CountedClients(ranks.device, opened.quotas), note=log.info)
    return found


class RunSuites(Hook):
    """Runs the suites of a run. Every rank makes and scores its share of the images; the main rank writes the results.

    Raises ValueError like ``open_suites``.
    """

    station = "measure"

    def __init__(self, recipe: Recipe, folder: RunFolder, ranks: Ranks) -> None:
        self._suites = open_suites(recipe, ranks)
        self._recipe = recipe
        self._folder = folder
        self.rolls_back = any(suite.keys.on_alarm == "roll_back" for suite in self._suites)

    def attach(self, parts: Assembly) -> None:
        self._parts = parts

    def after_step(self, step: StepResult, collected: ScoredRollout) -> None:
        """Run the suites that are due; the results are equal on all ranks. Raises the ValueErrors of the scorers, and BudgetSpent
        on every rank."""
        with self._parts.clock("suites"):
            for suite in self._due(step.step):
                line = self._run(suite, step.step, step.metrics)
                mean = line["table"][ALL][line["headline"]]["mean"]
                step.metrics[f"suite/{suite.name}"] = math.nan if mean is None else mean
                if line["alarm"] is not None:
                    step.metrics[f"watch/alarm/suite {suite.name}"] = 1.0
                    step.alarms.append(suite.alarm(line["alarm"]))

    def catch_up(self, step: int) -> Iterator[Alarm]:
        """Run the due suites that have no result after ``step`` steps, because the run was interrupted. First yields the alarms of
        the stored results, because the run may have been killed before it recorded the stop."""
        lines = [line for line in self._folder.read_suites() if line["step"] == step]
        done = {line["suite"] for line in lines}
        self._parts.ranks.barrier()  # all ranks read the results before the main rank writes one
        if any(line["alarm"] is not None for line in lines):
            yield from self.stored_alarms(step)
        for suite in self._due(step):
            if suite.name not in done and (text := self._run(suite, step, {})["alarm"]) is not None:
                yield suite.alarm(text)

    def stored_alarms(self, step: int) -> list[Alarm]:
        """Return the alarms that the recipe's current rules raise on the stored results after ``step`` steps."""
        results = {line["suite"] for line in self._folder.read_suites() if line["step"] == step}
        found = []
        for suite in self._suites:
            if suite.name in results:
                text = self._alarm(suite, step, self._stored(suite, step), {})
                found += [] if text is None else [suite.alarm(text)]
        return found

    def _due(self, step: int) -> list[OpenSuite]:
        ends = step in (0, self._parts.steps)
        return [suite for suite in self._suites if ends or (suite.keys.every and step % suite.keys.every == 0)]

    def _run(self, suite: OpenSuite, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        folder = self._path(suite, step)
        images, seed = ImageFolder(folder / "images", suite=suite.scorer.suite), self._recipe.eval.seed
        maker = PolicyGenerator(self._parts, {"model": f"{self._recipe.name}, step {step}"})
        places = own_image_keys(suite.scorer.suite, suite.items, self._parts.ranks)
        make_images(suite.scorer.suite, maker, places, images, seed=seed, note=log.debug)
        result = score(
            suite.scorer,
            suite.items,
            images,
            folder / "scores" / suite.scorer.name,
            model=maker.identity,
            seed=seed,
            ranks=self._parts.ranks,
            ledger=folder.parent,
            clients=CountedClients(self._parts.ranks.device, suite.quotas),
        )
        if result is not None:
            alarm = self._alarm(suite, step, result, metrics)
            name, table = result.about["headline"], {row: dict(cells) for row, cells in result.table.items()}
            self._folder.write_suite(
                step, suite.name, {"headline": name, "table": table, "missing": len(result.missing)}, alarm=alarm
            )
            cell = table[ALL][name]
            between = "" if cell["low"] is None else f" ({cell['low']:.3f} to {cell['high']:.3f})"
            shown = f"{name} {result.headline:.3f}{between}, {cell['n']} items"
            log.info("suite %s after step %d: %s", suite.name, step, shown)
            if alarm is not None:
                log.warning("ALARM at step %d: %s", step, alarm)
        self._parts.ranks.barrier()
        return next(line for line in self._folder.read_suites() if (line["step"], line["suite"]) == (step, suite.name))

    def _alarm(self, suite: OpenSuite, step: int, now: BenchmarkResult, metrics: Mapping[str, float]) -> str | None:
        """Return a message if the suite's score fell since its best result while the training reward did not; otherwise None."""
        earlier = [line for line in self._folder.read_suites() if line["suite"] == suite.name and line["step"] < step]
        means = {line["step"]: line["table"][ALL][line["headline"]]["mean"] for line in earlier}
        known = {at: mean for at, mean in means.items() if mean is not None and not math.isnan(mean)}
        if not known:
            return None
        best = max(known, key=lambda at: (suite.scorer.direction * known[at], at))
        change = fall(suite, self._stored(suite, best), now)
        rise = self._reward_change(best, step, metrics)
        if not (change.sigmas > suite.keys.sigmas and rise >= 0):
            return None
        return (
            f"the reward and the suite {suite.name} diverge: since step {best} its {now.about['headline']} has become worse by "
            f"{change.mean:.3g} ({change.sigmas:.1f} standard errors, {change.before:.3g} to {change.after:.3g}), while the mean "
            f"reward rose by {rise:.3g}"
        )

    def _reward_change(self, since: int, step: int, metrics: Mapping[str, float]) -> float:
        """Return the mean training reward of the last steps minus the mean of the steps up to ``since``; NaN if one is unknown.
        ``metrics``: the metrics of this step, if the run's folder does not store them yet."""
        lines = [*self._folder.read_metrics(), {"step": step, **metrics}]
        values = {line["step"]: line[_REWARD] for line in lines if line["step"] <= step and line.get(_REWARD) is not None}
        until = max(since, 1)
        before = [value for at, value in values.items() if until - _WINDOW < at <= until]
        after = [value for at, value in values.items() if step - _WINDOW < at <= step and at > until]
        return math.fsum(after) / len(after) - math.fsum(before) / len(before) if before and after else math.nan

    def _stored(self, suite: OpenSuite, step: int) -> BenchmarkResult:
        return BenchmarkResult.read(self._path(suite, step) / "scores" / suite.scorer.name)

    def _path(self, suite: OpenSuite, step: int) -> Path:
        return self._folder.root / "suites" / suite.name / f"step-{step:06d}"


@dataclass(frozen=True)
class Fall:
    """How much a suite's headline score became worse, over the items that both results have.

    It changed from ``before`` to ``after`` and became worse by ``mean``, which is ``sigmas`` standard errors of the paired
    difference. ``mean`` and ``sigmas`` are negative if the score became better, and NaN if unknown.
    """

    before: float
    after: float
    mean: float
    sigmas: float


def fall(suite: OpenSuite, before: BenchmarkResult, now: BenchmarkResult) -> Fall:
    """Compare two results of a suite. The standard error is computed from the paired bootstrap interval."""
    cell = compared(suite.scorer.suite, before, now)[1][now.about["headline"]]
    mean = -suite.scorer.direction * cell["difference"]
    if cell["low"] is None:
        return Fall(cell["a"], cell["b"], mean, math.nan)
    error = (cell["high"] - cell["low"]) / (2 * 1.96)
    return Fall(cell["a"], cell["b"], mean, mean / error if error > 0 else math.copysign(math.inf, mean) if mean else 0.0)
