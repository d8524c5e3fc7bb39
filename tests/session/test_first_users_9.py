"""The name of a run that failed before its first step can be reused; a run that was stopped has a report."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from folder_faults import six_step_recipe
from retouch import cli
from retouch.recipe.recipe import Recipe, parse
from retouch.records.folder import RunFolder
from retouch.run.session import open_session, run
from retouch.types import Column, Sample, Scores


class Own:
    """A reward that raises after ``calls`` calls; ``version`` is its code."""

    columns: ClassVar[dict[str, Column]] = {"own": Column(0.0, 1.0)}
    calls: ClassVar[int] = 0
    version: ClassVar[str] = "1"

    @property
    def fingerprint(self) -> str:
        return self.version

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        Own.calls -= 1
        if Own.calls < 0:
            raise ValueError("the reward is broken")
        return {"own": torch.full((len(samples),), 0.5)}


@pytest.fixture(autouse=True)
def _own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETOUCH_ALLOW_IMPORTS", "test_first_users_9")
    monkeypatch.setattr(Own, "calls", 0)
    monkeypatch.setattr(Own, "version", "1")


def recipe(out: Path, **changes: Any) -> Recipe:
    document = six_step_recipe(out, "mine").document()
    document["reward"] = {"kind": "import", "class": "test_first_users_9:Own", "combine": {"own": 1}}
    return parse({**document, "steps": 1, "eval": {**document["eval"], "column": None}, **changes})


def test_fault_9_name_of_a_run_that_failed_in_its_first_evaluation_can_be_reused(tmp_path: Path) -> None:
    broken = recipe(tmp_path, trackers=["tensorboard"])
    with pytest.raises(ValueError, match="the reward is broken"):
        run(broken, fresh=False)
    assert RunFolder(broken.folder).tensorboard.exists()
    log = RunFolder(broken.folder).log().read_text()
    assert "test_first_users_9.py" in log.splitlines()[-2], "train.log ends with the error"
    assert "sample: task 'playground" in log.splitlines()[-1]
    corrected = recipe(tmp_path, reward={"kind": "share", "channel": "red", "combine": {"share": 1}}, learning_rate=1e-4)
    assert run(corrected, fresh=False) == 0
    assert RunFolder(broken.folder).read_recipe()["recipe"]["reward"]["kind"] == "share"


def test_fault_9_name_of_a_run_that_failed_in_its_first_step_can_be_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = recipe(tmp_path)
    folder = RunFolder(broken.folder)
    needed = calls_before_the_first_step(recipe(tmp_path / "other"), monkeypatch)
    monkeypatch.setattr(Own, "calls", needed)
    with pytest.raises(ValueError, match="the reward is broken"):
        run(broken, fresh=False)
    assert [line["step"] for line in folder.read_evals()] == [0]
    assert not folder.has_steps()
    monkeypatch.setattr(Own, "calls", 1000)
    assert run(recipe(tmp_path, group_size=4, microbatch=4), fresh=False) == 0
    assert folder.has_steps()
    with pytest.raises(ValueError, match="a run of another recipe"):
        run(broken, fresh=False)


def calls_before_the_first_step(made: Recipe, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(Own, "calls", 1000)
    with open_session(made, fresh=False) as session:
        assert next(iter(session.steps())).step == 1
    lines = RunFolder(made.folder).read_evals()
    assert [line["step"] for line in lines] == [0]
    in_the_step = 1
    return 1000 - Own.calls - in_the_step


def test_fault_9_reward_code_can_be_corrected_only_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = recipe(tmp_path)
    with pytest.raises(ValueError, match="the reward is broken"):
        run(made, fresh=False)
    monkeypatch.setattr(Own, "calls", 1000)
    monkeypatch.setattr(Own, "version", "2")
    assert run(made, fresh=False) == 0
    monkeypatch.setattr(Own, "version", "3")
    with pytest.raises(ValueError, match="the judge is not the one that the run began with"):
        run(recipe(tmp_path, steps=2), fresh=False)


def test_fault_9_name_of_a_run_with_a_missing_data_file_can_be_reused(tmp_path: Path) -> None:
    data = {"kind": "prompts", "path": str(tmp_path / "none.txt"), "held_out": 1}
    model = {"kind": "import", "class": "retouch_worlds.models.tiny_sd3:TinySD3", "args": {"seed": 0}}
    policy = {"kind": "denoising", "model": model, "train": {"kind": "full"}}
    changes = {"data": data, "policy": policy, "reward": {"kind": "share", "channel": "red", "combine": {"share": 1}}}
    with pytest.raises(ValueError, match=r"none\.txt"):
        run(recipe(tmp_path, **changes), fresh=False)
    assert run(six_step_recipe(tmp_path, "mine"), fresh=False) == 0


def test_fault_13_a_run_that_was_stopped_has_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = six_step_recipe(tmp_path, "stopped")
    folder = RunFolder(made.folder)
    with open_session(made, fresh=False) as session:
        for _ in session.steps():
            session.request.stop()
    assert session.done < session.parts.steps
    assert session.code > 128
    assert folder.report.is_file()
    folder.report.unlink()
    capsys.readouterr()
    assert cli.main(["report", str(folder.root)]) == 0
    assert capsys.readouterr().out.strip() == str(folder.report)
    assert "stopped" in folder.report.read_text()
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    assert json.loads(folder.recipe.read_text())
