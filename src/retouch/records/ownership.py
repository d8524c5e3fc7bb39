"""Each run folder has one owner, so two processes never train in the same folder.

The owner holds a lock of the operating system on ``owner.json`` while it runs, and the file names the owner. A crashed owner loses
the lock at once. The processes of one launcher share its lock, so the folder stays owned until the last of them ends.

A network file system may not propagate locks to other machines. The owner therefore renews the file's modification time; a process
on another machine that gets the lock first watches the file, and refuses if it is still renewed. Every write to the folder calls
``Owner.require``, so an owner that has lost the folder (its lock file deleted or replaced, the folder renamed) stops writing.
"""

import errno
import fcntl
import json
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from retouch.records import files

FILE = "owner.json"
SHARED = "RETOUCH_OWNER"
BEAT_SECONDS = 10.0
_MOST_BYTES = 10_000
WATCH_SECONDS = 45.0
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
_HELD = {errno.EWOULDBLOCK, errno.EACCES}


class NotOwner(ValueError):
    """The run folder belongs to another process."""


@dataclass(frozen=True, slots=True)
class OwnerRecord:
    """The owner of a folder. ``machine``: identifies the running kernel, which containers share. ``began``: the start time of the
    process."""

    token: str
    host: str
    pid: int
    since: str
    machine: str
    began: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class Owner:
    """The ownership of a run folder; ``close`` releases it. Raises NotOwner, with the owner's name, if another process owns it.

    ``shared``: a file descriptor of the lock file that the launcher has already locked, and the launcher's token.
    """

    def __init__(self, folder: Path, *, shared: tuple[int, str] | None = None) -> None:
        self.path = folder / FILE
        self._ending = threading.Event()
        self._record: OwnerRecord | None = None
        if shared is None:
            folder.mkdir(parents=True, exist_ok=True)
            self._handle = files.open_handle(self.path, os.O_RDWR | os.O_CREAT)
        else:
            self._handle, self._token = shared
        _open_owners.add(self)
        if shared is not None:
            os.set_inheritable(self._handle, False)
            return
        try:
            self._record = self._take()
        except BaseException:
            os.close(self._handle)
            _open_owners.discard(self)
            raise
        self._token = self._record.token
        threading.Thread(target=self._beat, args=(BEAT_SECONDS,), name="run-owner", daemon=True).start()

    def require(self) -> None:
        """Raise NotOwner unless this process still owns the folder. Call it before anything in the folder is changed."""
        try:
            there = os.stat(self.path)
        except OSError as error:
            raise NotOwner(
                f"{self.path} is gone: the run folder was moved or deleted while the run was using it. The run stops without "
                f"writing to it again ({error.strerror}); restore the folder and start the run again"
            ) from None
        mine = os.fstat(self._handle)
        record = read_record(self.path)
        if not os.path.samestat(there, mine) or (record is not None and record.token != self._token):
            raise NotOwner(
                f"{self.path.parent} now belongs to {record or 'another process'}. This process stops without writing to it again"
            )
        if record is None and self._record is not None:
            self._write(self._record)

    def environment(self) -> dict[str, str]:
        """Return the environment variable through which a child process that inherits ``fileno`` shares the ownership
        (``shared_owner``)."""
        return {SHARED: f"{self._handle}:{self._token}"}

    def fileno(self) -> int:
        return self._handle

    def close(self) -> None:
        """Release the ownership; processes that share it keep it."""
        self._ending.set()
        if self._handle < 0:
            return
        if self._record is not None and (record := read_record(self.path)) is not None and record.token == self._token:
            os.ftruncate(self._handle, 0)
        os.close(self._handle)
        self._handle = -1
        _open_owners.discard(self)

    def _take(self) -> OwnerRecord:
        locked: bool | None = True  # None if the file system has no locks
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _HELD | _UNSUPPORTED:
                raise
            locked = False if error.errno in _HELD else None
        before = read_record(self.path)
        if locked is False:
            raise NotOwner(_refusal(self.path.parent, before))
        if before is not None:
            if before.machine == _machine():
                # Without locks, check whether the recorded process is still running.
                if locked is None and _process_start(before.pid) == before.began:
                    raise NotOwner(_refusal(self.path.parent, before))
            else:  # the file of another machine; reopened each time, because network file systems cache times
                first, end = _stamp(self.path), time.monotonic() + WATCH_SECONDS
                while time.monotonic() < end:
                    time.sleep(min(1.0, WATCH_SECONDS / 10))
                    if _stamp(self.path) != first:
                        raise NotOwner(_refusal(self.path.parent, before))
        record = OwnerRecord(
            uuid.uuid4().hex,
            socket.gethostname(),
            os.getpid(),
            datetime.now(UTC).isoformat(timespec="seconds"),
            _machine(),
            _process_start(os.getpid()),
        )
        self._write(record)
        if locked is None:
            time.sleep(1.0)  # if processes start at the same time, the last one to write is the owner
        found = read_record(self.path)
        if not os.path.samestat(os.stat(self.path), os.fstat(self._handle)) or found != record:
            raise NotOwner(_refusal(self.path.parent, found))
        return record

    def _write(self, record: OwnerRecord) -> None:
        line = (json.dumps(asdict(record)) + "\n").encode()
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, line, 0)
        os.fsync(self._handle)

    def _beat(self, seconds: float) -> None:
        while not self._ending.wait(seconds):
            try:
                os.utime(self._handle)
            except OSError:
                return  # ``require`` reports the error


_open_owners: "weakref.WeakSet[Owner]" = weakref.WeakSet()


def _close_all_in_child() -> None:
    for owner in list(_open_owners):
        os.close(owner._handle)
        owner._handle, owner._record = -1, None
    _open_owners.clear()


# Otherwise a forked process would keep the lock while it runs.
os.register_at_fork(after_in_child=_close_all_in_child)


def shared_owner(folder: Path, environment: Mapping[str, str]) -> Owner | None:
    """Return the ownership of ``folder`` that the launcher shares with this process; None if it shares none of this folder."""
    number, _, token = environment.get(SHARED, "").partition(":")
    try:
        there, mine = os.stat(folder / FILE), os.fstat(int(number))
    except (ValueError, OSError):
        return None
    return Owner(folder, shared=(int(number), token)) if os.path.samestat(there, mine) else None


def read_record(path: Path) -> OwnerRecord | None:
    """Read the record in an owner file; None if it has none, for example after the owner has released the folder."""
    try:
        return OwnerRecord(**json.loads(files.read_bytes(path, most=_MOST_BYTES)))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def current_owner(folder: Path) -> OwnerRecord | None:
    """Return the current owner of a run folder; None without an owner or if the file is unreadable. It may change at any time, so
    use it only for display."""
    record = read_record(folder / FILE)
    if record is None or record.machine != _machine():
        return record
    return record if _process_start(record.pid) == record.began else None


def _refusal(folder: Path, record: OwnerRecord | None) -> str:
    return (
        f"{folder} is in use by {record or 'another process'}: only one process may train in a run folder. "
        "Wait until it ends, stop it, or give this run another name (--set name=ANOTHER)"
    )


def _stamp(path: Path) -> tuple[int, int, bytes]:
    with files.open_file(path) as file:
        return os.fstat(file.fileno()).st_ino, os.fstat(file.fileno()).st_mtime_ns, file.read(_MOST_BYTES)


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def _process_start(pid: int) -> str:
    """Return when a process of this machine started ("running" if the system does not say); empty if there is no such process."""
    stat = Path(f"/proc/{pid}/stat")
    if stat.parent.parent.joinpath("self").exists():
        try:
            state, *fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            return ""
        return "" if state == "Z" else fields[18]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "running"
