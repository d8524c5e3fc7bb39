"""A run folder that is started again: after an error, with a corrected recipe, with more steps, and while it has an owner."""

import json
import math
import os
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from typing import Any, ClassVar

import pytest
import torch
from PIL import ImageStat
from safetensors import safe_open

import retouch
from folder_faults import six_step_recipe
from kill_places import recipe as four_step_recipe
from retouch import cli
from retouch.recipe.recipe import parse
from retouch.records.folder import RunFolder
from retouch.records.ownership import NotOwner, Owner
from retouch.run import checkpoint
from retouch.run import step as loop
from retouch.run.evaluation import RunEvaluations
from retouch.run.session import open_session, run
from retouch.run.step import TooManyMissing
from retouch.types import Column
from retouch_view.live.runs import LiveRun
from tiny_recipes import SMALL


class Own:
    """A reward whose columns are known when it is built. It fails while ``broken``, and in one call. ``version``: its code."""

    columns: ClassVar[dict[str, Column]] = {"bright": Column(0.0, 1.0)}
    broken: ClassVar[bool] = False
    calls: ClassVar[int] = 0
    fails_at: ClassVar[int] = 0
    version: ClassVar[str] = "1"

    @property
    def fingerprint(self):
        return self.version

    def __call__(self, samples):
        Own.calls += 1
        if Own.broken:
            raise ValueError("the reward is broken")
        if Own.calls == Own.fails_at:
            raise KeyError("size")
        return {"bright": torch.tensor([ImageStat.Stat(sample.image.convert("L")).mean[0] / 255 for sample in samples])}


@pytest.fixture(autouse=True)
def _own(monkeypatch):
    monkeypatch.setenv("RETOUCH_ALLOW_IMPORTS", "test_starting_again")
    for name, value in {"broken": False, "calls": 0, "fails_at": 0, "version": "1"}.items():
        monkeypatch.setattr(Own, name, value)


def recipe(out, *, column=None, best_of_k=0, **changes):
    document = six_step_recipe(out, "mine").document()
    document["reward"] = {"kind": "import", "class": "test_starting_again:Own", "combine": {"bright": 1}}
    evaluation = {**document["eval"], "tasks": 2, "column": column, "best_of_k": best_of_k}
    return parse({**document, "steps": 1, "eval": evaluation, **changes})


def test_a_recipe_that_failed_before_its_first_step_can_be_corrected(tmp_path):
    wrong, right = recipe(tmp_path, column="overall", best_of_k=2), recipe(tmp_path, best_of_k=2)
    folder = RunFolder(wrong.folder)
    with pytest.raises(ValueError, match=r"no column 'overall', only bright; name one of them, or give null for the combined"):
        run(wrong, fresh=False)
    assert folder.recipe.exists()
    assert not folder.has_steps()
    assert run(right, fresh=False) == 0
    assert folder.has_steps()
    log = folder.log(0).read_text()
    stages = ["evaluating", "held-out tasks after step 0", "baselines: the best of 2 samples", "step 1/1"]
    assert sorted(stages, key=log.index) == stages
    changed = r"a run of another recipe:\n  eval\.column: None in the run, overall in the recipe\nGive .* with --set name=NAME,"
    with pytest.raises(ValueError, match=changed):
        run(wrong, fresh=False)


def test_fault_9_name_of_a_run_that_failed_in_its_first_step_can_be_reused(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise ValueError("the first step fails")

    folder = RunFolder(recipe(tmp_path).folder)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "accumulate", fail)
        with pytest.raises(ValueError, match="the first step fails"):
            run(recipe(tmp_path), fresh=False)
    assert [line["step"] for line in folder.read_evals()] == [0]
    assert not folder.has_steps()
    assert run(recipe(tmp_path, group_size=4, microbatch=4), fresh=False) == 0
    assert folder.has_steps()


def test_fault_9_reward_code_can_be_corrected_only_before_the_first_step(tmp_path, monkeypatch):
    made = recipe(tmp_path, trackers=["tensorboard"])
    folder = RunFolder(made.folder)
    monkeypatch.setattr(Own, "broken", True)
    with pytest.raises(ValueError, match="the reward is broken"):
        run(made, fresh=False)
    assert folder.tensorboard.exists()
    *_, error, sample = folder.log().read_text().splitlines()
    assert "test_starting_again.py" in error, "train.log ends with the error"
    assert "sample: task 'playground" in sample
    monkeypatch.setattr(Own, "broken", False)
    monkeypatch.setattr(Own, "version", "2")
    assert run(recipe(tmp_path), fresh=False) == 0
    monkeypatch.setattr(Own, "version", "3")
    with pytest.raises(ValueError, match="the judge is not the one that the run began with"):
        run(recipe(tmp_path, steps=2), fresh=False)


def test_fault_13_a_run_that_was_stopped_has_a_report(tmp_path, capsys):
    made = recipe(tmp_path, name="stopped", steps=4)
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


def test_run_folder_with_a_recipe_of_another_version_or_with_an_owner_raises_and_is_not_changed(tmp_path, capsys):
    made = recipe(tmp_path)
    folder = RunFolder(made.folder)
    folder.write_recipe({**made.document(), "data": {**made.document()["data"], "vain": 0.1}})
    before = folder.recipe.read_bytes()
    with pytest.raises(ValueError, match=r"(?s)mine contains a run whose recipe this version cannot read:.*data.vain.*--fresh"):
        run(made, fresh=False)
    assert folder.recipe.read_bytes() == before
    made, file = long_run(tmp_path), tmp_path / "recipe.json"
    file.write_text(made.model_dump_json())
    with closing(Owner(made.folder)):
        for fresh in ([], ["--fresh"]):
            assert cli.main(["train", str(file), *fresh]) == 2
            assert f"in use by process {os.getpid()}" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"mine", "run"}
    assert [path.name for path in made.folder.iterdir()] == ["owner.json"]


# More steps, and errors in later steps


@pytest.mark.slow
def test_an_extended_run_that_failed_in_its_last_evaluation_makes_it_at_the_next_start(tmp_path, monkeypatch):
    def fail(evaluations, step):
        raise TooManyMissing("the judge does not answer")

    folder = RunFolder(recipe(tmp_path).folder)
    assert run(recipe(tmp_path), fresh=False) == 0
    with monkeypatch.context() as failing:
        failing.setattr(RunEvaluations, "evaluate", fail)
        with pytest.raises(TooManyMissing):
            run(recipe(tmp_path, steps=2), fresh=False)
    assert LiveRun(folder.root).overview()["state"] == "failed"
    assert run(recipe(tmp_path, steps=2), fresh=False) == 0
    summary = folder.read_summary()
    assert (summary.steps, folder.read_evals()[-1]["step"]) == (2, 2)
    assert LiveRun(folder.root).overview()["state"] == "finished"
    for damaged in ("", "[]", '{"steps": 1}'):
        folder.summary.write_text(damaged)
        assert run(recipe(tmp_path, steps=2), fresh=False) == 0
        assert folder.read_summary() == summary


def test_steps_before_a_failing_reward_are_saved_and_the_corrected_run_repeats_the_uninterrupted_one(tmp_path, monkeypatch):
    whole, broken = (recipe(tmp_path / name, steps=2, checkpoints={"every": 100}) for name in ("whole", "broken"))
    assert run(whole, fresh=False) == 0
    monkeypatch.setattr(Own, "fails_at", Own.calls - 1)  # the last calls are step 2 and the last evaluation
    monkeypatch.setattr(Own, "calls", 0)
    with pytest.raises(ValueError, match=r"test_starting_again:Own .* raised KeyError: 'size'"):
        run(broken, fresh=False)
    folder = RunFolder(broken.folder)
    assert [line["step"] for line in folder.read_metrics()] == [1]
    assert checkpoint.latest(folder.checkpoints).name == "step-000001"
    assert "stopped after step 1, which is saved" in folder.log(0).read_text()
    assert run(broken, fresh=False) == 0
    assert folder.metrics.read_bytes() == RunFolder(whole.folder).metrics.read_bytes()
    assert [line["step"] for line in folder.read_evals()] == [line["step"] for line in RunFolder(whole.folder).read_evals()]


class Steady:
    """A reward of 1, except for the first task: it has 0 in the first call, and no score later."""

    columns: ClassVar[dict[str, Column]] = {"same": Column(0.0, 1.0)}

    def __init__(self):
        self.first, self.calls = "", 0

    def __call__(self, samples):
        self.first = self.first or samples[0].task.id
        self.calls += any(sample.task.id == self.first for sample in samples)
        again = math.nan if self.calls > 1 else 0.0
        return {"same": torch.tensor([again if sample.task.id == self.first else 1.0 for sample in samples])}


def test_gain_is_over_the_tasks_with_a_score_before_and_after(tmp_path):
    changes = {"out": str(tmp_path / "runs"), "device": "cpu", "trackers": [], "eval": {"tasks": 9}, "steps": 1}
    reward = {"kind": "import", "class": "test_starting_again:Steady", "combine": {"same": 1}}
    trainer = retouch.Trainer.from_recipe({**SMALL, **changes, "reward": reward}, progress=False)
    summary = trainer.train()
    assert (summary.before, summary.after, summary.gain, summary.gain_ci95) == (1, 1, 0, (0, 0))
    assert (summary.independent_tasks, summary.needed_tasks) == (8, None)
    assert [line["table"]["all"]["same"] for line in RunFolder(trainer.folder).read_evals()] == pytest.approx([8 / 9, 1.0])


IMITATE = {"objective": {"kind": "supervised"}, "group_size": 1}
WARM_UP = {"name": "first", "steps": 2, "learning_rate": 1e-2}


@pytest.mark.parametrize(
    ("phases", "moved"),
    [
        ([{**WARM_UP, **IMITATE}], False),
        ([{**WARM_UP, **IMITATE}, {"name": "skipped", "steps": 0, "objective": {"kind": "nft"}}], False),
        ([WARM_UP], True),
        pytest.param([WARM_UP, {"name": "skipped", "steps": 0, **IMITATE}], True, marks=pytest.mark.slow),
    ],
)
def test_reference_is_the_policy_after_the_last_warm_up_that_was_trained(phases, moved, tmp_path):
    policy = {key: value for key, value in SMALL["policy"].items() if key != "ema"}
    objective = {"kind": "policy_gradient", "clip_low": 1e-4, "clip_high": 1e-4, "kl": {"kind": "closed", "weight": 0.1}}
    shared = {"out": str(tmp_path), "device": "cpu", "trackers": [], "eval": {"tasks": 2}, "steps": None}
    document = {**SMALL, **shared, "policy": policy, "objective": objective, "phases": [*phases, {"name": "learn", "steps": 1}]}
    *_, last = retouch.Trainer.from_recipe(document, progress=False)
    assert (last.metrics["policy/kl"] > 0) == moved


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile warns of torch's own code
def test_a_compiled_run_resumes_and_exports_under_the_usual_names(tmp_path):
    policy: dict[str, Any] = {**SMALL["policy"], "compile": "regional", "gradient_checkpointing": True}
    file = tmp_path / "small.json"
    file.write_text(json.dumps({**SMALL, "out": str(tmp_path), "checkpoints": {"every": 1}, "policy": policy}))
    for steps in (1, 2):
        assert cli.main(["train", str(file), "--set", f"steps={steps}"]) == 0
    assert cli.main(["export", str(tmp_path / "small"), "--to", str(tmp_path / "export")]) == 0
    names: list[str] = []
    for written in tmp_path.rglob("*.safetensors"):
        with safe_open(written, framework="pt") as tensors:
            names += tensors.keys()
    assert len(names) > 500
    assert not [name for name in names if "_orig_mod" in name]
    assert [line["policy/ratio_max_first"] for line in RunFolder(tmp_path / "small").read_metrics()] == [0.0, 0.0]


# Two processes never train in one folder


COMMAND = [sys.executable, "-W", "ignore", "-m", "retouch.cli"]


def long_run(tmp_path):
    return four_step_recipe(tmp_path, "run", None).model_copy(update={"steps": 400})


@contextmanager
def training(made, tmp_path, *launch):
    """A process that trains the recipe, once it has taken two steps."""
    file = tmp_path / "recipe.json"
    file.write_text(made.model_dump_json())
    command = [*COMMAND, *(launch or ("train",)), str(file)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            for _ in range(1200):
                if len(RunFolder(made.folder).read_metrics()) >= 2:
                    break
                assert process.poll() is None, process.stderr.read().decode()[-2000:]
                time.sleep(0.05)
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_run_whose_folder_is_moved_stops_and_writes_nothing_more(tmp_path):
    made = long_run(tmp_path)
    with training(made, tmp_path) as first:
        made.folder.rename(tmp_path / "moved")
        assert first.wait(60) == 2
        said = first.stderr.read().decode()
    assert "the run folder was moved or deleted" in said
    assert "Traceback" not in said
    assert not made.folder.exists()


@pytest.mark.slow
def test_ranks_of_a_killed_launcher_end_and_release_the_run_folder(tmp_path):
    made = long_run(tmp_path)
    with training(made, tmp_path, "launch", "--nproc", "2") as first:
        first.kill()
        first.wait()
        end = time.monotonic() + 20
        while True:
            try:
                Owner(made.folder).close()
                break
            except NotOwner:
                assert time.monotonic() < end, "the ranks outlived their launcher"
                time.sleep(0.05)
    before = len(RunFolder(made.folder).read_metrics())
    time.sleep(2)
    assert len(RunFolder(made.folder).read_metrics()) == before
