"""Rows of a recipe on one rank, as input of its memory plan."""

import math

from retouch.recipe.recipe import Recipe
from retouch.training.preflight import ROWS


def rank_rows(recipe: Recipe) -> int:
    """Largest number of samples per rank and step."""
    return math.ceil(max(phase.rows for phase in recipe.resolved_phases()) / (recipe.ranks or 1))


def held_out_rows(recipe: Recipe) -> int:
    """Number of held-out tasks that a rank samples at once."""
    return min(recipe.eval.batch, math.ceil(recipe.eval.tasks / (recipe.ranks or 1)))


def tasks_of(recipe: Recipe, rows: int) -> int:
    """Number of tasks to which consecutive rows belong."""
    return math.ceil(rows / max(phase.group_size for phase in recipe.resolved_phases()))


def trial_rows(recipe: Recipe, microbatch: int) -> tuple[int, int]:
    """The largest (tasks, rows) of a forward pass of the trial step, which takes rows of as many tasks as possible."""
    share = rank_rows(recipe)
    rows = min(ROWS, share)
    at_once = min(microbatch, rows)
    return min(at_once, tasks_of(recipe, at_once * (share // rows))), at_once
