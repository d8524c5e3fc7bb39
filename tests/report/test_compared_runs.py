"""Runs that are compared in the terminal."""

import json
import math
from statistics import mean, stdev

import pytest

from fake_run import write_new_run
from retouch.cli.parser import main
from retouch_view.report.tables import comparison

TASKS = ("a", "b", "c", "d")


def run_with(root, *, after, sources=(), **changes):
    """A run whose evaluations have these scores of `TASKS`, which have these ``sources``; ``changes`` are made to its recipe."""
    folder = write_new_run(root)
    record = json.loads(folder.recipe.read_text())
    record["recipe"] |= changes
    folder.recipe.write_text(json.dumps(record))
    folder.evaluation(0).parent.mkdir(exist_ok=True)
    for step, scores in ((0, [5.0, 6.0, 7.0, 8.0]), (9, after)):
        evaluation = {"tasks": TASKS, "rewards": scores, "scores": {"overall": scores}} | ({"sources": sources} if sources else {})
        folder.evaluation(step).write_text(json.dumps(evaluation))
        folder.write_eval(step, "heldout", table={"all": {"n": 4, "overall": 6.5}}, ci95={})
    return folder


def test_differences_are_paired_over_the_tasks_with_both_scores(tmp_path):
    first = run_with(tmp_path / "first", after=[6.0, 7.5, 8.0, None], seed=0)
    second = run_with(tmp_path / "second", after=[6.5, 8.5, 8.2, 9.0], seed=1)
    text = comparison([first.root, second.root])
    changes = [0.5, 1.0, 0.2]
    half = 4.30265 * stdev(changes) / math.sqrt(3)  # t(2)
    interval = f"+{mean(changes):.2f} (−{half - mean(changes):.2f} to +{mean(changes) + half:.2f})"
    assert f"  second  {interval} on 3 tasks" in text
    scored = next(line for line in text.splitlines() if line.startswith("  first"))
    assert scored.split()[1:6] == ["9", "3", "6.00", "7.17", "+1.17"]  # of the 3 tasks with both scores
    assert text.endswith("What differs in the recipes\n        first  second\n  seed      0       1")


def test_tasks_of_one_source_are_a_cluster_in_a_comparison(tmp_path):
    """Changes of 1 and 1 for one source, and of 3 and 3 for another: the standard error is 1 with 2 clusters."""
    sources = ("one.png", "one.png", "two.png", "two.png")
    first = run_with(tmp_path / "first", after=[5.0, 6.0, 5.0, 6.0], sources=sources)
    second = run_with(tmp_path / "second", after=[6.0, 7.0, 8.0, 9.0], sources=sources)
    assert "  second  +2.00 (−10.71 to +14.71) on 4 tasks" in comparison([first.root, second.root])


def test_recipes_that_do_not_differ_and_tasks_that_do(tmp_path):
    first = run_with(tmp_path / "one" / "run", after=[6.0, 7.0, 8.0, 9.0])
    second = run_with(tmp_path / "two" / "run", after=[6.0, 7.0, 8.0, 9.0])
    evaluation = json.loads(second.evaluation(9).read_text())
    second.evaluation(9).write_text(json.dumps(evaluation | {"tasks": ["e", "f", "g", "h"]}))
    text = comparison([first.root, second.root])
    assert f"  {second.root}  no held-out task in common" in text  # runs of the same name are named by their folders
    assert text.endswith("The recipes do not differ.")


def test_runs_that_cannot_be_compared_are_refused(tmp_path, capsys):
    first = run_with(tmp_path / "first", after=[6.0, 7.0, 8.0, 9.0])
    other = run_with(tmp_path / "other", after=[6.0, 7.0, 8.0, 9.0])
    for step in (0, 9):
        evaluation = json.loads(other.evaluation(step).read_text())
        other.evaluation(step).write_text(json.dumps(evaluation | {"scores": {"clip": evaluation["rewards"]}}))
    with pytest.raises(ValueError, match="has no held-out score 'overall', which the first run reports; it has reward, clip"):
        comparison([first.root, other.root])
    with pytest.raises(ValueError, match="is given twice"):
        comparison([first.root, tmp_path / "other" / ".." / "first"])
    with pytest.raises(ValueError, match="has no evaluation yet"):
        comparison([first.root, write_new_run(tmp_path / "started").root])
    assert main(["compare", str(first.root)]) == 2
    assert "give at least two runs" in capsys.readouterr().err
