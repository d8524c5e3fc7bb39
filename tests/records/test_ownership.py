"""One owner per run folder, by a lock that ends with its process and a record that other machines can read."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing, contextmanager

import pytest

from retouch.records import ownership
from retouch.records.folder import RunFolder, own
from retouch.records.ownership import NotOwner, Owner, current_owner, read_record, shared_owner

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


def test_a_second_process_raises_and_names_the_owner(tmp_path):
    with owned_elsewhere(tmp_path / "run") as other:
        with pytest.raises(NotOwner, match=rf"in use by process {other.pid} on \S+, since 2.*--set name="):
            Owner(tmp_path / "run")
        record = current_owner(tmp_path / "run")
        assert record.pid == other.pid


def test_a_killed_owner_owns_nothing(tmp_path):
    with owned_elsewhere(tmp_path) as other:
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert current_owner(tmp_path) is None
        with closing(Owner(tmp_path)) as owner:
            owner.require()
            assert current_owner(tmp_path) is not None


def _delete(folder):
    (folder / ownership.FILE).unlink()


def _replace(folder):
    (folder / ownership.FILE).unlink()
    Owner(folder)


def _rename(folder):
    folder.rename(folder.with_name("moved"))


def _write_another_record(folder):
    write_record(folder)


@pytest.mark.parametrize(
    ("lose", "says"),
    [
        (_delete, "is gone"),
        (_replace, rf"now belongs to process {os.getpid()}"),
        (_rename, "is gone"),
        (_write_another_record, "now belongs to process 4242 on node-7"),
    ],
    ids=["deleted", "replaced", "renamed", "another-record"],  # no process number: every test process must collect the same
)
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


def test_a_truncated_record_is_written_again_by_its_owner(tmp_path):
    with closing(Owner(tmp_path)) as owner:
        os.truncate(tmp_path / ownership.FILE, 3)
        owner.require()
        assert current_owner(tmp_path) is not None


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


def test_a_remote_owner_that_renews_its_file_keeps_the_folder(tmp_path, monkeypatch):
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


def test_a_remote_owner_that_does_not_renew_its_file_loses_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(ownership, "WATCH_SECONDS", 0.3)
    write_record(tmp_path)
    with closing(Owner(tmp_path)) as owner:
        owner.require()


def test_an_owner_renews_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(ownership, "BEAT_SECONDS", 0.02)
    with closing(Owner(tmp_path)):
        before = (tmp_path / ownership.FILE).stat().st_mtime_ns
        for _ in range(200):
            if (tmp_path / ownership.FILE).stat().st_mtime_ns > before:
                return
            time.sleep(0.02)
    raise AssertionError("the file was never renewed")


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
