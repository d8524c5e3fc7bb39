"""The command line: help without heavy imports, short error messages, and arguments that are passed on unchanged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from retouch import cli
from retouch.config.packaged import available, near_names, short_name, summaries
from retouch.data.base import DataContext
from retouch.distributed.launching import launch
from retouch.recipe.recipe import load


def test_gomp_spincount_is_set_before_torch_is_imported_unless_the_user_sets_it():
    """libgomp reads this variable, which makes idle threads release their core early, when torch is imported."""
    code = """
import os, sys
from retouch.cli import main
main(['recipes', 'quickstart'])
print('torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT'))
"""
    for set_by_user, expected in ({}, "2000"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None"):
        inherited = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
        done = subprocess.run(
            [sys.executable, "-c", code], env={**inherited, **set_by_user}, capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines()[-1] == f"False {expected}"


def test_every_command_has_help(capsys):
    for command in ("train", "launch", "eval", "sample", "doctor", "recipes", "tools playground", "data check", "serve"):
        with pytest.raises(SystemExit) as end:
            cli.main([*command.split(), "--help"])
        assert end.value.code == 0
        assert f"usage: retouch {command}" in capsys.readouterr().out


def test_an_internal_exception_is_raised_and_not_reported_as_a_user_error(monkeypatch):
    def broken(path, overrides):
        json.loads("{")

    from retouch.recipe import recipe

    monkeypatch.setattr(recipe, "load", broken)
    with pytest.raises(json.JSONDecodeError):
        cli.main(["doctor", "recipes/quickstart.jsonnet"])


FAILING_DATA = """
from retouch.data.base import ImageData


class Lines(ImageData):
    def rows(self, *, seed):
        return Rows()


class Rows:
    problems = ()

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"a": 1}["b"]
"""


def test_an_error_in_imported_code_prints_its_file_and_line_without_a_traceback(tmp_path, monkeypatch, capsys):
    (tmp_path / "failing_data.py").write_text(FAILING_DATA)
    monkeypatch.syspath_prepend(tmp_path)
    own = 'data={"kind": "import", "class": "failing_data:Lines"}'
    command = ["train", "photos", "--set", f"out={tmp_path / 'runs'}", "--set", own, "--allow-import", "failing_data"]
    assert cli.main(command) == 2
    printed = capsys.readouterr().err
    assert "retouch train: failing_data raised KeyError: 'b'" in printed
    assert f"{tmp_path / 'failing_data.py'}:17, in __getitem__" in printed
    assert "Traceback" not in printed
    with pytest.raises(KeyError):
        cli.main([*command, "--debug"])


def test_launch_passes_the_recipe_or_command_to_the_ranks(tmp_path, monkeypatch):
    from retouch.distributed import launching

    calls, owned = [], []

    def record(nproc, gpus, argv, *, logs, owner=None):
        calls.append((nproc, gpus, argv, logs))
        owned.append(None if owner is None else owner.path.parent)
        return 5

    monkeypatch.setattr(launching, "launch", record)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["launch", "--nproc", "2", "recipes/quickstart.jsonnet", "--set", f"out={tmp_path}", "--set", "name=mine"]) == 5
    assert cli.main(["launch", "--nproc", "3", "--gpus", "1,2,3", "doctor", "--distributed"]) == 5
    of_recipe = ["doctor", "recipes/quickstart.jsonnet", "--set", f"out={tmp_path}", "--set", "name=mine"]
    assert cli.main(["launch", "--nproc", "2", *of_recipe]) == 5
    assert calls == [
        (2, None, ["train", *of_recipe[1:]], tmp_path / "mine" / "logs"),
        (3, [1, 2, 3], ["doctor", "--distributed"], Path("runs/doctor/logs")),
        (2, None, of_recipe, tmp_path / "mine" / "logs-doctor"),
    ]
    assert owned == [tmp_path / "mine", None, None], "only training owns a run's folder"


def test_launch_with_fresh_renames_the_old_run_folder_once(tmp_path, monkeypatch):
    from retouch.distributed import launching

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "metrics.jsonl").write_text("old")
    given = []
    monkeypatch.setattr(launching, "launch", lambda nproc, gpus, argv, *, logs, owner: given.append(argv) or 0)
    words = ["launch", "--nproc", "2", "recipes/quickstart.jsonnet", "--fresh", "--set", f"out={tmp_path}", "--set", "name=mine"]
    assert cli.main(words) == 0
    assert "--fresh" not in given[0]  # otherwise each rank would rename the folder again
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["owner.json"]
    (aside,) = tmp_path.glob("mine.old-*")
    assert (aside / "metrics.jsonl").read_text() == "old"


def failure(capsys, *words):
    """What a command that ends with 2 prints as its error."""
    try:
        code = cli.main(list(words))
    except SystemExit as end:  # from the parser
        code = end.code
    assert code == 2
    return capsys.readouterr().err


PORTS = ("99999", "65536", "1e3", "²")
TOKENIZE = ["data", "tokenize", "photos", "--model", "playground", "--out", "codes"]
LAUNCH = ["launch", "--nproc", "2"]
SET = "keys of the recipe are changed with: --set"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        *(
            (["view", "missing", f"--port={port}"], f"--port: {port!r} is not a port; give a number from 0 to 65535")
            for port in PORTS
        ),
        (["serve", "share:red", "--port=-1"], "argument --port: '-1' is not a port; give a number from 0 to 65535"),
        (["train", "quickstart", "--set", "name=a\udcff"], "a\\udcff' is not UTF-8 text\n"),
        (["sample", "quickstart", "--out", "o.png", "--instruction", "a\udcff"], "a\\udcff' is not UTF-8 text\n"),
        (["train", "quickstart", "--set", r'name="\ud800"'], ": not UTF-8 text\n"),
        (["sample", "no-such-recipe", "--instructions", "none.txt", "--out", "made"], "--instructions none.txt: no such file"),
        ([*TOKENIZE, "--size", "0", "256"], "argument --size: '0' is not a whole number above 0"),
        ([*TOKENIZE, "--shard", "3"], "argument --shard: '3' is not K/N with K from 0 to N - 1, for example 0/4"),
        ([*LAUNCH, "recipes/quickstart.jsonnet", "--set", "group_size=1"], "group_size: 1 gives every sample the advantage 0"),
        (LAUNCH, "nothing to launch"), (["recipes", "quikstart"], "did you mean quickstart?"),
        (["train", "recipes/quickstart.jsonnet", "--set", "steqs=3"], "\nsteqs: unknown key; did you mean steps?\n"),
        (["data", "check", "none"], "no such file or folder"), (["train", "quickstart", "--steps", "5"], f"{SET} steps=5\n"),
        (["train", "quickstart", "--learning-rate=1e-4", "--group_size", "4"], f"{SET} learning_rate=1e-4 --set group_size=4\n"),
        (["train", "quickstart", "--policy.train.rank", "8"], f"{SET} policy.train.rank=8\n"),
        (["train", "quickstart", "--num_generations", "4", "--max-steps=5"], f"{SET} group_size=4 --set steps=5\n"),
        (["train", "quickstart", "--epsilon", "1e-4"], f"{SET} objective.clip_low=1e-4 --set objective.clip_high=1e-4\n"),
        (["train", "quickstart", "--report_to=wandb", "--bf16"], "--set 'trackers=[\"wandb\"]' --set policy.model.dtype=bfloat16"),
        (["train", "quickstart", "--set", "num_generations=4"], ": unknown key; TRL's num_generations is group_size\n"),
        (["ledger", ".", "answers", "--failed"], "has no ledger.sqlite: give the folder of a run that has scored samples"),
    ],
)  # fmt: skip
def test_fault_13_a_wrong_command_ends_with_2_and_says_what_is_wrong(words, says, capsys):
    said = failure(capsys, *words)
    assert says in said
    assert "Traceback" not in said


ROOT = Path(__file__).parents[2]


def test_fault_13_recipes_lists_what_each_recipe_trains_and_needs(capsys):
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


def test_fault_13_a_recipe_that_is_given_by_name_is_described_with_its_command_and_the_steps_of_each_phase(capsys):
    for name, described in (
        ("sd3/ocr-grpo", "retouch launch --nproc 8 sd3/ocr-grpo"), ("quickstart", "\nsteps: 60\n"),
        ("emu3/sft_think_s__rl_s-playground", "\nsteps: 500 (supervised) + 150 (rl)\n"),
        ("qwen-image-edit/writer-grpo", "\nsteps: 3 passes over the data\n"),
    ):  # fmt: skip
        assert cli.main(["recipes", name]) == 0
        assert described in capsys.readouterr().out


def test_fault_13_near_names_are_suggested(capsys):
    for typed, meant in (
        ("quikstart", ["quickstart"]), ("recipes/quickstat.jsonnet", ["quickstart"]),
        ("ocr-grpo", ["flux2-klein/ocr-grpo", "sd3/ocr-grpo"]), ("zzz", []),
    ):  # fmt: skip
        assert near_names(typed)[: len(meant)] == meant
        said = failure(capsys, "train", typed)
        assert ("did you mean " + " or ".join(meant) in said) == bool(meant)
        assert "`retouch recipes` lists them" in said


def test_fault_13_a_packaged_recipe_is_read_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RETOUCH_ALLOW_IMPORTS")
    assert len(load("tiny-sd3").data.build(DataContext()).train) == 6  # its list of prompts is part of the package


def test_fault_13_launch_and_serve_do_not_use_the_cpu_when_gpus_are_named(tmp_path, monkeypatch, capsys):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"--gpus 0: no CUDA device was found.*; leave --gpus away to use the CPU"):
        launch(1, [0], ["recipes"], logs=tmp_path)
    for engine in ("own", "ray"):
        words = ["serve", "share:red", "--port", "0", "--logs", str(tmp_path / "logs"), "--gpus", "0,1", "--engine", engine]
        assert "--gpus 0,1: no CUDA device was found" in failure(capsys, *words)
        assert not (tmp_path / "logs").exists()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"--gpus 1,2: there is no CUDA device 2; this machine has 2, from 0 to 1"):
        launch(1, [1, 2], ["recipes"], logs=tmp_path)


def folder_of_images(folder, *, rows, key="instruction"):
    folder.mkdir()
    for number in range(rows):
        Image.new("RGBA", (16, 16), (number, 0, 0, 255)).save(folder / f"{number}.png")
    lines = [json.dumps({"file_name": f"{number}.png", key: f"make it {number} times redder"}) for number in range(rows)]
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder)


def checked(capsys, *words):
    code = cli.main(["data", "check", *words])
    return code, capsys.readouterr().out.splitlines()


def test_fault_13_data_check_folds_equal_findings_and_counts_rows(tmp_path, capsys):
    photos = folder_of_images(tmp_path / "photos", rows=12)
    code, folded = checked(capsys, photos)
    assert (code, len(folded)) == (0, 5)
    assert folded[-1] == f"{photos}: 12 rows read, 0 errors, 12 notes"
    assert folded[-2].endswith("and 9 more notes like this one, the last in line 12; --all lists them")
    code, every = checked(capsys, photos, "--all")
    assert (code, len(every)) == (0, 13)


def test_data_check_takes_the_columns_of_a_recipe_and_names_a_known_test_set(tmp_path, capsys):
    bench, photos = folder_of_images(tmp_path / "gedit-bench", rows=2), folder_of_images(tmp_path / "mine", rows=3, key="request")
    for words in (["photos", "--set", f"data.path={bench}"], [bench]):
        code, lines = checked(capsys, *words)
        assert code == 0
        assert lines[-1].startswith(f"{bench} is GEdit-Bench, a test set")
    assert checked(capsys, photos)[0] in (1, 2)
    words = ["photos", "--set", f"data.path={photos}", "--set", 'data.columns={"instruction": "request"}']
    code, lines = checked(capsys, *words)
    assert code == 0
    assert "3 rows read, 0 errors" in lines[-1]


def test_fault_13_python_m_retouch_works_and_a_closed_pipe_prints_no_error(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = f"{sys.executable} -m retouch recipes | head -1"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("name ")
    assert done.stderr == ""


def completions(script, *words):
    line = f"{script}\nCOMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _retouch; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout.split()


def test_fault_13_the_shell_completes_commands_options_and_recipes(capsys):
    assert cli.main(["tools", "completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert completions(script, "retouch", "tra") == ["train"]
    assert completions(script, "retouch", "train", "sd3/ocr") == ["sd3/ocr-grpo-playground", "sd3/ocr-grpo"]
    assert completions(script, "retouch", "train", "--fr") == ["--fresh"]
    assert completions(script, "retouch", "data", "ch") == ["check"]
    assert cli.main(["tools", "completion", "zsh"]) == 0
    assert "bashcompinit" in capsys.readouterr().out
    assert cli.main(["tools", "completion", "fish"]) == 0
    script = capsys.readouterr().out
    assert "complete -c retouch -n '__fish_seen_subcommand_from train' -l fresh" in script
    assert "95 % intervals" in script
    assert "%%" not in script
