"""The suites of a recipe's ``eval.suites``: run on the policy during training, with the code and the files of `retouch bench`."""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from retouch.assembly.assembly import Assembly
from retouch.benchmarks.comparison import compared
from retouch.benchmarks.image_files import ImageFolder
from retouch.benchmarks.kinds import find_suite
from retouch.benchmarks.models import PolicyMaker
from retouch.benchmarks.results import ALL, BenchmarkResult
from retouch.benchmarks.running import Items, choose_items, make_images, own_places, score
from retouch.benchmarks.scoring import Scorer, choose_scorer
from retouch.recipe.keys import SuiteKeys
from retouch.recipe.recipe import Recipe
from retouch.records.folder import RunFolder

log = logging.getLogger("retouch")

_WINDOW = 10  # steps over which the training reward is averaged
_REWARD = "reward/mean"


@dataclass(frozen=True)
class OpenSuite:
    """A suite of the recipe with its items and its scorer."""

    keys: SuiteKeys
    scorer: Scorer
    items: Items

    @property
    def name(self) -> str:
        """The suite's name."""
        return self.scorer.suite.name


def open_suites(recipe: Recipe, *, world: int) -> list[OpenSuite]:
    """The suites of the recipe, with their items read. ValueError: no such suite, data or judge, or a suite that is named twice."""
    names = [keys.suite for keys in recipe.eval.suites]
    if len(set(names)) < len(names):
        raise ValueError(f"eval.suites: {names} names a suite twice; name each once")
    if recipe.sharding == "fsdp2" and world > 1:
        raise ValueError("eval.suites: ranks that share weights with fsdp2 cannot make different images; run `retouch bench` later")
    found = []
    for index, keys in enumerate(recipe.eval.suites):
        try:
            suite = find_suite(keys.suite, keys.options)
            judge = None if keys.judge is None else json.dumps(keys.judge)
            found.append(OpenSuite(keys, choose_scorer(suite, judge), choose_items(suite, keys.data, subset=keys.subset)))
        except ValueError as error:
            raise ValueError(f"eval.suites.{index}: {error}") from error
    return found


class RunSuites:
    """Runs the suites of a run. Every rank makes its share of the images and scores them; the main rank writes."""

    def __init__(self, suites: Sequence[OpenSuite], recipe: Recipe, folder: RunFolder, parts: Assembly) -> None:
        self._suites = suites
        self._recipe = recipe
        self._folder = folder
        self._parts = parts

    def after(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Run the suites that are due after ``step`` steps. Returns their headlines, and alarms, as metrics of the step.

        ``metrics``: those of the step so far. Raises ValueError as the scorers do.
        """
        found: dict[str, float] = {}
        for suite in self._suites:
            every = suite.keys.every
            if step in (0, self._parts.steps) or (every and step % every == 0):
                found |= self._run(suite, step, metrics)
        return found

    def _run(self, suite: OpenSuite, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        folder = self._path(suite, step)
        images, seed = ImageFolder(folder / "images", suite=suite.scorer.suite), self._recipe.eval.seed
        maker = PolicyMaker(self._parts, {"model": f"{self._recipe.name}, step {step}"})
        places = own_places(suite.scorer.suite, suite.items, self._parts.ranks)
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
        )
        if result is None:
            return {}
        alarm = self.alarm(suite, step, result, metrics)
        table = {name: dict(cells) for name, cells in result.table.items()}
        self._folder.write_suite(
            step, suite.name, {"headline": result.about["headline"], "table": table, "missing": len(result.missing)}, alarm=alarm
        )
        log.info("suite %s after step %d: %s", suite.name, step, _sentence(result))
        if alarm is not None:
            log.warning("ALARM at step %d: %s", step, alarm)
        return {f"suite/{suite.name}": result.headline, **({} if alarm is None else {f"watch/alarm/suite {suite.name}": 1.0})}

    def alarm(self, suite: OpenSuite, step: int, now: BenchmarkResult, metrics: Mapping[str, float]) -> str | None:
        """A sentence, if the suite has fallen since its best result while the training reward has not."""
        earlier = [line for line in self._folder.read_suites() if line["suite"] == suite.name and line["step"] < step]
        means = {line["step"]: line["table"][ALL][line["headline"]]["mean"] for line in earlier}
        known = {at: mean for at, mean in means.items() if mean is not None}
        if not known:
            return None
        sign = suite.scorer.direction
        best = max(known, key=lambda at: (sign * known[at], at))
        before = BenchmarkResult.read(self._path(suite, best) / "scores" / suite.scorer.name)
        cell = compared(suite.scorer.suite, before, now)[1][now.about["headline"]]
        if cell["low"] is None or math.isnan(cell["difference"]):
            return None
        error = (cell["high"] - cell["low"]) / (2 * 1.96)
        fall = -sign * cell["difference"]
        rise = self._reward_change(best, step, metrics)
        if not (fall > suite.keys.sigmas * error and rise >= 0):
            return None
        return (
            f"the reward and the suite {suite.name} diverge: since step {best} its {now.about['headline']} has become worse by "
            f"{fall:.3g} ({cell['a']:.3g} to {cell['b']:.3g}), while the mean reward rose by {rise:.3g}"
        )

    def _reward_change(self, since: int, step: int, metrics: Mapping[str, float]) -> float:
        """The mean training reward of the last steps minus that of the steps around ``since``; NaN if one is not known."""
        lines = self._folder.read_metrics()
        values = {line["step"]: line[_REWARD] for line in lines if line["step"] < step and line.get(_REWARD) is not None}
        values[step] = metrics.get(_REWARD, math.nan)
        until = max(since, 1)
        before = [value for at, value in values.items() if until - _WINDOW < at <= until]
        after = [value for at, value in values.items() if step - _WINDOW < at <= step and at > until]
        return math.fsum(after) / len(after) - math.fsum(before) / len(before) if before and after else math.nan

    def _path(self, suite: OpenSuite, step: int) -> Path:
        return self._folder.root / "suites" / suite.name / f"step-{step:06d}"


def _sentence(result: BenchmarkResult) -> str:
    cell = result.table[ALL][result.about["headline"]]
    between = "" if cell["low"] is None else f" ({cell['low']:.3f} to {cell['high']:.3f})"
    return f"{result.about['headline']} {result.headline:.3f}{between}, {cell['n']} items"
