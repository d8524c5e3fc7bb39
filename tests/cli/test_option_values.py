"""Wrong values of options are refused with a short message."""

from pathlib import Path

import pytest

from retouch import cli
from retouch.cli.arguments import run_folder


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the parser says about the words, without the usage."""
    with pytest.raises(SystemExit) as end:
        cli.main(list(words))
    assert end.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("command", ["view", "serve"])
@pytest.mark.parametrize("port", ["99999", "-1", "65536", "1e3", "²"])
def test_a_number_that_is_no_port_is_refused(command: str, port: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = "share:red" if command == "serve" else str(tmp_path)
    assert f"argument --port: {port!r} is not a port; give a number from 0 to 65535" in refusal(
        capsys, command, target, f"--port={port}"
    )


@pytest.mark.parametrize(
    "words",
    [["train", "quickstart", "--set", "name=a\udcff"], ["sample", "quickstart", "--out", "o.png", "--instruction", "a\udcff"]],
)
def test_bytes_that_are_not_utf8_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, *words).endswith("a\\udcff' is not UTF-8 text")


def test_an_escaped_surrogate_in_set_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "quickstart", "--set", r'name="\ud800"']) == 2
    assert capsys.readouterr().err.endswith(": not UTF-8 text\n")


def test_a_missing_list_of_instructions_is_refused_before_the_recipe_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sample", "no-such-recipe", "--instructions", "no-such-list.txt", "--out", "made"]) == 2
    assert "--instructions no-such-list.txt: no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--size", "0", "256"], "argument --size: '0' is not a whole number above 0"),
        (["--shard", "3"], "argument --shard: '3' is not K/N with K from 0 to N - 1, for example 0/4"),
    ],
)
def test_wrong_sizes_and_shards_of_tokenize_are_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in refusal(capsys, "data", "tokenize", "photos", "--model", "playground", "--out", "codes", *words)


def test_a_run_is_found_by_its_name_in_the_folder_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert run_folder("mine") == Path("runs/mine")
    assert run_folder("runs/mine") == Path("runs/mine")
    assert run_folder("no-such-run") == Path("no-such-run")
    (tmp_path / "mine").mkdir()
    assert run_folder("mine") == Path("mine")
