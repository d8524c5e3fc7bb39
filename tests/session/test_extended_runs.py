"""A finished run whose ``steps`` is raised continues, and gets a new evaluation and summary at its new end."""

from pathlib import Path

import pytest

from folder_faults import six_step_recipe
from retouch.recipe.recipe import Recipe, parse
from retouch.records.folder import RunFolder
from retouch.run.evaluation import RunEvaluations
from retouch.run.session import run
from retouch.run.step import TooManyMissing
from retouch_view.live.runs import LiveRun


def of_steps(out: Path, steps: int) -> Recipe:
    return parse({**six_step_recipe(out, "extended").document(), "steps": steps})


def evaluated_steps(folder: RunFolder) -> list[int]:
    return [line["step"] for line in folder.read_evals()]


def fail(evaluations: RunEvaluations, step: int) -> None:
    raise TooManyMissing("the judge does not answer")


def test_an_extended_run_that_failed_in_its_last_evaluation_makes_it_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(of_steps(tmp_path, 1).folder)
    assert run(of_steps(tmp_path, 1), fresh=False) == 0
    with monkeypatch.context() as failing:
        failing.setattr(RunEvaluations, "evaluate", fail)
        with pytest.raises(TooManyMissing):
            run(of_steps(tmp_path, 2), fresh=False)
    assert LiveRun(folder.root).overview()["state"] == "stopped"
    assert run(of_steps(tmp_path, 2), fresh=False) == 0
    summary = folder.read_summary()
    assert summary is not None
    assert (summary.steps, evaluated_steps(folder)[-1]) == (2, 2)
    assert LiveRun(folder.root).overview()["state"] == "finished"


@pytest.mark.parametrize("damaged", ["", "[]", '{"steps": 1}'])
def test_a_finished_run_with_a_damaged_summary_writes_it_again(tmp_path: Path, damaged: str) -> None:
    recipe = of_steps(tmp_path, 1)
    folder = RunFolder(recipe.folder)
    assert run(recipe, fresh=False) == 0
    written = folder.read_summary()
    folder.summary.write_text(damaged)
    assert run(recipe, fresh=False) == 0
    assert folder.read_summary() == written
