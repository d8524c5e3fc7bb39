"""``retouch eval``: evaluate a run, or a recipe's untrained policy, on held-out tasks."""

from collections.abc import Sequence

from retouch.inference.opening import open_target
from retouch.training.evaluation import headline_tasks, score_table


def evaluate_target(target: str, overrides: Sequence[str]) -> dict[str, object]:
    """Column means and their 95 % confidence intervals by row of the held-out table, and the step whose weights were evaluated."""
    parts, step = open_target(target, overrides)
    try:
        evaluated = parts.evaluator(parts.judge.for_split("heldout", step))(parts.policy(parts.recipe.rollout))
        means, intervals = score_table(evaluated, headline_tasks(evaluated.tasks, parts.recipe.eval.headline))
    finally:
        parts.judge.close()
    return {"name": parts.recipe.name, "step": step, "table": means, "ci95": intervals}
