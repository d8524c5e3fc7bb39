"""A damaged run folder: the run resumes bitwise, reports what is lost, or raises; mistakes of the user give clear messages."""

import errno
import os
import re
import resource
import sqlite3
import subprocess
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

import pytest

import retouch
import tiny_pipelines
from folder_faults import FAULTS
from retouch import cli
from retouch.records import files
from retouch.records.folder import RunFolder, keep_until
from retouch.rewards.ledger.database import Database
from small_trainer import SMALL, redness
from warm_python import python

ROOT = Path(__file__).parents[2]
EXPECTED = {
    "no checkpoints": "refused", "delete: evals.jsonl": "same bits", "every line of the metrics twice": "same bits",
    "a line of the metrics is missing": "same weights, said", "a stale temporary file": "same bits",
    "a checkpoint without weights": "same bits", "nested 100 000 deep: checkpoints/step-000004/manifest.json": "same bits",
    "nested 100 000 deep: owner.json": "same bits", "{}: recipe.json": "refused", "turn into a folder: preflight.json": "refused",
}  # fmt: skip


@pytest.mark.slow
def test_resuming_a_damaged_run_folder_has_the_expected_outcome_for_each_fault():
    assert len(FAULTS) >= 100
    only = "|".join(f"^{re.escape(name)}$" for name in EXPECTED)
    command = [python(), "-W", "ignore", str(ROOT / "measurements/robustness/folders.py"), "--only", only]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    found = {line[21:91].strip(): line[:20].strip() for line in done.stdout.splitlines()[:-2]}
    assert found == EXPECTED, done.stdout + done.stderr[-2000:]


# Reports about damaged lines, lost checkpoints and ledgers


def test_repair_reports_each_problem_of_a_metrics_file_and_keeps_a_copy(tmp_path):
    path = tmp_path / "metrics.jsonl"
    content = '{"step": 3}\n{"step": 1}\n{"step": 1}\n{"step": 3, "a": 2}\nwhat?\n{"step": 7}\n'
    path.write_text(content)
    notes = keep_until(path, 7, every_step=True)
    said = " ".join(notes)
    lines = ("1 unreadable", "1 duplicate lines were removed", "1 lines contradicted", "1 break in the order of steps")
    for words in (*lines, "steps 2, 4 to 6 are missing"):
        assert words in said
    assert path.read_text() == '{"step": 1}\n{"step": 3, "a": 2}\n{"step": 7}\n'
    (copy,) = tmp_path.glob("metrics.jsonl.damaged-*")
    assert copy.read_text() == content
    assert copy.name in said


def test_missing_checkpoint_is_detected_from_its_record_or_from_the_metrics(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.lost_checkpoints(None, every=10) is None
    for step in range(1, 13):
        folder.append_metrics(step, "main", {})
        assert (folder.lost_checkpoints(None, every=10) is None) == (step <= 10)
    assert folder.lost_checkpoints(10, every=10) is None
    assert folder.lost_checkpoints(None, every=0) is None
    folder.write_saved(12)  # a run that is stopped saves between the intervals
    assert "a checkpoint of step 12 had been saved" in str(folder.lost_checkpoints(10, every=10))
    assert folder.lost_checkpoints(12, every=10) is None


def test_a_ledger_that_is_deleted_during_a_run_is_restored_and_one_that_is_replaced_is_not_written_to(tmp_path, caplog):
    path = tmp_path / "ledger.sqlite"
    insert = "INSERT INTO judges (fingerprint, about, since) VALUES (?, '{}', 0)"
    with closing(Database(path)) as database:
        for number, lose in enumerate((path, tmp_path / "ledger.sqlite-wal", path)):
            with database.writing() as connection:
                connection.execute(insert, (str(number),))
            lose.unlink()
        with database.writing() as connection:
            connection.execute(insert, ("last",))
        with closing(sqlite3.connect(path)) as read:
            assert [row[0] for row in read.execute("SELECT fingerprint FROM judges ORDER BY number")] == ["0", "1", "2", "last"]
        assert caplog.text.count("was deleted during the run") == 3
        path.unlink()
        path.write_text("of another program")
        with pytest.raises(ValueError, match="was replaced by another file"), database.writing():
            pass
    assert path.read_text() == "of another program"


# Full disks and mistakes of the user


@contextmanager
def files_of_at_most(size):
    """Limit files to ``size`` bytes, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_failed_append_on_a_full_disk_leaves_no_partial_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    files.append_line(path, {"step": 1})
    with files_of_at_most(20), pytest.raises(OSError, match=re.escape(str(path))):
        files.append_line(path, {"step": 2, "text": "x" * 100})
    assert files.read_lines(path) == [{"step": 1}]


class LibraryFails(retouch.Callback):
    """A library that cannot write its file, and does not name it."""

    def on_step(self, trainer, step, metrics):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("fails", ["the first file of the run", "a library"])
def test_point_1_8_full_disk_ends_a_run_in_python_with_a_message(tmp_path, fails):
    data = [{"prompt": "a red circle"}, {"prompt": "a blue circle"}]
    callbacks = [LibraryFails()] if fails == "a library" else []
    keys = {**SMALL, "eval": {"tasks": 1}, "steps": 1, "output_dir": tmp_path, "run_name": "r", "callbacks": callbacks}
    trainer = retouch.Trainer(tiny_pipelines.sd3(), redness, data, **keys)
    with (
        files_of_at_most(500) if not callbacks else nullcontext(),
        pytest.raises(ValueError, match=f"{tmp_path}/r.*(File too large|No space left on device); free some space and run"),
    ):
        trainer.train()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--set", "out={}/file"], "file; choose another folder"),
        (["--set", "out={}/file/inside"], "file; choose another folder"),
        (["--set", "out={}", "--set", "name=" + "n" * 300], "choose a shorter name"),
        (["--set", "out=/proc/nothing"], "/proc/nothing"),
    ],
)
def test_invalid_output_folder_exits_with_2_and_a_clear_message(words, says, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["train", "recipes/quickstart.jsonnet", *(word.format(tmp_path) for word in words)]) == 2
    assert says in capsys.readouterr().err


def test_invalid_recipe_json_exits_with_2_and_is_not_changed(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    for text in ("{}", "[]", "null", '{"recipe": []}', "[" * 100_000, "\x00", '{"recipe": {"name": 3}}'):
        (tmp_path / "run" / "recipe.json").write_text(text)
        assert cli.main(["train", "recipes/quickstart.jsonnet", "--set", f"out={tmp_path}", "--set", "name=run"]) == 2
        assert "retouch train: " in capsys.readouterr().err
        assert (tmp_path / "run" / "recipe.json").read_text() == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("local a = [a]; a", "overflowed the stack"), ("local f(x) = [f(x + 1)]; f(0)", "overflowed the stack"),
        ("local f(x) = f(x + 1) + 1; f(0)", "more lines"),
        ("std.foldl(function(a, b) [a], std.range(1, 100000), [])", "overflowed the stack"),
        ("{ name: std.foldl(function(a, b) [a], std.range(1, 2000), []) }", "nested too deeply"),
        ("std.repeat('abcdefgh', 1000000000)", "memory"), ("std.repeat('x', 1e10)", "1024 MiB of memory"),
        ("local f(n) = if n == 0 then 'xxxxxxxxxx' else local s = f(n - 1); s + s; f(32)", "1024 MiB of memory"),
        ("std.makeArray(1e9, function(i) i)", "1024 MiB of memory"), ("std.repeat('x', 2e7)", "more than 16 MiB"),
        ("error std.repeat('x', 1e7)", "xxxx"),
    ],
)  # fmt: skip
def test_point_3_8_recipe_that_exceeds_recursion_or_memory_limits_exits_with_2(text, says, tmp_path, capsys):
    (tmp_path / "endless.jsonnet").write_text(text)
    assert cli.main(["train", str(tmp_path / "endless.jsonnet")]) == 2
    assert says in capsys.readouterr().err
