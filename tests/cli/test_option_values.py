"""Wrong values of options are refused with a short message."""

from pathlib import Path

import pytest

from retouch import cli


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


def test_replicas_beyond_the_last_port_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["serve", "share:red", "--port", "65535", "--replicas", "2", "--logs", str(tmp_path)]
    assert cli.main(words) == 2
    assert "--port 65535: 2 replicas need 2 ports, and the last one is 65535; choose a lower one" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["train", "quickstart", "--set", "name=a\udcff"], ["sample", "quickstart", "--out", "o.png", "--instruction", "a\udcff"]],
)
def test_bytes_that_are_not_utf8_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, *words).endswith("a\\udcff' is not UTF-8 text")


def test_an_escaped_surrogate_in_set_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "quickstart", "--set", r'name="\ud800"']) == 2
    assert capsys.readouterr().err.endswith(": not UTF-8 text\n")
