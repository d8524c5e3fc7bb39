"""``retouch eval``: evaluate a run, or the untrained policy of a recipe, on held-out tasks or on a whole data set."""

import json
from collections.abc import Sequence
from pathlib import Path

from retouch.data.base import DataSource
from retouch.data.kinds import DATA
from retouch.inference.opening import open_recipe, read_target
from retouch.records.libraries import silence_libraries
from retouch.run.evaluation import headline_tasks, score_table

_ALL = 10**9  # tasks: more than any data set has


def evaluate_target(target: str, overrides: Sequence[str], *, data: str | None = None) -> dict[str, object]:
    """Return the column means and their 95 % confidence intervals, by row of the held-out table, and the step of the weights.

    ``data``: a path or Hub id whose rows are all evaluated in place of the held-out tasks; ``overrides`` are applied after it. A
    recipe with ``data.held_out: "all"`` is evaluated on all rows too, unless ``overrides`` limit them by ``eval.tasks``.
    """
    if data is not None:
        overrides = [*whole_data(data, read_target(target)[0].data), *overrides]
    silence_libraries()
    recipe, folder = read_target(target, overrides)
    if data is None and getattr(recipe.data, "held_out", None) == "all":
        recipe, folder = read_target(target, [f"eval.tasks={_ALL}", *overrides])
    parts, step = open_recipe(recipe, folder, trained=True)
    try:
        evaluated = parts.evaluator(parts.judge.for_split("heldout", step))(parts.policy(parts.recipe.rollout))
        means, intervals = score_table(evaluated, headline_tasks(evaluated.tasks, parts.recipe.eval.headline))
    finally:
        parts.judge.close()
    return {"name": parts.recipe.name, "step": step, "table": means, "ci95": intervals}


def whole_data(path: str, section: DataSource) -> list[str]:
    """The changes of a recipe, as for ``--set``, with which it evaluates all rows at ``path`` (a file, a folder or a Hub id).

    The keys of the recipe's data ``section``, such as columns, are kept if ``path`` has the layout of this section. Raises
    ValueError if there is nothing at ``path``.
    """
    kind = _kind_at(path, section)
    changes = ["eval.split=test", f"eval.tasks={_ALL}", "eval.headline=null"]
    if kind != section.label:
        return [f"data={json.dumps({'kind': kind, 'path': path, 'held_out': 'all'})}", *changes]
    keys = section.keys_for_all(path)
    if "kind" in keys:
        return [f"data={json.dumps(keys)}", *changes]
    return [*(f"data.{key}={json.dumps(value)}" for key, value in keys.items()), *changes]


def _kind_at(path: str, section: DataSource) -> str:
    """The kind of data source that can read ``path``; the recipe's own kind if it can."""
    where = Path(path)
    if not where.exists():
        if not section.on_hub and path.count("/") != 1:
            raise ValueError(f"--data {path}: no such file or folder, and not the id of a data set on the Hugging Face Hub")
        return section.label if section.on_hub else "hub"
    if type(section).rows_at(where) is not None:
        return section.label
    for kind in DATA:
        found = DATA.load(kind)
        if found is not None and issubclass(found, DataSource) and found.rows_at(where) is not None:
            return kind
    return section.label if section.on_hub else "hub"
