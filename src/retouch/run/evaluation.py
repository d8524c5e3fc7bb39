"""Held-out evaluation: deterministic sampling with fixed seeds, scoring, and tables by tag with confidence intervals."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from retouch.core.intervals import FEWEST, cluster_numbers, estimate_mean, estimate_share
from retouch.distributed.ranks import Ranks
from retouch.objectives.base import Objective
from retouch.protocols import Renderer
from retouch.recipe.recipe import Recipe
from retouch.records import files
from retouch.records.folder import RunFolder, Summary, split_label
from retouch.rewards.combination import WeightedSum
from retouch.rewards.identity import short
from retouch.rewards.judging import BatchScorer
from retouch.rewards.ledger.journal import Split
from retouch.run.build import Assembly, has_demonstration
from retouch.run.ledger import task_content
from retouch.run.metrics import completion_texts
from retouch.run.step import TooManyMissing, wait_for_rewards
from retouch.run.turns import last_images, play
from retouch.types import Batch, Sample, Scores, Task

log = logging.getLogger("retouch")

# The step number in the noise key of evaluations. Training steps count from 0, so they never use this key.
EVALUATION_STEP = -1
REWARD = "reward"
MOST_TAG_VALUES = 8


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationResult:
    """Scores and rewards (n,) of the held-out tasks, in the order of ``tasks``; NaN for a missing score.

    ``images`` and ``texts``: the images of the first few tasks, and the completions that they were made from (None if the policy
    writes no text). ``shares``: the names of the columns with values 1 (yes), 0 (no) and 0.5 (undecided).
    """

    tasks: Sequence[Task]
    scores: Scores
    rewards: Tensor
    images: Sequence[Image | None] = field(default_factory=tuple)
    texts: Sequence[str | None] = field(default_factory=tuple)
    shares: Sequence[str] = ()

    @property
    def sources(self) -> list[str]:
        """The source of each task."""
        return [task.source for task in self.tasks]

    @property
    def has_shared_sources(self) -> bool:
        """Whether two tasks have the same source."""
        return cluster_numbers(self.sources)[1] < len(self.tasks)

    def to_json(self) -> dict[str, Any]:
        """Return the scores of every task as JSON, as they are stored in the run's folder. ``sources`` are only stored if tasks
        share a source."""
        return {
            **({"shares": list(self.shares)} if self.shares else {}),
            "tasks": [task.id for task in self.tasks],
            "contents": [short(task_content(task)) for task in self.tasks],
            **({"sources": self.sources} if self.has_shared_sources else {}),
            "rewards": self.rewards.tolist(),
            "scores": {name: column.tolist() for name, column in self.scores.items()},
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any], tasks: Sequence[Task]) -> "EvaluationResult":
        """Read the result of ``to_json``. Raises ValueError if ``tasks`` are not the tasks of the record, by their content, in any
        order."""
        then, now = record["contents"], [short(task_content(task)) for task in tasks]
        if sorted(then) != sorted(now):
            raise ValueError("the held-out tasks differ from those at the start of the run; start a new run with --fresh")
        rows = dict(zip(sorted(range(len(now)), key=now.__getitem__), sorted(range(len(then)), key=then.__getitem__), strict=True))
        order = [rows[place] for place in range(len(now))]
        scores = {name: column_of(values)[order] for name, values in record["scores"].items()}
        return cls(tasks, scores, column_of(record["rewards"])[order], shares=tuple(record.get("shares", ())))


def column_of(values: Sequence[float | None], dtype: torch.dtype = torch.float64) -> Tensor:
    """Stored scores as a column (n,), NaN for a missing one."""
    return torch.tensor([math.nan if value is None else value for value in values], dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Evaluates a policy on ``tasks``, which are divided among the ranks.

    ``seed``: the key of the initial noise. ``batch``: rows per batch. ``pictures``: the number of images to return.
    ``demonstrates``: whether the policy can demonstrate a task, because the task has a target. ``scores_images``: whether there is
    a reward; without a reward, only the images that are returned are made. ``lower_is_better``: the columns in which a lower score
    is better. ``objective``: adds the columns that the objective measures itself (``heldout_columns``). ``in_turns``: the policy
    makes the edits of a task in turns, and the last image is scored against the whole task.
    """

    tasks: Sequence[Task]
    renderer: Renderer
    judge: BatchScorer
    ranks: Ranks
    seed: int
    batch: int
    pictures: int = 0
    demonstrates: Callable[[Task], bool] = lambda task: task.target is not None
    scores_images: bool = True
    lower_is_better: Sequence[str] = ()
    objective: Objective | None = None
    in_turns: bool = False

    @property
    def measured(self) -> Mapping[str, str]:
        """The columns that the objective measures (its ``heldout_columns``); empty without an objective."""
        return {} if self.objective is None else self.objective.heldout_columns

    def __call__(self, policy: Any) -> EvaluationResult:
        """Evaluate the policy on all tasks, sampling as in inference: without exploration."""
        if self.scores_images:
            result = self._evaluate(policy.sample, slot=0)
        else:
            batches = self._batches(slots=(0,), most=self.pictures)
            samples = [made for batch in batches for made in self._samples(policy.sample, batch)]
            result = self._result({}, torch.full((len(self.tasks),), torch.nan), samples)
        if self.objective is None:
            return result
        with policy.copies.using("average") if "average" in policy.copies.copies else nullcontext():  # like ``policy.sample``
            parts = [self.objective.measure(policy, batch) for batch in self._batches(slots=(0, 1))]
        columns = self._gathered([torch.cat([part[name].cpu() for part in parts]) for name in self.measured])
        shares = tuple(name for name, kind in self.measured.items() if kind == "share")
        return replace(result, scores=result.scores | dict(zip(self.measured, columns, strict=True)), shares=shares)

    def ceiling(self, policy: Any) -> EvaluationResult | None:
        """Score the targets or completions that are stored in the tasks, after rendering; None if a task has no target.

        A denoising policy cannot score higher than the targets. A writer may find better completions than those of the tasks.
        """
        if not all(self.demonstrates(task) for task in self.tasks):
            return None
        return replace(self, in_turns=False)._evaluate(policy.demonstrate, slot=0)

    def best_of(self, policy: Any, *, k: int) -> EvaluationResult:
        """Return the best of ``k`` samples per task, separately for each column; a sample without a score is never the best.

        A denoising policy starts each sample from new noise. A writer samples its tokens, because greedy decoding would give the
        same completion each time.
        """
        act = policy.rollout if policy.sampling.is_autoregressive else policy.sample
        results = [self._evaluate(act, slot=slot) for slot in range(k)]
        scores = {
            name: _best([result.scores[name] for result in results], lower=name in self.lower_is_better)
            for name in results[0].scores
        }
        return EvaluationResult(self.tasks, scores, _best([result.rewards for result in results]))

    def guided(self, policy: Any, *, k: int) -> EvaluationResult:
        """Score images that a denoising policy samples with guidance by the reward, of ``k`` candidates in each step."""

        def score(batch: Batch, trajectory: Any) -> Tensor:
            return wait_for_rewards(self.ranks, [self.judge(batch, self._samples(lambda _: trajectory, batch))]).rewards

        return self._evaluate(partial(policy.search, k=k, score=score), slot=0)

    def _evaluate(self, act: Any, *, slot: int) -> EvaluationResult:
        futures, samples = [], list[Sample]()
        for batch in self._batches(slots=(slot,)):
            made = self._samples(act, batch)
            futures.append(self.judge(batch, made))
            samples += made[: self.pictures]
        judged = wait_for_rewards(self.ranks, futures)
        rewards, *columns = self._gathered([judged.rewards, *judged.scores.values()])
        return self._result(dict(zip(judged.scores, columns, strict=True)), rewards, samples)

    def _batches(self, *, slots: Sequence[int], most: int | None = None) -> Iterator[Batch]:
        """Yield this rank's tasks, or the first ``most`` of them, with one row per slot. All ranks get the same number of rows."""
        count = len(self.tasks)
        share = math.ceil(count / self.ranks.world)
        mine = [min(index, count - 1) for index in range(self.ranks.rank * share, (self.ranks.rank + 1) * share)][:most]
        at_once = max(1, self.batch // len(slots))
        for first in range(0, len(mine), at_once):
            indices = tuple(mine[first : first + at_once])
            yield Batch(
                seed=self.seed,
                step=EVALUATION_STEP,
                tasks=tuple(self.tasks[index] for index in indices),
                group_ids=indices,
                group=tuple(row for row in range(len(indices)) for _ in slots),
                slot=tuple(slots) * len(indices),
            )

    def _samples(self, act: Any, batch: Batch) -> list[Sample]:
        if self.in_turns:
            most = max(len(task.turns) for task in self.tasks)
            played = list(play(act, self.renderer, batch, most=most))
            return [Sample(*parts) for parts in zip(batch.tasks, last_images(played), strict=True)]
        trajectory = act(batch)
        images = self.renderer(batch.tasks, trajectory)
        return [Sample(*parts) for parts in zip(batch.tasks, images, completion_texts(trajectory), strict=True)]

    def _gathered(self, columns: Sequence[Tensor]) -> Sequence[Tensor]:
        """Gather the columns of all ranks, in the order of ``tasks``."""
        return self.ranks.gather(torch.stack(list(columns), dim=1))[: len(self.tasks)].unbind(dim=1)

    def _result(self, scores: Scores, rewards: Tensor, samples: Sequence[Sample]) -> EvaluationResult:
        shown = samples[: self.pictures]
        return EvaluationResult(self.tasks, scores, rewards, [each.image for each in shown], [each.completion for each in shown])


def _best(columns: Sequence[Tensor], *, lower: bool = False) -> Tensor:
    sign = -1.0 if lower else 1.0
    best = torch.stack([sign * column for column in columns]).nan_to_num(nan=-math.inf).amax(dim=0)
    return torch.where(best.isinf(), torch.nan, sign * best)


Row = dict[str, float | int]


def build_evaluator(parts: Assembly, judge: BatchScorer) -> Evaluator:
    """Build the held-out evaluation of a run."""
    recipe, heldout = parts.recipe, parts.sets[0].heldout
    columns = parts.judge.reward.columns
    return Evaluator(
        tasks=[heldout[index] for index in range(len(heldout))],
        renderer=parts.users_renderer(),
        judge=judge,
        ranks=parts.ranks,
        seed=recipe.eval.seed,
        batch=recipe.eval.batch,
        pictures=recipe.samples.tasks,
        scores_images=bool(columns),
        lower_is_better=[name for name, column in columns.items() if not column.higher_is_better],
        objective=recipe.heldout_objective,
        in_turns=recipe.evaluates_in_turns,
        demonstrates=has_demonstration(parts.model),
    )


def score_table(
    evaluated: EvaluationResult, headline: Tensor | None = None
) -> tuple[dict[str, Row], dict[str, dict[str, tuple[float, float]]]]:
    """Return the column means of each row of the table, and their 95 % confidence intervals if scores of 8 sources are known.

    The rows of the table are: ``all``; ``headline``, the tasks for which ``headline`` (n,) is True (left out if it is all tasks);
    and ``tag=value`` for each value of the tags with at most ``MOST_TAG_VALUES`` values. "reward" is the combined reward, also if a
    column has this name.
    """
    means: dict[str, Row] = {}
    intervals: dict[str, dict[str, tuple[float, float]]] = {}
    columns = {"reward": evaluated.rewards, **{name: values for name, values in evaluated.scores.items() if name != "reward"}}
    groups = {"all": list(range(len(evaluated.tasks)))}
    for tag in sorted({tag for task in evaluated.tasks for tag in task.tags}):
        found = sorted({task.tags[tag] for task in evaluated.tasks if tag in task.tags})
        for value in found if len(found) <= MOST_TAG_VALUES else ():
            groups[f"{tag}={value}"] = [row for row, task in enumerate(evaluated.tasks) if task.tags.get(tag) == value]
    if headline is not None and not headline.all():
        groups = {"all": groups.pop("all"), "headline": headline.nonzero().flatten().tolist(), **groups}
    for name, rows in groups.items():
        means[name] = {"n": len(rows)}
        sources = [evaluated.tasks[row].source for row in rows]
        intervals[name] = {}
        for column, values in columns.items():
            known = values[rows][~values[rows].isnan()].double()
            if len(known):
                means[name][column] = known.mean().item()
            if column in evaluated.shares:
                share = estimate_share(values[rows].tolist(), sources)
                interval = (share.low, share.high) if share.clusters >= FEWEST else None
            else:
                interval = estimate_mean(values[rows].tolist(), sources).interval
            if interval is not None:
                intervals[name][column] = interval
    return means, intervals


def headline_tasks(tasks: Sequence[Task], headline: Mapping[str, Sequence[str]] | None) -> Tensor:
    """Return a mask (n,) of the tasks that the summary reports (``eval.headline``).

    These are the tasks that have, for every given tag, one of the given values; all tasks if no tag is given. Raises ValueError if
    there is no such task.
    """
    tags = headline or {}
    mask = torch.tensor([all(task.tags.get(tag) in values for tag, values in tags.items()) for task in tasks])
    if not mask.any():
        raise ValueError(
            f"eval.headline: none of the {len(tasks)} held-out tasks has {dict(tags)}; evaluate on more tasks (eval.tasks), or set "
            "eval.headline to null"
        )
    return mask


class RunEvaluations:
    """Evaluates the run's policy and compares it with the base policy. Every rank evaluates; the main rank writes.

    ``since``: the step after which the present judge scores. If it is not 0, the policy is compared with that of this step.
    """

    def __init__(self, recipe: Recipe, folder: RunFolder, parts: Assembly, *, since: int) -> None:
        self._since = since
        self.recipe = recipe
        self.folder = folder
        self.parts = parts
        self.evaluator = build_evaluator(parts, parts.judge.for_split("heldout", 0))
        self.policy = parts.policy(recipe.rollout)
        self.headline = headline_tasks(self.evaluator.tasks, recipe.eval.headline)
        self._headline_sources = [
            task.source for task, mine in zip(self.evaluator.tasks, self.headline.tolist(), strict=True) if mine
        ]
        self._split_label = split_label(recipe.eval.split)
        self._baselines_path = folder.root / "evals" / "baselines.json"

    def evaluate(self, step: int) -> EvaluationResult:
        """Evaluate the policy after ``step`` steps and store every score.

        Raises TooManyMissing, on every rank and before anything is stored, if more scores are missing than the recipe allows.
        """
        log.info("evaluating %d %s tasks", len(self.evaluator.tasks), self._split_label)
        evaluated = self._judged("heldout", step)(self.policy)
        column = self.parts.judge.reward.columns.get(self._column)
        missing, allowed = self._values(evaluated).isnan().double().mean().item(), self.recipe.reward.max_missing
        if missing > allowed and not (column is not None and column.diagnostic):
            self.parts.judge.forget_missing("heldout", step, column=None if column is None else self._column)
            raise TooManyMissing(
                f"{missing:.0%} of the {self._split_label} images have no {self._column}, but the recipe allows only {allowed:.0%} "
                "(reward.max_missing). If the judge is failing, start the run again when it works; if the reward leaves images "
                f"out on purpose, set max_missing to the share that it leaves out{self.parts.judge.last_fault}"
            )
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

    def write_baselines(self) -> None:
        """Store the baselines: the score of the tasks' targets (ceiling), the best of k samples of the base policy, and its scores
        edit by edit, if the tasks have turns and are evaluated without them, and guided by the reward (``eval.guided_k``)."""
        if self._baselines_path.exists():
            return
        ceiling, best, others = None, None, dict[str, float]()
        count, k, guided_k = len(self.evaluator.tasks), self.recipe.eval.best_of_k, self.recipe.eval.guided_k
        if self._column in self.evaluator.measured:  # the objective measures the policy, not its images
            k = guided_k = 0
        else:
            ceiling = self._judged("ceiling").ceiling(self.policy)
        if k:
            log.info("baselines: the best of %d samples of the base policy for each of %d %s tasks", k, count, self._split_label)
            best = self._judged("best").best_of(self.policy, k=k)
        if k and not self.evaluator.in_turns and all(task.turns for task in self.evaluator.tasks):
            log.info("baselines: the base policy makes the edits of each task one by one")
            others["edit by edit"] = self._headline(replace(self._judged("turns"), in_turns=True)(self.policy))
        if guided_k:
            log.info("baselines: the base policy is guided by the reward, with %d candidates in each denoising step", guided_k)
            others["guided by the reward"] = self._headline(self._judged("guided").guided(self.policy, k=guided_k))
        if self.parts.ranks.is_main:
            found = {
                "ceiling": None if ceiling is None else self._headline(ceiling),
                "best_of_k": None if best is None else self._headline(best),
                "k": k or None,
                "others": others,
            }
            self.folder.require_owner()
            files.write_json(self._baselines_path, found)

    def _judged(self, split: Split, step: int = 0) -> Evaluator:
        return replace(self.evaluator, judge=self.parts.judge.for_split(split, step))

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
        tags = " and ".join(f"{tag} {' or '.join(values)}" for tag, values in (self.recipe.eval.headline or {}).items())
        count, sources = int(self.headline.sum()), cluster_numbers(self._headline_sources)[1]
        on = f"{count} {self._split_label} task{'s' * (count != 1)}" + (f" of {tags}" if tags else "")
        on += "" if sources == count else f" from {sources} source{'s' * (sources != 1)}"
        summary = Summary(
            column=self._column,
            on=on + (f", from step {first}, when the judge changed" if first else ""),
            before=float(start[both].mean()),
            after=float(end[both].mean()),
            steps=step,
            ceiling=baselines.get("ceiling"),
            best_of_k=baselines.get("best_of_k"),
            k=None if (k := baselines.get("k")) is None else int(k),
            others=baselines.get("others", {}),
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

    def _stored_baselines(self) -> dict[str, Any]:
        """Read the baselines; empty if the file is missing or damaged."""
        try:
            found = files.read_record(self._baselines_path)
            others = {str(name): float(value) for name, value in found["others"].items()}
            return {name: found[name] and float(found[name]) for name in ("ceiling", "best_of_k", "k")} | {"others": others}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def _headline(self, evaluated: EvaluationResult) -> float:
        return float(self._values(evaluated)[self.headline].nanmean())

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


def _cell(before: float | None, after: float | None, step: int) -> str:
    if after is None or before is None:
        return "-"
    return f"{before:.2f} -> {after:.2f}" if step else f"{after:.2f}"
