"""Nothing in a run's folder makes Retouch read, write or wait for anything outside of it."""

import ast
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from retouch.records import files
from retouch.records.folder import RunFolder, own
from retouch.records.ownership import Owner
from retouch.rewards.ledger.database import Database, open_read_only
from retouch_view.votes.log import VoteLog
from source_files import source_files

SECRET = b'{"secret": 1}\n'


@pytest.fixture
def outside(tmp_path):
    file = tmp_path / "outside" / "secret"
    file.parent.mkdir()
    file.write_bytes(SECRET)
    return file


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def link(path, target):
    path.symlink_to(target)


def hard_link(path, target):
    path.hardlink_to(target)


def pipe(path, target):
    os.mkfifo(path)


def listen(path, target):
    folder = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{folder}/{path.name}")  # the address of a socket may have 108 bytes
    os.close(folder)


WRITES: dict[str, Callable[[Path], object]] = {
    "metrics.jsonl": lambda run: RunFolder(run).append_metrics(1, "rl", {"reward/mean": 1.0}),
    "timings.jsonl": lambda run: RunFolder(run).append_timings(1, {"time/step": 1.0}),
    "votes.jsonl": lambda run: VoteLog(run).undo("x", voter="me"),
    "owner.json": lambda run: Owner(run),
    "ledger.sqlite": lambda run: Database(run / "ledger.sqlite"),
    "ledger.sqlite-wal": lambda run: Database(run / "ledger.sqlite"),
}
"""The files to which a run appends, or that it keeps open."""


@pytest.mark.parametrize("place", [link, hard_link, pipe, listen])
@pytest.mark.parametrize("name", WRITES)
def test_point_3_3_a_file_that_is_appended_to_is_never_one_outside_the_run(name, place, run, outside):
    place(run / name, outside)
    with pytest.raises(OSError, match="a run's folder may contain only files and folders"):
        WRITES[name](run)
    assert outside.read_bytes() == SECRET


READS: dict[str, Callable[[RunFolder], object]] = {
    "metrics.jsonl": RunFolder.read_metrics,
    "timings.jsonl": RunFolder.read_timings,
    "evals.jsonl": RunFolder.read_evals,
    "suites.jsonl": RunFolder.read_suites,
    "recipe.json": RunFolder.read_recipe,
    "summary.json": RunFolder.read_summary,
    "preflight.json": RunFolder.read_preflight,
    "alarm.json": RunFolder.read_alarm,
    "samples/step-000001/samples.jsonl": lambda folder: folder.read_samples(1),
    "evals/step-000001.json": lambda folder: folder.read_scores(1),
    "ledger.sqlite": lambda folder: open_read_only(folder.root / "ledger.sqlite"),
    "votes.jsonl": lambda folder: VoteLog(folder.root).read(),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("place", [link, pipe, listen])
def test_point_3_3_a_reader_follows_no_link_and_waits_for_no_pipe(name, place, run, outside):
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    place(run / name, outside)
    with pytest.raises(OSError, match="a run's folder may contain only files and folders"):
        READS[name](RunFolder(run))


@pytest.mark.parametrize("name", ["samples", "samples/step-000001", "evals", "checkpoints", "control", "watch", "tensorboard"])
def test_point_3_3_a_folder_that_is_a_link_is_refused(name, run, outside):
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).symlink_to(outside.parent)
    folder = RunFolder(run)
    paths = (folder.samples, folder.evaluation)
    with pytest.raises(OSError, match="a link, and a run's folder may contain"):
        _ = [folder.checkpoints, folder.control, folder.watch, folder.tensorboard, *(path(1) for path in paths)]
    with pytest.raises(OSError, match="a link, and a run's folder may contain"):
        own(run, fresh=False, environment={})
    assert [path.name for path in run.rglob("*")] == name.split("/"), "something was written"


@pytest.mark.parametrize("place", [link, pipe, listen])
def test_point_3_3_a_run_is_not_continued_in_a_folder_with_anything_but_files(place, run, outside):
    deep = run / "suites" / "one" / "step-000002"
    deep.mkdir(parents=True)
    place(deep / "rows.jsonl", outside)
    with pytest.raises(OSError, match=r"rows\.jsonl"):
        own(run, fresh=False, environment={})
    assert not (run / "owner.json").exists()


def test_point_3_3_the_folder_of_a_run_may_itself_be_a_link(run, tmp_path):
    link(tmp_path / "linked", run)
    folder, _ = own(tmp_path / "linked", fresh=False, environment={})
    folder.append_metrics(1, "rl", {"reward/mean": 1.0})
    assert RunFolder(run).read_metrics()[0]["step"] == 1
    folder.owner.close()


@pytest.mark.parametrize("name", ["../secret", "..", ".", "", "a/b", "/etc/passwd"])
def test_point_3_3_a_name_that_a_file_gives_does_not_lead_out_of_the_folder(name, run):
    with pytest.raises(OSError, match="not the name of a file"):
        files.inside(run, name)


@pytest.mark.parametrize("guessed", ["report.html.tmp", ".report.html.tmp", ".tmp-report.html"])
def test_point_3_3_a_temporary_file_cannot_be_prepared(guessed, run, outside):
    (run / guessed).symlink_to(outside)
    files.write_atomic(run / "report.html", b"page")
    assert outside.read_bytes() == SECRET
    assert (run / "report.html").read_bytes() == b"page"


def test_point_3_3_a_written_file_replaces_a_link_and_has_the_mode_of_the_umask(run, outside):
    (run / "summary.json").symlink_to(outside)
    files.write_json(run / "summary.json", {})
    assert outside.read_bytes() == SECRET
    assert not (run / "summary.json").is_symlink()
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((run / "summary.json").stat().st_mode) == 0o666 & ~umask


def test_point_3_3_a_failed_write_leaves_no_temporary_file(run):
    with pytest.raises(ValueError, match="stop"), files.replacing(run / "a"):
        raise ValueError("stop")
    assert list(run.iterdir()) == []


def test_point_3_3_a_file_above_the_limit_is_not_read(run):
    (run / "metrics.jsonl").write_bytes(b"")
    os.truncate(run / "metrics.jsonl", files.MOST_BYTES + 1)
    with pytest.raises(OSError, match="more than"):
        RunFolder(run).read_metrics()


AROUND = {
    # Descriptors of this process and of the system, which belong to no run.
    "cli/parser.py": {"os.open"},
    "records/files.py": {"os.open"},
    # The user's own settings, weights, exports and answers: never below a run's folder, or in a new folder.
    "config/consent.py": {"tempfile.NamedTemporaryFile"},
    "inference/exporting.py": {"write_text"},
    "models/lora.py": {"write_bytes"},
    "models/train.py": {"write_text"},
    "data/sources/conversion.py": {"write_bytes"},
    "retouch_worlds/pretraining/training.py": {"write_text"},
    "retouch_plan/models.py": {"write_text"},
}
"""The calls in the source that open a file for writing without ``records.files``."""


def writes(call):
    """The name of a call that opens a file for writing by itself, or None."""
    name = ast.unparse(call.func)
    last = name.rpartition(".")[2]
    words = [*call.args, *(word.value for word in call.keywords if word.arg == "mode")]
    modes = [each.value for each in words if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    if name in ("os.open", "tempfile.NamedTemporaryFile", "tempfile.mkstemp", "shutil.copy", "shutil.copy2", "shutil.copyfile"):
        return name
    if last in ("write_text", "write_bytes", "touch"):
        return last
    return "open" if last == "open" and any(set("wax+") & set(mode) and set(mode) <= set("rwaxbt+") for mode in modes) else None


def test_point_3_3_nothing_writes_to_a_run_around_the_one_writer():
    found: dict[str, set[str]] = {}
    for place, path in source_files().items():
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            if name := writes(call):
                found.setdefault(place, set()).add(name)
    assert found == AROUND
