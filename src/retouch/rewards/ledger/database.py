"""The ledger's file: SQLite in write-ahead mode, written by one process and readable by others at any time.

Three tables. ``judges``: the fingerprint of each judge of the run, and the step from which it judged. ``samples``: the journal, one
row for each scored sample, found by its place in the run. ``answers``: one row for each question to a judge, or sample sent to a
reward server, found by its content. Scores are JSON objects by column, in which null means "could not be judged".
"""

import json
import logging
import math
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from urllib.parse import quote

FORMAT = 2
_LARGEST = 3.4028234663852886e38  # of float32
_log = logging.getLogger(__name__)
_SCHEMA = (
    """
    CREATE TABLE IF NOT EXISTS judges (
        number INTEGER PRIMARY KEY, fingerprint TEXT NOT NULL, about TEXT NOT NULL, since INTEGER NOT NULL
    )
    """,
    """
    CREATE TABLE IF NOT EXISTS samples (
        split TEXT NOT NULL, step INTEGER NOT NULL, group_id INTEGER NOT NULL, slot INTEGER NOT NULL,
        task TEXT NOT NULL, picture TEXT NOT NULL, written TEXT, judge TEXT NOT NULL, scores TEXT NOT NULL,
        seconds REAL NOT NULL, at REAL NOT NULL,
        PRIMARY KEY (split, step, group_id, slot)
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE IF NOT EXISTS answers (
        number INTEGER PRIMARY KEY, content TEXT NOT NULL, picture TEXT NOT NULL, judge TEXT NOT NULL, rubric TEXT NOT NULL,
        seed INTEGER NOT NULL, temperature REAL NOT NULL, scores TEXT, fault TEXT NOT NULL, text TEXT NOT NULL,
        attempts INTEGER NOT NULL, faults TEXT NOT NULL, seconds REAL NOT NULL,
        input_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL, cost REAL, fresh INTEGER NOT NULL, at REAL NOT NULL
    )
    """,
    "CREATE INDEX IF NOT EXISTS answers_by_content ON answers (content) WHERE scores IS NOT NULL AND NOT fresh",
    "CREATE INDEX IF NOT EXISTS answers_by_picture ON answers (picture)",
    # For people who query the file: one row for each score.
    """
    CREATE VIEW IF NOT EXISTS scores AS
    SELECT split, step, group_id, slot, task, picture, judge, key AS "column", value FROM samples, json_each(samples.scores)
    """,
)


class Database:
    """Opens the file, or creates it. May be used from several threads. ValueError: damaged, full, or another version's format."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        with _explained(path):
            self._connection = sqlite3.connect(path, timeout=60.0, isolation_level=None, check_same_thread=False)
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                self._connection.execute("PRAGMA synchronous = FULL")
                _require_format(self._connection, path, allow_new=True)
                for statement in _SCHEMA:
                    self._connection.execute(statement)
                self._connection.execute(f"PRAGMA user_version = {FORMAT}")
            except BaseException:
                self._connection.close()
                raise
        self._there = self._identity()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction: on the disk when the block ends, or undone as a whole if it raises.

        If the file was deleted since it was opened, it is written again first, with all that it held.
        """
        with self._lock, _explained(self.path):
            if self._identity() != self._there:
                self._restore()
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The connection, for queries."""
        with self._lock, _explained(self.path):
            yield self._connection

    def _identity(self) -> tuple[int, int, bool]:
        """What file the path names, and whether its write-ahead log is there; zeros without a file."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return 0, 0, False
        return found.st_dev, found.st_ino, Path(f"{self.path}-wal").exists()

    def _restore(self) -> None:
        """Write the file again from the open one, which the system keeps until it is closed. ValueError: another file is there."""
        if self.path.exists() and self._identity()[:2] != self._there[:2]:
            raise ValueError(f"the ledger {self.path} was replaced by another file during the run; restore it and start again")
        temporary = Path(f"{self.path}.restored")
        temporary.unlink(missing_ok=True)
        with closing(sqlite3.connect(temporary)) as copy:
            self._connection.backup(copy)
        self._connection.close()
        for suffix in ("-wal", "-shm"):
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)  # they belong to the deleted file
        temporary.replace(self.path)
        self._connection = sqlite3.connect(self.path, timeout=60.0, isolation_level=None, check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute(f"PRAGMA user_version = {FORMAT}")
        self._there = self._identity()
        _log.warning("the ledger %s was deleted during the run; it is restored", self.path)

    def close(self) -> None:
        """Merge the write-ahead log into the file and close it."""
        with self._lock, _explained(self.path):
            self._connection.close()


def open_read_only(path: Path) -> sqlite3.Connection:
    """A read-only connection, also while a run is writing. ValueError: not a ledger of this version."""
    with _explained(path):
        connection = sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro", uri=True, timeout=60.0, isolation_level=None)
        try:
            _require_format(connection, path, allow_new=False)
        except BaseException:
            connection.close()
            raise
        return connection


@dataclass(frozen=True, slots=True)
class JudgeUsage:
    """What the requests to judges took. ``requests``: retries included; one without a reply has no tokens. ``cost``: in dollars, of
    the requests to judges with a price list. ``unpriced``: the number of the other requests."""

    requests: float = 0.0
    input_tokens: float = 0.0
    output_tokens: float = 0.0
    cost: float = 0.0
    unpriced: float = 0.0

    def __add__(self, other: "JudgeUsage") -> "JudgeUsage":
        return JudgeUsage(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))

    @property
    def known_cost(self) -> float | None:
        """``cost``; None if no request has a known price."""
        return self.cost if self.requests > self.unpriced else None


def read_usage(connection: sqlite3.Connection, *, after: int = 0) -> tuple[JudgeUsage, int]:
    """What the answers of judges with a ``number`` above ``after`` took, and the largest number now; reward servers left out."""
    total = "TOTAL(attempts), TOTAL(input_tokens), TOTAL(output_tokens), TOTAL(cost)"
    unpriced = "TOTAL(CASE WHEN cost IS NULL THEN attempts ELSE 0 END)"
    # Samples that were sent to a reward server have no rubric.
    query = f"SELECT {total}, {unpriced}, COALESCE(MAX(number), ?) FROM answers WHERE number > ? AND rubric != ''"
    *amounts, last = connection.execute(query, (after, after)).fetchone()
    return JudgeUsage(*amounts), last


def ledger_files(run: Path) -> list[Path]:
    """The ledgers in a run's folder: those of its ranks, and those of the benchmarks that it runs."""
    found = [*sorted(run.glob("ledger*.sqlite")), *sorted(run.glob("suites/*/ledger*.sqlite"))]
    return [path for path in found if path.is_file() and not path.is_symlink()]


def encode_text(value: str) -> str:
    """Text that SQLite can store: half of a surrogate pair has no UTF-8 and is escaped."""
    return value.encode("utf-8", "backslashreplace").decode()


def encode_scores(scores: Mapping[str, float]) -> str:
    """Scores by column as JSON that keeps every bit: NaN becomes null, an infinity a number that overflows to one."""
    return "{" + ", ".join(f"{json.dumps(name)}: {_number(value)}" for name, value in scores.items()) + "}"


def decode_scores(text: str) -> dict[str, float]:
    """The scores that ``encode_scores`` wrote."""
    return {name: math.nan if value is None else float(value) for name, value in json.loads(text).items()}


def all_finite(scores: Mapping[str, float]) -> bool:
    """Whether every score is missing (NaN) or finite in float32. Others are never used again, so one cannot block a run."""
    return all(value != value or abs(value) <= _LARGEST for value in scores.values())


def _number(value: float) -> str:
    if math.isnan(value):
        return "null"
    return repr(value) if math.isfinite(value) else "1e999" if value > 0 else "-1e999"


def _require_format(connection: sqlite3.Connection, path: Path, *, allow_new: bool) -> None:
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    if found != FORMAT and not (allow_new and found == 0):
        raise ValueError(f"{path} has format {found}; this version of Retouch reads {FORMAT}: use the version that wrote it")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns errors of SQLite into a ValueError that says what to do."""
    try:
        yield
    except sqlite3.Error as error:
        raise ValueError(
            f"the ledger {path} cannot be used: {error}. If the disk is full, free some space; if the file is damaged, move it "
            "away (the judge is then asked again for what it held) and start the run again"
        ) from error
