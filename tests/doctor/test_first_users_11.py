"""What first users of `retouch doctor` ran into: environment variables one at a time, and advice for a file that is missing."""

from pathlib import Path

import pytest

from retouch import cli
from retouch.config.packaged import available
from retouch.doctor.checks import check_data
from retouch.recipe.recipe import load

VARIABLES = ("APP__DATA_DIR", "APP__BASE_EXP_DIR", "APP__REWARD_FUNCTION_API_BASE", "APP__RUN_NAME")


@pytest.mark.parametrize("command", ["doctor", "train"])
def test_fault_11_all_missing_variables_are_named_at_once(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name)
    assert cli.main([command, "emu3/sft_s__rl_s"]) == 2
    said = capsys.readouterr().err
    assert "  APP__REWARD_FUNCTION_API_BASE: address of the server of the judge, http://HOST:PORT\n" in said
    assert all(f"\n  {name}: " in said for name in VARIABLES)
    assert "no comment" not in said
    assert "manifestification" not in said


def test_fault_11_a_missing_prompt_list_is_a_file_and_not_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ((finding, _),) = check_data(load("sd3/ocr-grpo"))
    assert (finding.status, finding.fix) == ("FAILED", "--set data.path=FILE.txt")
    ((finding, _),) = check_data(load("qwen-image-edit/flow-grpo", ["data.kind=folder", "data.path=photos"]))
    assert finding.fix == "--set data.path=DIR"
    assert any("emu3" in name for name in available())
