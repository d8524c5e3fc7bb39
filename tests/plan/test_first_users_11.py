"""Problems of first users of `retouch doctor`: missing variables, weights and files, advice that does not fit, time and cost."""

import json
import os
import re
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from retouch import cli
from retouch.config.packaged import available
from retouch.recipe.recipe import load
from retouch.records.folder import RunFolder
from retouch_judge.calls import Calls
from retouch_plan.checks import check_data, check_scoring, future_weights
from retouch_plan.doctor import DoctorOptions, _with_known_size, next_steps
from retouch_plan.dry_run import DryPhase, hours
from retouch_plan.estimate import cost_of, time_of
from retouch_plan.findings import failed
from retouch_plan.machines import find_machine
from retouch_plan.meter import Stage, Work
from warm_python import python

QWEN2 = "Qwen/Qwen2-VL-7B-Instruct"
VARIABLES = ("APP__DATA_DIR", "APP__BASE_EXP_DIR", "APP__REWARD_FUNCTION_API_BASE", "APP__RUN_NAME")


@pytest.mark.parametrize("command", ["doctor", "train"])
def test_fault_11_all_missing_variables_are_reported_at_once(command, monkeypatch, capsys):
    for name in VARIABLES:
        monkeypatch.delenv(name)
    assert cli.main([command, "emu3/sft_s__rl_s"]) == 2
    said = capsys.readouterr().err
    assert "  APP__REWARD_FUNCTION_API_BASE: address of the server of the judge, http://HOST:PORT\n" in said
    assert all(f"\n  {name}: " in said for name in VARIABLES)
    assert "no comment" not in said
    assert "manifestification" not in said


def test_fault_11_fix_for_a_missing_prompt_list_is_a_file_and_not_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ((finding, _),) = check_data(load("sd3/ocr-grpo"))
    assert (finding.status, finding.fix) == ("FAILED", "--set data.path=FILE.txt")
    ((finding, _),) = check_data(load("qwen-image-edit/flow-grpo", ["data.kind=folder", "data.path=photos"]))
    assert finding.fix == "--set data.path=DIR"
    assert any("emu3" in name for name in available())


def doctor(capsys, *words):
    assert cli.main(["doctor", *words]) == 1
    return capsys.readouterr().out.splitlines()


def test_fault_11_the_command_that_makes_a_missing_export_is_named(capsys):
    start = f"{os.environ['APP__BASE_EXP_DIR']}/sft_s"
    lines = doctor(capsys, "emu3/sft_s__rl_s", "--device", "h200", "--no-rehearsal")
    (missing,) = (line for line in lines if line.startswith("FAILED  weights "))
    assert f"{start}/exported/writer does not exist yet: there is no run {start}. " in missing
    assert missing.endswith("The dry run uses a model of its size, BAAI/Emu3-Stage1")
    assert "next: retouch launch --nproc 8 emu3/sft_s  (weights)" in lines


def test_fault_11_base_model_of_a_future_export_is_read_from_its_run_or_given(tmp_path):
    made = tmp_path / "runs" / "mine"
    RunFolder(made).write_recipe({"policy": {"model": {"path": "Qwen/Qwen2.5-VL-3B-Instruct"}}})
    path = made / "somewhere" / "writer"
    base, _, fix = future_weights(str(path))
    assert (base, fix) == ("Qwen/Qwen2.5-VL-3B-Instruct", f"retouch export {made} --to {made}/exported")
    substituted, _ = _with_known_size(load("sd3/prompt-enhancer", [f"policy.model.path={path}"]), None)
    assert substituted.policy.model.source == base
    for missing, given, fix in (
        ("a/b/c", None, "--base MODEL"), ("a/b/c", QWEN2, "train the model that this recipe starts from"),
        ("a/nobody-knows/exported/writer", None, "train and export that run, or give --base MODEL for its size"),
    ):  # fmt: skip
        found, text, command = future_weights(missing, base=given)
        assert (found, command) == (given, fix)
        assert ("The dry run uses a model" in text) == (given is not None)


def test_fault_11_a_base_is_asked_for_if_weights_are_missing(capsys):
    words = ["sd3/prompt-enhancer", "--device", "h100", "--set", "policy.model.path=some/where/else"]
    assert "next: retouch doctor sd3/prompt-enhancer --set policy.model.path=some/where/else --device h100 --base MODEL" in doctor(
        capsys, *words
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "weights"),
    [
        (["emu3/sft_s__rl_s", "--device", "h200"], "Emu3-Stage1"),
        (
            ["sd3/prompt-enhancer", "--device", "h100", "--set", "policy.model.path=some/where/else", "--base", QWEN2],
            "Qwen2-VL-7B-Instruct",
        ),
    ],
)
def test_fault_11_a_dry_run_uses_a_model_of_the_size_of_missing_weights(words, weights):
    done = subprocess.run([python(), "-m", "retouch", "doctor", *words], capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 1, done.stderr  # the weights are missing
    assert re.search(r"\nok      memory        needs [\d.]+ GB of the ", done.stdout)
    assert re.search(rf"\n +[\d.]+ GB  (trained weights|weights: {weights})\n", done.stdout)


def test_fault_11_downloadable_weights_are_not_reported_as_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    words = ["sd3/prompt-enhancer", "--device", "h100", "--no-rehearsal", "--base", QWEN2, "--set"]
    lines = doctor(capsys, *words, "policy.model.path=some/one")
    assert not any("does not exist yet" in line for line in lines)
    assert (
        "note    weights       the weights of some/one are not on this machine: they will be downloaded when training starts. "
        "The dry run uses a model of its size, Qwen/Qwen2-VL-7B-Instruct"
    ) in lines
    objective = {"kind": "opd", "teachers": {"large": {"model": "some/teacher"}}}
    of_teacher = ["quickstart", "--no-rehearsal", "--set", f"objective={json.dumps(objective)}"]
    there = "the weights of some/teacher are not on this machine: they will be downloaded when training starts"
    assert cli.main(["doctor", *of_teacher]) == 0
    assert f"note    weights       {there}" in capsys.readouterr().out.splitlines()
    lines = doctor(capsys, *words, "policy.model.path=mine/exported")
    assert any(line.startswith("FAILED  weights       mine/exported does not exist yet: there is no run mine") for line in lines)


def test_fault_11_next_steps_combine_overrides_and_list_other_commands():
    failures = [
        failed("sharding", "DeepSpeed is not installed", fix="pip install 'retouch[deepspeed]'"),
        failed("data", "photos: no such folder", fix="--set data.path=DIR"),
        failed("memory", "104 GB of 85 GB", fix="--set microbatch=1"),
    ]
    assert list(next_steps(failures, ["my recipe.jsonnet"])) == [
        "pip install 'retouch[deepspeed]'  (sharding)",
        "retouch doctor 'my recipe.jsonnet' --set data.path=DIR --set microbatch=1",
    ]
    finding = failed("reward", "no weights", fix="--set reward.path=weights/pickscore")
    (script,) = next_steps([finding], ["script.py"], script=True)
    assert script.startswith("give the Trainer of the script reward.path=weights/pickscore")
    assert list(next_steps(failures[:1], [])) == ["pip install 'retouch[deepspeed]'"]
    rows = [failed("data", "4 of 6 rows cannot be used", fix="retouch data check edits")]  # the recipe has the columns
    assert list(next_steps(rows, ["edits.jsonnet", "--set", "seed=1"])) == ["retouch data check edits.jsonnet --set seed=1"]
    assert list(next_steps(rows, ["script.py"], script=True)) == ["retouch data check edits"]
    asked = DoctorOptions(device="4090", base="a folder/model", price=2.5, estimate=True).words()
    assert list(next_steps([failed("memory", "does not fit", fix="--device h200")], ["quickstart"], asked)) == [
        "retouch doctor quickstart --base 'a folder/model' --price-per-hour 2.5 --device h200"
    ]
    assert DoctorOptions(estimate=True).words() == ["--estimate"]
    assert DoctorOptions(dry_run=False).words() == ["--no-rehearsal"]


def commands_of_the_guide():
    """The commands of docs/guides/photos.md that put PickScore and its processors into one folder."""
    lines = (Path(__file__).parents[2] / "docs/guides/photos.md").read_text().splitlines()
    return " && ".join(line for line in lines if line.startswith("hf download ") and line.endswith("--local-dir weights/pickscore"))


def test_fault_11_fix_for_missing_reward_weights_is_the_download_command(tmp_path, monkeypatch):
    """PickScore's repository has no tokenizer and no image processor, so two downloads into one folder are needed."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    finding = check_scoring(load("flux-kontext/photos"), None)
    assert (finding.status, finding.fix) == ("FAILED", commands_of_the_guide())
    assert finding.fix.count("hf download") == 2
    assert list(next_steps([finding], ["flux-kontext/photos"])) == [
        finding.fix,
        "retouch doctor flux-kontext/photos --set reward.rewards.pick.path=weights/pickscore",
    ]
    clip = ['reward={"kind": "clip", "combine": "cosine"}']
    finding = check_scoring(load("flux-kontext/photos", clip), None)
    assert (finding.fix, finding.then) == ("hf download openai/clip-vit-base-patch32", "")


def dry_run():
    """A dry run in which a step takes 36 s and an evaluation 60 s."""
    spent = {"rollout": 20.0, "update": 16.0, "evaluation": 60.0}
    stages = {name: Stage(Work(seconds=Counter({"matmul": each}))) for name, each in spent.items()}
    phase = DryPhase(name="rl", steps=1000, rows=8, stages=("rollout", "update"))
    return SimpleNamespace(stages=stages, world=8, phases=(phase,), evaluations=3)


def test_fault_11_time_and_cost_are_estimated():
    machine = find_machine("h100")
    found = dry_run()
    spent = time_of(load("sd3/ocr-grpo"), found, machine)
    assert spent.text.startswith("a step takes 36.00 s, and there are 1000; the run takes 10.1 h with 3 evaluations, on 8 x h100 (")
    calls = [Calls("reward", "m", 10, 2, 100, 10, dollars) for dollars in (12.5, 7.5, None)]
    cost = cost_of(hours(found, machine), gpus=8, price=2.5, calls=calls)
    assert cost.text.splitlines() == [
        "80.4 GPU hours: 10.1 h x 8 GPUs x $2.50 = $201.00",
        "judges: $20.00",
        "without a known price or number, and not counted: the calls to reward",
        "together: $221.00",
    ]
    assert cost_of(2.0, gpus=1, price=None, calls=[]).text == "2.0 GPU hours; --price-per-hour DOLLARS gives their price"


@pytest.mark.parametrize(
    "words",
    [
        ["--price-per-hour", "-1", "quickstart"], ["--estimate"], ["--price-per-hour", "nan", "quickstart"],
        ["--price-per-hour", "2", "quickstart", "--no-rehearsal"],
    ],
)  # fmt: skip
def test_fault_11_invalid_prices_and_estimates_without_a_recipe_are_rejected(words, capsys):
    assert cli.main(["doctor", *words]) == 2
    assert "--price-per-hour" in capsys.readouterr().err


@pytest.mark.slow
def test_fault_11_the_estimate_of_a_recipe_is_printed(tmp_path):
    profile = tmp_path / "mine.json"
    profile.write_text('{"name": "h200", "half": 7e14}')
    words = ["doctor", "sd3/ocr-grpo", "--device", str(profile), "--price-per-hour", "3"]
    # A fake accelerator stays in its process.
    done = subprocess.run([python(), "-m", "retouch", *words], capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 1, done.stderr  # its list of prompts is missing
    assert re.search(r"\nnote    time          a step takes [\d.]+ s, and there are 1000; the run takes [\d.]+ h ", done.stdout)
    assert "(measured, mine.json)" in done.stdout
    assert re.search(r"\nnote    cost          [\d,.]+ GPU hours: [\d.]+ h x 32 GPUs x \$3\.00 = \$[\d,.]+\n", done.stdout)


@pytest.mark.slow
def test_fault_11_a_recipe_is_estimated_after_its_trial_step():
    """In one process torch's autograd would not know the fake device, which is added after its first backward pass."""
    words = ["doctor", "quickstart", "--estimate"]
    done = subprocess.run([python(), "-m", "retouch", *words], capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "ok      trial step" in done.stdout
    assert "estimated for h100, because no GPU was named" in done.stdout
    assert re.search(r"\nok      memory        needs [\d.]+ GB of the 84\.93 GB of h100, in ", done.stdout)
    assert re.search(r"\nnote    time          a step takes [\d.]+ s, and there are 60; the run takes ", done.stdout)
