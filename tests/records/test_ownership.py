"""One owner per run folder, and nothing in a run's folder makes Retouch read, write or wait for anything outside of it."""

import ast
import fcntl
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from retouch.records import files, ownership
from retouch.records.folder import RunFolder, own
from retouch.records.ownership import NotOwner, Owner, current_owner, read_record, shared_owner
from retouch.rewards.ledger.database import Database, open_read_only
from retouch_view.votes.log import VoteLog
from source_files import source_files

OWNER_PROGRAM = """
import sys, time
from pathlib import Path
from retouch.records.ownership import Owner
owner = Owner(Path(sys.argv[1]))
print("owned", flush=True)
time.sleep(60)
"""


@contextmanager
def owned_elsewhere(folder):
    """Another process that owns the folder."""
    with subprocess.Popen([sys.executable, "-c", OWNER_PROGRAM, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "owned\n"
        try:
            yield process
        finally:
            process.kill()


def write_record(folder, **changes):
    """The record of an owner on another machine."""
    folder.mkdir(exist_ok=True)
    fields = {"token": "theirs", "host": "node-7", "pid": 4242, "since": "2030-01-01", "machine": "another", "began": "1"}
    (folder / ownership.FILE).write_text(json.dumps(fields | changes))
    record = read_record(folder / ownership.FILE)
    assert record is not None
    return record


def test_a_second_process_raises_and_names_the_owner_until_it_is_killed(tmp_path):
    with owned_elsewhere(tmp_path / "run") as other:
        with pytest.raises(NotOwner, match=rf"in use by process {other.pid} on \S+, since 2.*--set name="):
            Owner(tmp_path / "run")
        assert current_owner(tmp_path / "run").pid == other.pid
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert current_owner(tmp_path / "run") is None
        with closing(Owner(tmp_path / "run")) as owner:
            owner.require()
            assert current_owner(tmp_path / "run") is not None


def _replace(folder):
    (folder / ownership.FILE).unlink()
    Owner(folder)


@pytest.mark.parametrize(
    ("lose", "says"),
    [
        (lambda folder: (folder / ownership.FILE).unlink(), "is gone"), (_replace, rf"now belongs to process {os.getpid()}"),
        (lambda folder: folder.rename(folder.with_name("moved")), "is gone"),
        (lambda folder: write_record(folder), "now belongs to process 4242 on node-7"),
    ],
    ids=["deleted", "replaced", "renamed", "another-record"],  # no process number: every test process must collect the same
)  # fmt: skip
def test_an_owner_that_lost_the_folder_writes_nothing(tmp_path, lose, says):
    root = tmp_path / "run"
    with closing(Owner(root)) as owner:
        folder = RunFolder(root, owner)
        folder.append_metrics(1, "rl", {"loss": 1.0})
        lose(root)
        for write in (
            lambda: folder.append_metrics(2, "rl", {"loss": 1.0}),
            lambda: folder.append_timings(2, {"time/step": 1.0}),
            lambda: folder.write_preflight([]),
            lambda: folder.write_eval(0, "heldout", table={}, ci95={}),
            lambda: folder.write_samples(0, "group", []),
            lambda: folder.write_alarm({}),
            lambda: folder.write_recipe({}),
            lambda: folder.truncate_after(0),
            folder.set_aside,
        ):
            with pytest.raises(NotOwner, match=says):
                write()
        where = root if root.exists() else tmp_path / "moved"
        assert sorted(path.name for path in where.iterdir() if path.name != ownership.FILE) == ["metrics.jsonl"]
        assert len(RunFolder(where).read_metrics()) == 1


def test_an_owner_renews_its_file_and_writes_a_truncated_one_again(tmp_path, monkeypatch):
    monkeypatch.setattr(ownership, "BEAT_SECONDS", 0.02)
    with closing(Owner(tmp_path)) as owner:
        os.truncate(tmp_path / ownership.FILE, 3)
        owner.require()
        assert current_owner(tmp_path) is not None
        before = (tmp_path / ownership.FILE).stat().st_mtime_ns
        for _ in range(200):
            if (tmp_path / ownership.FILE).stat().st_mtime_ns > before:
                return
            time.sleep(0.02)
    raise AssertionError("the file was never renewed")


def test_a_fork_does_not_keep_the_folder(tmp_path):
    owner = Owner(tmp_path)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"x")  # after the hooks of the fork, which give the lock up
        time.sleep(60)
        os._exit(0)
    try:
        assert os.read(read, 1) == b"x"
        owner.close()
        Owner(tmp_path).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_shared_ownership_lasts_until_the_child_process_ends(tmp_path):
    program = "import os, sys, time\nfrom pathlib import Path\nfrom retouch.records.ownership import shared_owner\n"
    program += "owner = shared_owner(Path(sys.argv[1]), os.environ)\nowner.require()\nprint('shares', flush=True)\ntime.sleep(60)"
    owner = Owner(tmp_path)
    command = [sys.executable, "-c", program, str(tmp_path)]
    environment = {**os.environ, **owner.environment()}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, pass_fds=[owner.fileno()]) as child:
        assert child.stdout.readline() == "shares\n"
        try:
            os.close(owner.fileno())  # as if this process had been killed: the record stays
            with pytest.raises(NotOwner, match=f"process {os.getpid()}"):
                Owner(tmp_path)
        finally:
            child.kill()
    with closing(Owner(tmp_path)):
        pass


@pytest.mark.parametrize("variable", ["", "17", "x:y", "9999:token"])
def test_an_invalid_or_foreign_environment_variable_shares_no_ownership(tmp_path, variable):
    assert shared_owner(tmp_path, {ownership.SHARED: variable}) is None
    with closing(Owner(tmp_path / "one")) as one, closing(Owner(tmp_path / "two")):
        assert shared_owner(tmp_path / "two", one.environment()) is None


def test_a_remote_owner_keeps_the_folder_as_long_as_it_renews_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(ownership, "WATCH_SECONDS", 5.0)
    record = write_record(tmp_path)
    renewer = f"import os, time\nwhile True: os.utime({str(tmp_path / ownership.FILE)!r}); time.sleep(0.1)"
    with subprocess.Popen([sys.executable, "-c", renewer]) as process:
        try:
            with pytest.raises(NotOwner, match="process 4242 on node-7"):
                Owner(tmp_path)
        finally:
            process.kill()
    assert read_record(tmp_path / ownership.FILE) == record
    monkeypatch.setattr(ownership, "WATCH_SECONDS", 0.3)
    with closing(Owner(tmp_path)) as owner:
        owner.require()


def test_without_file_locks_a_running_process_keeps_its_folder(tmp_path, monkeypatch):
    def unsupported(handle, operation):
        raise OSError(ownership.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with owned_elsewhere(tmp_path) as other:
        with pytest.raises(NotOwner, match=f"process {other.pid}"):
            Owner(tmp_path)
        other.kill()
        other.wait()
        with closing(Owner(tmp_path)) as owner:
            owner.require()


def test_fresh_renames_an_existing_folder_and_owns_the_new_one(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    folder, aside = own(tmp_path / "run", fresh=True, environment={})
    assert aside is not None
    assert (aside / "checkpoints").is_dir()
    assert [path.name for path in folder.root.iterdir()] == [ownership.FILE]
    folder.require_owner()
    with pytest.raises(NotOwner):
        own(tmp_path / "run", fresh=False, environment={})
    folder.owner.close()
    again, nothing = own(tmp_path / "run", fresh=True, environment={})
    again.owner.close()
    assert nothing is None


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
    "votes.jsonl": lambda run: VoteLog(run).undo("x", voter="me"), "owner.json": lambda run: Owner(run),
    "ledger.sqlite": lambda run: Database(run / "ledger.sqlite"), "ledger.sqlite-wal": lambda run: Database(run / "ledger.sqlite"),
}  # fmt: skip
"""The files to which a run appends, or that it keeps open."""


@pytest.mark.parametrize("place", [link, hard_link, pipe, listen])
@pytest.mark.parametrize("name", WRITES)
def test_point_3_3_a_file_that_is_appended_to_is_never_one_outside_the_run(name, place, run, outside):
    place(run / name, outside)
    with pytest.raises(OSError, match="a run's folder may contain only files and folders"):
        WRITES[name](run)
    assert outside.read_bytes() == SECRET


READS: dict[str, Callable[[RunFolder], object]] = {
    "metrics.jsonl": RunFolder.read_metrics, "timings.jsonl": RunFolder.read_timings, "evals.jsonl": RunFolder.read_evals,
    "suites.jsonl": RunFolder.read_suites, "recipe.json": RunFolder.read_recipe, "summary.json": RunFolder.read_summary,
    "preflight.json": RunFolder.read_preflight, "alarm.json": RunFolder.read_alarm,
    "samples/step-000001/samples.jsonl": lambda folder: folder.read_samples(1),
    "evals/step-000001.json": lambda folder: folder.read_scores(1),
    "ledger.sqlite": lambda folder: open_read_only(folder.root / "ledger.sqlite"),
    "votes.jsonl": lambda folder: VoteLog(folder.root).read(),
}  # fmt: skip


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


def test_point_3_3_a_file_above_the_limit_is_not_read(run):
    (run / "metrics.jsonl").write_bytes(b"")
    os.truncate(run / "metrics.jsonl", files.MOST_BYTES + 1)
    with pytest.raises(OSError, match="more than"):
        RunFolder(run).read_metrics()


def test_point_3_3_a_written_file_replaces_a_link_has_the_mode_of_the_umask_and_leaves_no_temporary_file(run, outside):
    guessed = ("report.html.tmp", ".report.html.tmp", ".tmp-report.html")
    for name in (*guessed, "report.html"):
        (run / name).symlink_to(outside)
    files.write_atomic(run / "report.html", b"page")
    assert outside.read_bytes() == SECRET
    assert not (run / "report.html").is_symlink()
    assert (run / "report.html").read_bytes() == b"page"
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((run / "report.html").stat().st_mode) == 0o666 & ~umask
    with pytest.raises(ValueError, match="stop"), files.replacing(run / "a"):
        raise ValueError("stop")
    assert {path.name for path in run.iterdir()} == {*guessed, "report.html"}


AROUND = {
    # Descriptors of this process and of the system, which belong to no run.
    "cli/parser.py": {"os.open"},
    "records/files.py": {"os.open"},
    # The user's own settings, weights, exports and answers: never below a run's folder, or in a new folder.
    "config/consent.py": {"tempfile.NamedTemporaryFile"}, "inference/exporting.py": {"write_text"},
    "models/lora.py": {"write_bytes"}, "models/train.py": {"write_text"}, "data/sources/conversion.py": {"write_bytes"},
    "retouch_worlds/pretraining/training.py": {"write_text"}, "retouch_plan/models.py": {"write_text"},
}  # fmt: skip
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
