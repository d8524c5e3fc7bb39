"""Custom rewards as new users write them: errors report file, line, reward and sample; lists and plain functions are accepted."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from retouch import cli
from retouch.config.imports import import_class
from retouch.distributed.ranks import Ranks
from retouch.recipe.recipe import parse
from retouch.rewards.function import ImportedReward
from retouch.rewards.judging import RewardScorer
from retouch.rewards.kinds import KINDS
from retouch.run.build import assemble
from retouch.types import Sample, Task
from retouch_plan.checks import check_scoring
from retouch_worlds.data import PlaygroundData

HERE = "test_first_users_10"
MODULE = """
import torch
from retouch.types import Column


class Red:
    columns = {"red": Column(0.0, 1.0)}

    def __call__(self, samples):
        return {"red": torch.tensor([1 / (sample.task.id != "b") for sample in samples])}


class Listed:
    columns = {"listed": Column(0.0, 1.0)}

    def __call__(self, samples):
        return [None if sample.task.id == "b" else 0.25 for sample in samples]


class Text(Listed):
    def __call__(self, samples):
        return "good"


class Wild(Listed):
    def __call__(self, samples):
        return [0.5 if sample.task.id == "a" else 7.0 for sample in samples]


class Words(Listed):
    def __call__(self, samples):
        return ["good"] * len(samples)


class Missing(Listed):
    def __call__(self, samples):
        return {"listed": [None if sample.task.id == "b" else 0.25 for sample in samples]}


class Wordy(Listed):
    def __call__(self, samples):
        return {"listed": [0.25, "good", 0.5]}


class OnlyBatches(Listed):
    def __call__(self, samples):
        if len(samples) == 1:
            raise IndexError("one sample")
        raise ZeroDivisionError("the real error")


class Unmade(Listed):
    def __init__(self):
        raise KeyError("path")


class Strong(Listed):
    def __init__(self, strength, *, device="cpu", scale=1.0):
        self.strength = strength


class Anything(Listed):
    def __init__(self, **options):
        self.options = options


def plain(images, prompts, **kwargs):
    return [len(prompt) / 10 for prompt in prompts]


def broken(images, **kwargs):
    return [image.brightness for image in images]


def single(images, **kwargs):
    return 0.5


def misnamed(image, **kwargs):
    return [0.5]


def quoted(images, **kwargs):
    return ["0.5"] * len(images)


def titled(images, title, photographer, **kwargs):
    return [0.5] * len(images)
"""

DOCUMENT = {
    **{"name": "mine", "steps": 1, "tasks_per_step": 1, "group_size": 2, "learning_rate": 1e-4},
    "policy": {"kind": "denoising", "model": {"kind": "playground"}, "train": {"kind": "full"}},
    "rollout": {"num_steps": 3, "transition": {"kind": "cps", "noise_level": 0.7}},
    "data": {"kind": "playground", "count": 4, "complexity": [1]},
    "reward": {"kind": "import", "class": "rw:broken", "combine": {"broken": 1}},
    "objective": {"kind": "policy_gradient", "clip_low": 1e-4, "clip_high": 1e-4},
    "advantage": {"kind": "group"},
}


@pytest.fixture
def rw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "rw.py"
    file.write_text(MODULE)
    (tmp_path / "unwritten.py").write_text("import torch\n\ndef half(:\n")
    (tmp_path / "failing.py").write_text("import torch\n\nWEIGHTS = torch.zeros(2)[5]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("RETOUCH_ALLOW_IMPORTS", "rw,unwritten,failing,__main__")
    monkeypatch.delitem(sys.modules, "rw", raising=False)
    return file


def samples() -> list[Sample]:
    return [Sample(Task(name, f"paint {name}"), Image.new("RGB", (8, 8))) for name in "abc"]


def section(name: str) -> Any:
    return ImportedReward.model_validate({"kind": "import", "class": f"rw:{name}"})


def scored(reward: Any, combine: Mapping[str, float]) -> Any:
    scorer = RewardScorer(reward, dict(combine))
    try:
        return scorer.submit(samples()).result(timeout=30)
    finally:
        scorer.close()


def line_of(file: Path, text: str) -> int:
    return 1 + next(number for number, line in enumerate(file.read_text().splitlines()) if text in line)


def test_fault_10_an_error_inside_several_reports_reward_file_line_and_sample(rw: Path) -> None:
    parts = {"mine": {"kind": "import", "class": "rw:Red"}, "size": {"kind": "compressibility"}}
    several = KINDS.load("several")
    assert several is not None
    made: Any = several.model_validate_json(json.dumps({"kind": "several", "rewards": parts}))
    with pytest.raises(ValueError, match="raised ZeroDivisionError: division by zero") as caught:
        scored(made.build(), {"mine/red": 1.0})
    said = str(caught.value)
    assert f"reward mine, rw:Red ({rw}:{line_of(rw, 'class Red')})" in said
    assert f"{rw}:{line_of(rw, '1 / (sample')}, in " in said
    assert "sample: task 'b', instruction 'paint b'" in said
    with pytest.raises(ValueError, match="sample: task 'b'"):
        made.build()(samples())


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("broken", "reward mine: reward function broken raised AttributeError"),
        ("single", "reward mine: reward function single returned float; return a list of floats"),
        ("misnamed", "reward mine: reward function misnamed has the argument 'image', but .*; did you mean 'images'"),
    ],
)
def test_an_error_of_a_function_inside_several_reports_the_name_of_its_part(rw: Path, function: str, says: str) -> None:
    several: Any = KINDS.load("several")
    parts = {"mine": {"kind": "import", "class": f"rw:{function}"}, "size": {"kind": "compressibility"}}
    made = several.model_validate_json(json.dumps({"kind": "several", "rewards": parts}))
    with pytest.raises(ValueError, match=says):
        scored(made.build(), {"size/compressibility": 1.0})


def test_a_misspelled_function_is_refused_with_the_nearest_name(rw: Path) -> None:
    with pytest.raises(ValueError, match=r"rw has no class or function sinlge; did you mean single\?"):
        section("sinlge").build()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            {"strenght": 0.5, "strength": 1},
            "args.strenght: unknown argument; the constructor takes strength, device, scale; did you mean 'strength'?",
        ),
        ({"other": 0.5, "strength": 1}, "args.other: unknown argument; the constructor takes strength, device, scale"),
        ({"scale": 2.0}, "args.strength: missing; the constructor needs this argument"),
    ],
)
def test_a_wrong_constructor_argument_is_refused_with_its_key_and_the_accepted_arguments(
    rw: Path, args: dict[str, Any], says: str
) -> None:
    own = ImportedReward.model_validate({"kind": "import", "class": "rw:Strong", "args": args})
    with pytest.raises(ValueError, match=re.escape(f"rw:Strong: {says}") + "$"):
        own.build()
    parts = {"mine": {"kind": "import", "class": "rw:Strong", "args": args}, "size": {"kind": "compressibility"}}
    key, text = says.split(": ", 1)
    with pytest.raises(ValueError, match=re.escape(f"reward.rewards.mine.{key}: rw:Strong: {text}")):
        parse({**DOCUMENT, "reward": {"kind": "several", "rewards": parts, "combine": {"size/compressibility": 1}}})


def test_constructor_arguments_that_fit_are_accepted(rw: Path) -> None:
    for name, args in (
        ("Strong", {"strength": 1}),
        ("Strong", {"strength": 1, "scale": 2, "device": "cpu"}),
        ("Anything", {"a": 1}),
    ):
        ImportedReward.model_validate({"kind": "import", "class": f"rw:{name}", "args": args}).build()


def test_text_as_the_score_of_a_function_raises_with_function_file_and_value(rw: Path) -> None:
    says = f"reward function quoted ({rw}:{line_of(rw, 'def quoted')}) returned '0.5' as a score, which is text; return a number"
    with pytest.raises(ValueError, match=re.escape(says)):
        scored(section("quoted").build(), {"quoted": 1.0})


@pytest.mark.parametrize("column", ["photograper", "photographer"])
def test_an_argument_that_is_no_column_of_the_data_is_refused_before_the_model_is_loaded(
    rw: Path, column: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = rw.parent / "data"
    data.mkdir()
    rows = [
        {"file_name": f"{number}.png", "instruction": f"paint {number}", "title": "a", column: "someone"} for number in range(8)
    ]
    for number, row in enumerate(rows):
        Image.new("RGB", (24, 24), (number, 0, 0)).save(data / row["file_name"])
    (data / "metadata.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    changes = {
        "data": {"kind": "folder", "path": str(data), "held_out": 2},
        "reward": {"kind": "import", "class": "rw:titled", "combine": {"titled": 1}},
        "device": "cpu",
    }
    recipe = parse({**DOCUMENT, **changes})

    def load(*arguments: object) -> None:
        raise RuntimeError("the model is loaded")

    monkeypatch.setattr("retouch.run.build.assemble_policy", load)
    if column == "photographer":
        with pytest.raises(RuntimeError, match="the model is loaded"):
            assemble(recipe, Ranks())
        return
    says = (
        "reward function titled has the argument 'photographer', but the data set has no such column; its columns are photograper, "
    )
    with pytest.raises(ValueError, match=f"{says}title, and .*; did you mean 'photograper'"):
        assemble(recipe, Ranks())


def test_fault_10_a_list_is_the_scores_of_the_only_column(rw: Path) -> None:
    found = scored(section("Listed").build(), {"listed": 1.0})
    assert found.rewards[[0, 2]].tolist() == [0.25, 0.25]
    assert torch.isnan(found.rewards[1])


def test_none_in_the_list_of_a_column_is_a_missing_score(rw: Path) -> None:
    found = scored(section("Missing").build(), {"listed": 1.0})
    assert found.rewards[[0, 2]].tolist() == [0.25, 0.25]
    assert torch.isnan(found.rewards[1])


def test_the_error_of_a_batch_is_reported_if_single_samples_raise_another_error(rw: Path) -> None:
    with pytest.raises(ValueError, match="raised ZeroDivisionError: the real error") as caught:
        scored(section("OnlyBatches").build(), {"listed": 1.0})
    assert "the error occurs with 3 samples at once, but with none of the first 64 samples alone" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Text", "returned str; return a dictionary with a tensor for each column: 'listed', or a list of numbers"),
        ("Words", "column 'listed': too many dimensions 'str'; return a number for each sample, NaN if it is missing"),
        ("Wordy", "column 'listed': must be real number, not str; return a number for each sample, NaN if it is missing"),
        ("Wild", "column 'listed' is 7.0, outside its declared range 0.0 to 1.0; declare the true range (task 'b')"),
    ],
)
def test_fault_10_invalid_return_values_raise_with_class_file_and_line(name: str, says: str, rw: Path) -> None:
    with pytest.raises(ValueError, match="listed") as caught:
        scored(section(name).build(), {"listed": 1.0})
    assert says in str(caught.value)
    assert f"rw:{name} ({rw}:{line_of(rw, f'class {name}')})" in str(caught.value)


def test_fault_10_a_plain_function_is_a_reward(rw: Path) -> None:
    assert scored(section("plain").build(), {"plain": 1.0}).rewards.tolist() == pytest.approx([0.7, 0.7, 0.7])
    with pytest.raises(ValueError, match="reward function broken raised AttributeError") as caught:
        scored(section("broken").build(), {"broken": 1.0})
    assert f"{rw}:{line_of(rw, 'image.brightness')}" in str(caught.value)
    with_args = ImportedReward.model_validate({"kind": "import", "class": "rw:plain", "args": {"a": 1}})
    with pytest.raises(ValueError, match="a function, so args must be empty"):
        with_args.build()


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("rw:Unmade", "rw:Unmade: its constructor raised KeyError: 'path'"),
        ("unwritten:Red", "importing unwritten raised SyntaxError"),
        ("failing:Red", "importing failing raised IndexError"),
    ],
)
def test_fault_10_errors_of_an_import_or_a_constructor_report_file_and_line(path: str, says: str, rw: Path) -> None:
    with pytest.raises(ValueError, match=r"\.py:\d+") as caught:
        ImportedReward.model_validate({"kind": "import", "class": path}).build()
    assert says in str(caught.value)


def test_fault_10_a_class_of_main_is_found_in_a_script_or_its_absence_raises(rw: Path) -> None:
    with pytest.raises(ValueError, match=r"save the class in a file mine.py and name it mine:Red"):
        import_class("__main__:Red")
    script = "from retouch.config.imports import import_class\nclass Red: pass\nprint(import_class('__main__:Red') is Red)"
    (rw.parent / "script.py").write_text(script)
    done = subprocess.run([sys.executable, "script.py"], cwd=rw.parent, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_fault_10_doctor_reports_a_reward_that_raises_with_file_and_line(rw: Path) -> None:
    recipe = parse({**DOCUMENT, "reward": {"kind": "import", "class": "rw:broken", "combine": {"broken": 1}}})
    tasks = PlaygroundData(count=1, complexity={1: 1.0}).tasks(in_turn=True)[:]
    finding = check_scoring(recipe, type("Sets", (), {"train": tasks})())
    assert finding.status == "FAILED"
    assert f"{rw}:{line_of(rw, 'image.brightness')}" in finding.text


def test_fault_10_score_command_prints_reward_errors_without_traceback(rw: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("RGB", (8, 8)).save(rw.parent / "a.png")
    assert cli.main(["score", "rw:broken", "--image", str(rw.parent / "a.png")]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "reward function broken raised AttributeError" in said
