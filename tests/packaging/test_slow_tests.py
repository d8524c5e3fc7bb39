"""`make test-slow`: an interrupted call continues, and failures are reported until the tests pass."""

import subprocess
from pathlib import Path

import pytest
import slow


@pytest.mark.parametrize("code", ["pass", "raise AssertionError"])
def test_files_that_were_run_are_not_run_again(code, tmp_path, monkeypatch, capsys):
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q\nmarkers =\n  slow\n  engines\n")
    for name in ("one", "two"):
        (tmp_path / f"test_small_{name}.py").write_text(
            "from pathlib import Path\nimport pytest\n"
            "@pytest.mark.slow\ndef test_slowly():\n"
            f"    with Path('calls').open('a') as file: file.write({name!r})\n"
            f"    {code if name == 'two' else 'pass'}\n"
            "def test_quickly():\n    raise AssertionError\n"
        )
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slow, "ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # pytest starts faster

    def call(*words):
        Path("calls").write_text("")
        return slow.main([*words, "."]), Path("calls").read_text()

    expected = int(code != "pass")
    assert slow.main(["test_small_one.py"]) == 0
    assert call("--jobs", "2") == (expected, "two")
    assert call() == (expected, "")
    assert call("--repeat-failed") == (expected, "two" * expected)
    assert "2 slow tests in 2 files; 2 files are done" in capsys.readouterr().out
    with Path("test_small_one.py").open("a") as file:
        file.write("# changed\n")
    assert call() == (expected, "onetwo")
