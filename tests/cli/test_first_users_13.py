"""Problems of first users of the command line: names of recipes, options that are keys, data checks, an unwritable folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from retouch import cli
from retouch.config.packaged import available, near_names, short_name
from retouch.data.base import DataContext
from retouch.distributed.launching import launch
from retouch.recipe.catalogue import summaries
from retouch.recipe.recipe import load

ROOT = Path(__file__).parents[2]


def failure(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(list(words)) == 2
    return capsys.readouterr().err


def test_fault_13_recipes_lists_what_each_recipe_trains_and_needs(capsys: pytest.CaptureFixture[str]) -> None:
    found = {each.name: each for each in summaries()}
    assert list(found) == [short_name(name) for name in available()]
    grpo = found["sd3/ocr-grpo"]
    assert (grpo.trains, grpo.rewards, grpo.hardware) == ("stable-diffusion-3.5-medium, LoRA", ("ocr",), "32 GPUs")
    assert grpo.twin == "sd3/ocr-grpo-playground"
    assert found["quickstart"].hardware == found["tiny-sd3"].hardware == "CPU"
    assert "APP__DATA_DIR" in found["emu3/sft_s"].variables
    assert all(each.trains and each.rewards and "APP__" not in each.trains for each in found.values())
    assert cli.main(["recipes", "sd3"]) == 0
    printed = capsys.readouterr().out
    assert "sd3/ocr-grpo " in printed
    assert "quickstart" not in printed


def test_fault_13_recipes_describes_a_recipe_that_is_given_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes", "sd3/ocr-grpo"]) == 0
    assert "retouch launch --nproc 8 sd3/ocr-grpo" in capsys.readouterr().out
    assert "did you mean quickstart?" in failure(capsys, "recipes", "quikstart")


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("quickstart", "60"),
        ("emu3/sft_think_s__rl_s-playground", "500 (supervised) + 150 (rl)"),
        ("qwen-image-edit/writer-grpo", "3 passes over the data"),
    ],
)
def test_fault_13_the_description_of_a_recipe_has_the_steps_of_each_phase(
    name: str, length: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["recipes", name]) == 0
    assert f"\nsteps: {length}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("quikstart", ["quickstart"]),
        ("recipes/quickstat.jsonnet", ["quickstart"]),
        ("ocr-grpo", ["flux2/ocr-grpo", "sd3/ocr-grpo"]),
        ("zzz", []),
    ],
)
def test_fault_13_near_names_are_suggested(typed: str, meant: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert near_names(typed)[: len(meant)] == meant
    said = failure(capsys, "train", typed)
    assert ("did you mean " + " or ".join(meant) in said) == bool(meant)
    assert "`retouch recipes` lists them" in said


def test_fault_13_every_recipe_is_read_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RETOUCH_ALLOW_IMPORTS")
    for each in summaries():
        load(each.name)
    assert len(load("tiny-sd3").data.build(DataContext()).train) == 6  # its list of prompts is part of the package


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--steps", "5"], "--set steps=5"),
        (["--learning-rate=1e-4", "--group_size", "4"], "--set learning_rate=1e-4 --set group_size=4"),
        (["--policy.train.rank", "8"], "--set policy.train.rank=8"),
    ],
)
def test_fault_13_a_recipe_key_as_an_option_suggests_set(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["train", "quickstart", *words])
    assert end.value.code == 2
    assert f"keys of the recipe are changed with: {says}\n" in capsys.readouterr().err


def test_fault_13_launch_does_not_train_on_the_cpu_when_gpus_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"--gpus 0: no CUDA device was found.*; leave --gpus away to use the CPU"):
        launch(1, [0], ["recipes"], logs=tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"--gpus 1,2: there is no CUDA device 2; this machine has 2, from 0 to 1"):
        launch(1, [1, 2], ["recipes"], logs=tmp_path)


@pytest.mark.parametrize("engine", ["own", "ray"])
def test_fault_13_serve_does_not_use_the_cpu_when_gpus_are_named(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = ["serve", "share:red", "--port", "0", "--logs", str(tmp_path / "logs"), "--gpus", "0,1", "--engine", engine]
    assert "--gpus 0,1: no CUDA device was found" in failure(capsys, *words)
    assert not (tmp_path / "logs").exists()


def folder_of_images(folder: Path, *, rows: int, lines: str) -> None:
    folder.mkdir()
    for number in range(rows):
        Image.new("RGBA", (16, 16), (number, 0, 0, 255)).save(folder / f"{number}.png")
    (folder / "metadata.jsonl").write_text("".join(lines % (number, number) + "\n" for number in range(rows)))


def test_fault_13_data_check_folds_equal_findings_and_counts_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder_of_images(tmp_path / "photos", rows=12, lines='{"file_name": "%d.png", "instruction": "make it %d times redder"}')
    assert cli.main(["data", "check", str(tmp_path / "photos")]) == 0
    folded = capsys.readouterr().out.splitlines()
    assert folded[-1] == f"{tmp_path / 'photos'}: 12 rows read, 0 errors, 12 notes"
    assert folded[-2].endswith("and 9 more notes like this one, the last in line 12; --all lists them")
    assert len(folded) == 5
    assert cli.main(["data", "check", str(tmp_path / "photos"), "--all"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 13


@pytest.mark.parametrize("as_recipe", [False, True])
def test_data_check_names_a_known_test_set(as_recipe: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "gedit-bench"
    folder_of_images(folder, rows=2, lines='{"file_name": "%d.png", "instruction": "make it %d times redder"}')
    words = ["photos", "--set", f"data.path={folder}"] if as_recipe else [str(folder)]
    assert cli.main(["data", "check", *words]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{folder} is GEdit-Bench, a test set")


def test_fault_13_data_check_takes_the_columns_of_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder_of_images(tmp_path / "photos", rows=3, lines='{"file_name": "%d.png", "request": "make it %d times redder"}')
    changes = [f"data.path={tmp_path / 'photos'}", 'data.columns={"instruction": "request"}']
    words = [word for change in changes for word in ("--set", change)]
    assert cli.main(["data", "check", str(tmp_path / "photos")]) in (1, 2)
    capsys.readouterr()
    assert cli.main(["data", "check", "photos", *words]) == 0
    assert "3 rows read, 0 errors" in capsys.readouterr().out


def test_fault_13_data_check_of_a_missing_path_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such file or folder" in failure(capsys, "data", "check", str(tmp_path / "none"))


def test_fault_13_python_m_retouch_works_and_a_closed_pipe_prints_no_error(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = f"{sys.executable} -m retouch recipes | head -1"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("name ")
    assert done.stderr == ""


def completions(script: str, *words: str) -> list[str]:
    line = f"{script}\nCOMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _retouch; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout.split()


def test_fault_13_the_shell_completes_commands_options_and_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert completions(script, "retouch", "tra") == ["train"]
    assert completions(script, "retouch", "train", "sd3/ocr") == ["sd3/ocr-grpo-playground", "sd3/ocr-grpo"]
    assert completions(script, "retouch", "train", "--fr") == ["--fresh"]
    assert completions(script, "retouch", "data", "ch") == ["check"]
    assert cli.main(["completion", "zsh"]) == 0
    assert "bashcompinit" in capsys.readouterr().out
    assert cli.main(["completion", "fish"]) == 0
    script = capsys.readouterr().out
    assert "complete -c retouch -n '__fish_seen_subcommand_from train' -l fresh" in script
    assert "95 % intervals" in script
    assert "%%" not in script


@pytest.mark.parametrize("out", ["/proc/nowhere", "{tmp}/file", "{tmp}/file/below"])
def test_fault_13_an_unwritable_output_folder_is_reported(out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    place = out.format(tmp=tmp_path)
    said = failure(capsys, "train", "quickstart", "--set", f"out={place}")
    assert "Traceback" not in said
    assert place in said
    assert "choose another folder" in said
    assert (f"out: the folder {place}/quickstart cannot be created" in said) == place.startswith("/proc")
