"""What a run achieved on held-out tasks: evaluations kept by task, what stands beside them, and the summary."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from retouch.assembly.assembly import Assembly
from retouch.recipe.recipe import Recipe
from retouch.records import files
from retouch.records.folder import RunFolder
from retouch.records.summary import Summary, split_label
from retouch.rewards.combine.combination import WeightedSum
from retouch.training.evaluation import Evaluated, chosen, paired_gain, table
from retouch.training.loop import TooManyMissing

REWARD = "reward"


class Outcome:
    """Evaluates, and compares with the start. Every rank evaluates; the first writes."""

    def __init__(self, recipe: Recipe, folder: RunFolder, parts: Assembly) -> None:
        self.recipe = recipe
        self.folder = folder
        self.parts = parts
        self.evaluator = parts.evaluator(parts.judge.for_split("heldout", 0))
        self.policy = parts.policy(recipe.rollout)
        self.kept = chosen(self.evaluator.tasks, recipe.eval.headline)
        if recipe.eval.column is not None and recipe.eval.column not in parts.judge.reward.columns:
            raise ValueError(
                f"eval.column: the reward gives {', '.join(parts.judge.reward.columns)}, and no {recipe.eval.column!r}"
            )

    def evaluate(self, step: int) -> Evaluated:
        """Judge the policy as it is after ``step`` steps and keep every score.

        TooManyMissing, on every rank and with nothing kept: the judge fails at more of them than the recipe allows.
        """
        evaluated = replace(self.evaluator, judge=self.parts.judge.for_split("heldout", step))(self.policy)
        self._require_judged(evaluated, step)
        if self.parts.ranks.is_main:
            means, intervals = table(evaluated, self.kept)
            columns = self.parts.judge.reward.columns
            lower = [name for name, column in columns.items() if not column.higher_is_better]
            self.folder.write_eval(step, "heldout", table=means, ci95=intervals, lower_is_better=lower)
            self._path(step).parent.mkdir(exist_ok=True)
            files.write_json(self._path(step), evaluated.to_json())
        return evaluated

    def _require_judged(self, evaluated: Evaluated, step: int) -> None:
        column = self.parts.judge.reward.columns.get(self._column)
        missing, allowed = self._values(evaluated).isnan().double().mean().item(), self.recipe.reward.max_missing
        if missing > allowed and not (column is not None and column.diagnostic):
            self.parts.judge.forget_missing("heldout", step, column=None if column is None else self._column)
            raise TooManyMissing(
                f"{missing:.0%} of the {self._standing} pictures have no {self._column}, and the recipe allows {allowed:.0%} "
                "(reward.max_missing): the judge is failing. Start the run again when it answers"
            )

    def baselines(self) -> None:
        """What the start stands beside: the targets through the renderer, and the best of k of its own samples."""
        if self._baselines.exists():
            return
        ceiling = replace(self.evaluator, judge=self.parts.judge.for_split("ceiling", 0)).ceiling(self.policy)
        k = self.recipe.eval.best_of_k
        best = replace(self.evaluator, judge=self.parts.judge.for_split("best", 0)).best_of(self.policy, k=k) if k else None
        if self.parts.ranks.is_main:
            found = {
                "ceiling": None if ceiling is None else self._headline(self._values(ceiling)),
                "best_of_k": None if best is None else self._headline(self._values(best)),
                "k": k or None,
            }
            files.write_json(self._baselines, found)

    def table(self, step: int) -> Iterator[str]:
        """The held-out table after ``step`` steps, beside that of the start, as lines of text."""
        lines = {line["step"]: line["table"] for line in self.folder.read_evals()}
        now, start = lines[step], lines.get(0, lines[step])
        columns = [name for name in now["all"] if name != "n" and (name != REWARD or self._column == REWARD)]
        told = (self._column, *self.parts.judge.combination.columns)
        shown = {name: max(16, len(name) + 2) for name in columns if "/" not in name or name in told}
        yield f"{self._standing} tasks after step {step}" + (" (before -> after)" if step else "")
        yield f"  {'':<18}{'n':>5}  " + "".join(f"{name:>{width}}" for name, width in shown.items())
        for row, means in now.items():
            cells = (f"{_cell(start[row].get(name), means.get(name), step):>{width}}" for name, width in shown.items())
            yield f"  {row:<18}{means['n']:>5}  " + "".join(cells)
        for name in columns:
            if name not in shown:
                yield f"  {name:<25}" + f"{_cell(start['all'].get(name), now['all'].get(name), step):>16}"

    def sum_up(self, step: int) -> None:
        """Write the summary of a finished run."""
        if not self.parts.ranks.is_main:
            return
        tasks = self.evaluator.tasks
        before, after = (Evaluated.from_json(files.read_json(self._path(at)), tasks) for at in (0, step))
        beside = files.read_json(self._baselines)
        start, end = self._values(before), self._values(after)
        _, interval = paired_gain(start[self.kept], end[self.kept])
        seconds = math.fsum(line["time/step"] for line in self.folder.read_timings())
        summary = Summary(
            column=self._column,
            on=self._on(),
            before=self._headline(start),
            after=self._headline(end),
            steps=step,
            ceiling=beside["ceiling"],
            best_of_k=beside["best_of_k"],
            k=beside["k"],
            gain_ci95=interval,
            cost={"training seconds": round(seconds, 1), "device": str(self.parts.ranks.device), "ranks": self.parts.ranks.world},
        )
        self.folder.write_summary(summary)

    def _headline(self, values: Tensor) -> float:
        return float(values[self.kept].nanmean())

    @property
    def _standing(self) -> str:
        return split_label(self.recipe.eval.split)

    @property
    def _column(self) -> str:
        if self.recipe.eval.column is not None:
            return self.recipe.eval.column
        match self.parts.judge.combination:
            case WeightedSum(weights=weights) if list(weights.values()) == [1.0]:
                return next(iter(weights))
        return REWARD

    def _values(self, evaluated: Evaluated) -> Tensor:
        return evaluated.scores.get(self._column, evaluated.rewards)

    def _on(self) -> str:
        told = " and ".join(f"{tag} {' or '.join(values)}" for tag, values in (self.recipe.eval.headline or {}).items())
        count = int(self.kept.sum())
        return f"{count} {self._standing} task{'s' * (count != 1)}" + (f" of {told}" if told else "")

    def _path(self, step: int) -> Path:
        return self.folder.root / "evals" / f"step-{step:06d}.json"

    @property
    def _baselines(self) -> Path:
        return self.folder.root / "evals" / "baselines.json"


def _cell(before: float | None, after: float | None, step: int) -> str:
    if after is None or before is None:
        return "-"
    return f"{before:.2f} -> {after:.2f}" if step else f"{after:.2f}"
