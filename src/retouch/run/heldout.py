"""The held-out evaluations of a run: it stores the scores of every task, the baselines and the summary."""

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from retouch.core.intervals import cluster_numbers, estimate_mean
from retouch.recipe.recipe import Recipe
from retouch.records import files
from retouch.records.folder import RunFolder
from retouch.records.summary import Summary, split_label
from retouch.rewards.combine.combination import WeightedSum
from retouch.run.build import Assembly
from retouch.run.evaluation import EvaluationResult, headline_tasks, score_table
from retouch.run.step import TooManyMissing

REWARD = "reward"
log = logging.getLogger("retouch")


class RunEvaluations:
    """Evaluates the run's policy and compares it with the base policy. Every rank evaluates; the main rank writes.

    ``since``: the step after which the present judge scores. If it is not 0, the policy is compared with that of this step.
    """

    def __init__(self, recipe: Recipe, folder: RunFolder, parts: Assembly, *, since: int) -> None:
        self._since = since
        self.recipe = recipe
        self.folder = folder
        self.parts = parts
        self.evaluator = parts.evaluator(parts.judge.for_split("heldout", 0))
        self.policy = parts.policy(recipe.rollout)
        self.headline = headline_tasks(self.evaluator.tasks, recipe.eval.headline)

    def evaluate(self, step: int) -> EvaluationResult:
        """Evaluate the policy after ``step`` steps and store every score.

        Raises TooManyMissing, on every rank and before anything is stored, if more scores are missing than the recipe allows.
        """
        log.info("evaluating %d %s tasks", len(self.evaluator.tasks), self._split_label)
        evaluated = replace(self.evaluator, judge=self.parts.judge.for_split("heldout", step))(self.policy)
        self._require_scores(evaluated, step)
        if self.parts.ranks.is_main:
            self._write_line(step, evaluated)
            self.folder.evaluation(step).parent.mkdir(exist_ok=True)
            files.write_json(self.folder.evaluation(step), evaluated.to_json())
        return evaluated

    def repair(self, done: int) -> list[str]:
        """Restore missing lines of the evaluation log, up to step ``done``, from stored scores. Returns one note per problem."""
        known = {line["step"] for line in self.folder.read_evals()}
        notes = []
        for step in sorted({0, *(at for at in range(done + 1) if self.folder.evaluation(at).exists())}):
            try:
                evaluated = self._stored(step)
            except ValueError as error:
                notes.append(str(error))
                continue
            if step not in known:
                self._write_line(step, evaluated)
                notes.append(f"{self.folder.evals.name}: the line of step {step} was missing and is restored from its scores")
        if not self._stored_baselines():
            notes.append(f"{self._baselines_path} is missing or damaged: the summary will have no baselines")
        return notes

    def _write_line(self, step: int, evaluated: EvaluationResult) -> None:
        means, intervals = score_table(evaluated, self.headline)
        lower = list(self.evaluator.lower_is_better)
        scores = {self._column: self._values(evaluated)}
        scores |= {name: evaluated.scores[name] for name in self.parts.judge.combination.columns}
        missing = {name: count for name, values in scores.items() if (count := int(values.isnan().sum()))}
        self.folder.write_eval(step, "heldout", table=means, ci95=intervals, lower_is_better=lower, missing=missing)

    def _require_scores(self, evaluated: EvaluationResult, step: int) -> None:
        column = self.parts.judge.reward.columns.get(self._column)
        missing, allowed = self._values(evaluated).isnan().double().mean().item(), self.recipe.reward.max_missing
        if missing > allowed and not (column is not None and column.diagnostic):
            self.parts.judge.forget_missing("heldout", step, column=None if column is None else self._column)
            raise TooManyMissing(
                f"{missing:.0%} of the {self._split_label} images have no {self._column}, but the recipe allows only {allowed:.0%} "
                "(reward.max_missing). If the judge is failing, start the run again when it works; if the reward leaves images "
                "out on purpose, set max_missing to the share that it leaves out"
            )

    def write_baselines(self) -> None:
        """Store the baselines: the score of the tasks' targets (ceiling), and the best of k samples of the base policy."""
        if self._baselines_path.exists():
            return
        if self._column in self.evaluator.measured:  # the objective measures the policy, not its images
            ceiling, k = None, 0
        else:
            ceiling = replace(self.evaluator, judge=self.parts.judge.for_split("ceiling", 0)).ceiling(self.policy)
            k = self.recipe.eval.best_of_k
        best = None
        if k:
            tasks = len(self.evaluator.tasks)
            log.info("baselines: the best of %d samples of the base policy for each of %d %s tasks", k, tasks, self._split_label)
            best = replace(self.evaluator, judge=self.parts.judge.for_split("best", 0)).best_of(self.policy, k=k)
        if self.parts.ranks.is_main:
            found = {
                "ceiling": None if ceiling is None else self._headline(self._values(ceiling)),
                "best_of_k": None if best is None else self._headline(self._values(best)),
                "k": k or None,
            }
            self.folder.require_owner()
            files.write_json(self._baselines_path, found)

    def format_table(self, step: int) -> Iterator[str]:
        """Yield the lines of the held-out table after ``step`` steps, which also shows the values at the start."""
        lines = {line["step"]: line for line in self.folder.read_evals()}
        first = self._first_step(step)
        now, start = lines[step]["table"], lines.get(first, lines[step])["table"]
        columns = [name for name in now["all"] if name != "n" and (name != REWARD or self._column == REWARD)]
        combined = (self._column, *self.parts.judge.combination.columns)
        shown = [name for name in columns if "/" not in name or name in combined]
        cells = {row: [_cell(start[row].get(name), means.get(name), step) for name in shown] for row, means in now.items()}
        widths = [
            max(16, *(len(text) + 2 for text in (name, *column))) for name, *column in zip(shown, *cells.values(), strict=True)
        ]
        wide = max(18, *map(len, now))
        yield f"{self._split_label} tasks after step {step}" + (" (before -> after)" if step else "")
        yield f"  {'':<{wide}}{'n':>5}  " + "".join(f"{name:>{width}}" for name, width in zip(shown, widths, strict=True))
        for row, means in now.items():
            line = "".join(f"{text:>{width}}" for text, width in zip(cells[row], widths, strict=True))
            yield f"  {row:<{wide}}{means['n']:>5}  {line}"
        for name in columns:
            if name not in shown:
                yield f"  {name:<25}" + f"{_cell(start['all'].get(name), now['all'].get(name), step):>16}"
        absent, absent_before = (lines.get(at, lines[step]).get("missing", {}) for at in (step, first))
        for name in {**absent_before, **absent}:
            counts = f"{absent_before.get(name, 0)} -> {absent.get(name, 0)}" if step else absent[name]
            yield f"  no {name} for {counts} of {now['all']['n']} tasks; its means are those of the others"

    def write_summary(self, step: int) -> None:
        """Write the summary of a finished run."""
        if not self.parts.ranks.is_main:
            return
        first = self._first_step(step)
        before, after = (self._stored(at) for at in (first, step))
        baselines = {} if first else self._stored_baselines()
        start, end = self._values(before), self._values(after)
        both = self.headline & ~(end - start).isnan()  # otherwise a missing score would change the gain
        gain = estimate_mean((end - start)[self.headline].tolist(), self._headline_sources)
        seconds = math.fsum(line.get("time/step") or 0.0 for line in self.folder.read_timings())
        summary = Summary(
            column=self._column,
            on=self._on() + (f", from step {first}, when the judge changed" if first else ""),
            before=float(start[both].mean()),
            after=float(end[both].mean()),
            steps=step,
            ceiling=baselines.get("ceiling"),
            best_of_k=baselines.get("best_of_k"),
            k=None if (k := baselines.get("k")) is None else int(k),
            gain_ci95=gain.interval,
            independent_tasks=gain.clusters,
            needed_tasks=gain.clusters_for_significance,
            lower_is_better=self._column in self.evaluator.lower_is_better,
            cost={"training seconds": round(seconds, 1), "device": str(self.parts.ranks.device), "ranks": self.parts.ranks.world},
        )
        self.folder.write_summary(summary)

    def _first_step(self, step: int) -> int:
        """The first evaluation that can be compared with that of ``step``: by the same judge."""
        known = (line["step"] for line in self.folder.read_evals())
        return min((at for at in known if self._since <= at <= step), default=step) if self._since else 0

    def _stored(self, step: int) -> EvaluationResult:
        """Read the scores after a step. Raises ValueError if the file is missing or damaged."""
        path = self.folder.evaluation(step)
        try:
            return EvaluationResult.from_json(files.read_record(path), self.evaluator.tasks)
        except (OSError, KeyError, TypeError, AttributeError):
            raise ValueError(
                f"{path} is missing or damaged, and the summary compares the trained policy with it. The checkpoints are intact; "
                "restore the file from a backup and start the run again for its summary"
            ) from None

    def _stored_baselines(self) -> dict[str, float | None]:
        """Read the baselines; empty if the file is missing or damaged."""
        try:
            found = files.read_record(self._baselines_path)
            return {name: None if found[name] is None else float(found[name]) for name in ("ceiling", "best_of_k", "k")}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def _headline(self, values: Tensor) -> float:
        return float(values[self.headline].nanmean())

    @property
    def _split_label(self) -> str:
        return split_label(self.recipe.eval.split)

    @property
    def _column(self) -> str:
        if self.recipe.eval.column is not None:
            return self.recipe.eval.column
        if not self.evaluator.scores_images:
            return next(iter(self.evaluator.measured))
        match self.parts.judge.combination:
            case WeightedSum(weights=weights) if list(weights.values()) == [1.0]:
                return next(iter(weights))
        return REWARD

    def _values(self, evaluated: EvaluationResult) -> Tensor:
        return evaluated.scores.get(self._column, evaluated.rewards)

    def _on(self) -> str:
        tags = " and ".join(f"{tag} {' or '.join(values)}" for tag, values in (self.recipe.eval.headline or {}).items())
        count, sources = int(self.headline.sum()), cluster_numbers(self._headline_sources)[1]
        tasks = f"{count} {self._split_label} task{'s' * (count != 1)}" + (f" of {tags}" if tags else "")
        return tasks if sources == count else f"{tasks} from {sources} source{'s' * (sources != 1)}"

    @property
    def _headline_sources(self) -> list[str]:
        return [task.source for task, included in zip(self.evaluator.tasks, self.headline.tolist(), strict=True) if included]

    @property
    def _baselines_path(self) -> Path:
        return self.folder.root / "evals" / "baselines.json"


def _cell(before: float | None, after: float | None, step: int) -> str:
    if after is None or before is None:
        return "-"
    return f"{before:.2f} -> {after:.2f}" if step else f"{after:.2f}"
