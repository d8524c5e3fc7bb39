"""A reward that raises an error in a later step: the steps before it are saved, and the corrected run continues after them."""

from pathlib import Path
from typing import Any

import pytest

import tiny_watched
from failing_reward import Brightness
from retouch.recipe.recipe import Recipe, parse
from retouch.records.folder import RunFolder
from retouch.run import checkpoint
from retouch.run.session import run


def recipe(out: Path, **changes: Any) -> Recipe:
    """A recipe of four steps. Only the last step is due for a checkpoint."""
    document = tiny_watched.recipe(out, limit=None, on_alarm="note")
    del document["watch"]
    reward = {"kind": "import", "class": "failing_reward:Brightness", "combine": {"light": 1}}
    return parse({**document, "reward": reward, "checkpoints": {"every": 100, "keep": 2}, **changes})


@pytest.fixture(autouse=True)
def working(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Brightness, "calls", 0)


@pytest.mark.parametrize("evaluates", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_steps_before_a_failing_reward_are_saved_and_the_corrected_run_repeats_the_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluates: int
) -> None:
    evaluation = {"tasks": 4, "complexity": [1, 2], "every": evaluates, "best_of_k": 0}
    whole = recipe(tmp_path / "whole", eval=evaluation)
    assert run(whole, fresh=False) == 0
    calls = Brightness.calls
    broken = recipe(tmp_path / "broken", eval=evaluation)
    # The last calls are step 4 and the last evaluation. With ``evaluates``, the call before them is the evaluation of step 3.
    first_broken = calls - (2 if evaluates else 1)
    monkeypatch.setattr(Brightness, "calls", 0)
    monkeypatch.setenv("BROKEN_FROM", str(first_broken))
    with pytest.raises(ValueError, match=r"failing_reward:Brightness .* raised KeyError: 'size'"):
        run(broken, fresh=False)
    folder = RunFolder(broken.folder)
    assert [line["step"] for line in folder.read_metrics()] == [1, 2, 3]
    assert checkpoint.latest(folder.checkpoints).name == "step-000003"
    assert "stopped after step 3, which is saved" in folder.log(0).read_text()
    monkeypatch.delenv("BROKEN_FROM")
    assert run(broken, fresh=False) == 0
    assert folder.metrics.read_bytes() == RunFolder(whole.folder).metrics.read_bytes()
    assert [line["step"] for line in folder.read_evals()] == [line["step"] for line in RunFolder(whole.folder).read_evals()]
