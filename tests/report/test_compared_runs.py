"""Runs that are compared in the terminal."""

import json

import pytest

from fake_run import write_new_run
from html_check import read
from retouch.cli.parser import main
from retouch.core.intervals import estimate_mean
from retouch_view.report.page import write_report
from retouch_view.report.tables import comparison, paired_differences

TASKS = tuple("abcdefghijklmnop")


def run_with(root, *, after, sources=(), **changes):
    """A run whose evaluations have these scores of `TASKS`, which have these ``sources``; ``changes`` are made to its recipe."""
    folder = write_new_run(root)
    record = json.loads(folder.recipe.read_text())
    record["recipe"] |= changes
    folder.recipe.write_text(json.dumps(record))
    folder.evaluation(0).parent.mkdir(exist_ok=True)
    tasks = TASKS[: len(after)]
    for step, scores in ((0, [5.0, 6.0, 7.0, 8.0] * (len(after) // 4)), (9, after)):
        evaluation = {"tasks": tasks, "rewards": scores, "scores": {"overall": scores}} | ({"sources": sources} if sources else {})
        folder.evaluation(step).write_text(json.dumps(evaluation))
        folder.write_eval(step, "heldout", table={"all": {"n": 4, "overall": 6.5}}, ci95={})
    return folder


def test_differences_are_paired_over_the_tasks_with_both_scores(tmp_path):
    first = run_with(tmp_path / "first", after=[6.0, 7.5, 8.0, None], seed=0)
    second = run_with(tmp_path / "second", after=[6.5, 8.5, 8.2, 9.0], seed=1)
    text = comparison([first.root, second.root])
    assert "  second  +0.57 on 3 tasks" in text, "3 tasks are too few for an interval"
    scored = next(line for line in text.splitlines() if line.startswith("  first"))
    assert scored.split()[1:6] == ["9", "3", "6.00", "7.17", "+1.17"]  # of the 3 tasks with both scores
    assert text.endswith("What differs in the recipes\n        first  second\n  seed      0       1")


def test_tasks_of_one_source_are_a_cluster_in_a_comparison(tmp_path):
    """Both tasks of a source change by the same amount, so there are as many changes as sources."""
    changes = [1.0, 3.0] * 4
    sources = [f"{place}.png" for place in range(8) for _ in range(2)]
    first = run_with(tmp_path / "first", after=[5.0] * 16, sources=sources)
    second = run_with(tmp_path / "second", after=[5.0 + change for change in changes for _ in range(2)], sources=sources)
    low, high = estimate_mean(changes).interval or (0, 0)
    assert f"  second  +2.00 (+{low:.2f} to +{high:.2f}) on 16 tasks" in comparison([first.root, second.root])
    (row,) = paired_differences([first.root, second.root])["rows"]
    assert (row["n"], row["before"], row["after"], row["difference"], row["direction"]) == (16, 5.0, 7.0, 2.0, "good")


@pytest.mark.parametrize(("changes", "style"), [([1.0, 3.0], "good"), ([-1.0, -3.0], "bad"), ([1.0, -0.9], "flat")])
def test_a_change_in_the_held_out_table_has_a_colour_only_if_its_interval_excludes_0(changes, style, tmp_path):
    folder = run_with(tmp_path / "run", after=[5.0 + place % 4 + changes[place % 2] for place in range(8)])
    page = read(write_report(folder.root).read_text())
    assert [span["class"] for span in page.all("span", "change")] == [f"change {style}"]


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
