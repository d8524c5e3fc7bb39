"""The command line: help without heavy imports, short error messages, and arguments that are passed on unchanged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from retouch import cli
from retouch.records.ownership import Owner


def test_help_needs_no_heavy_import() -> None:
    code = """
import sys
from retouch.cli import main
try:
    main(['--help'])
except SystemExit as end:
    print(end.code, sorted({'torch', 'pydantic', 'transformers', 'diffusers', 'numpy', 'PIL', 'rjsonnet'} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"
    assert "doctor" in done.stdout


def test_gomp_spincount_is_set_before_torch_is_imported_unless_the_user_sets_it() -> None:
    """libgomp reads this variable, which makes idle threads release their core early, when torch is imported."""
    code = """
import os, sys
from retouch.cli import main
main(['recipes', 'quickstart'])
print('torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT'))
"""
    for set_by_user, expected in ({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None"):
        inherited = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
        done = subprocess.run(
            [sys.executable, "-c", code], env={**inherited, **set_by_user}, capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines()[-1] == f"False {expected}"


@pytest.mark.parametrize(
    "command",
    [["train"], ["launch"], ["eval"], ["sample"], ["doctor"], ["recipes"], ["playground", "build"], ["data", "check"], ["serve"]],
)
def test_every_command_has_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([*command, "--help"])
    assert end.value.code == 0
    assert "usage: retouch " + command[0] in capsys.readouterr().out


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes"]) == 0
    names = [line.partition(" ")[0] for line in capsys.readouterr().out.splitlines()]
    assert {"quickstart", "qwen-image-edit/flow-grpo"} <= set(names)


def test_a_user_error_prints_one_message_and_exits_with_code_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "retouch.cli", "train", "recipes/quickstart.jsonnet", "--set", "steqs=3"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[-1] == "steqs: unknown key; did you mean steps?"
    assert "Traceback" not in done.stderr


def test_debug_raises_the_original_exception() -> None:
    with pytest.raises(ValueError, match="no such file"):
        cli.main(["train", "nothing.jsonnet", "--debug"])


def test_an_internal_exception_is_raised_and_not_reported_as_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: str, overrides: list[str]) -> None:
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


def test_an_error_in_imported_code_prints_its_file_and_line_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_launch_passes_the_recipe_or_command_to_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from retouch.distributed import launching

    calls, owned = [], []

    def record(nproc: int, gpus: list[int] | None, argv: list[str], *, logs: Path, owner: Owner | None = None) -> int:
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
        (
            2,
            None,
            ["train", "recipes/quickstart.jsonnet", "--set", f"out={tmp_path}", "--set", "name=mine"],
            tmp_path / "mine" / "logs",
        ),
        (3, [1, 2, 3], ["doctor", "--distributed"], Path("runs/doctor/logs")),
        (2, None, of_recipe, tmp_path / "mine" / "logs-doctor"),
    ]
    assert owned == [tmp_path / "mine", None, None], "only training owns a run's folder"


def test_launch_with_fresh_renames_the_old_run_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_launch_refuses_a_bad_recipe_before_any_rank_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "--nproc", "2", "recipes/quickstart.jsonnet", "--set", "group_size=1"]) == 2
    assert "group_size: 1 gives every sample the advantage 0" in capsys.readouterr().err


def test_launch_without_a_recipe_or_command_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "--nproc", "2"]) == 2
    assert "nothing to launch" in capsys.readouterr().err


def test_data_check_prints_the_problems_and_exits_with_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "gone.png", "instruction": "make it red"}\n')
    assert cli.main(["data", "check", str(tmp_path)]) == 1
    assert "gone.png" in capsys.readouterr().out
