"""The file of a ledger: SQLite in write-ahead mode, written by one process, read by anyone at any time.

Three tables. ``judges``: what judged, and since which step. ``samples``: the journal, a row for each sample that was scored, found
again by where in the run it stood. ``answers``: a row for each question that went to a judge, or sample that went to a reward
server, found again by its content. Scores are JSON, in which null means "could not be judged".
"""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

FORMAT = 2
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
    # For whoever looks into the file: a row for each score.
    """
    CREATE VIEW IF NOT EXISTS scores AS
    SELECT split, step, group_id, slot, task, picture, judge, key AS "column", value FROM samples, json_each(samples.scores)
    """,
)


class Database:
    """May be used from several threads; what one ``with database.writing()`` does is kept whole or not at all.

    ValueError where the file is damaged, full or another version's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        with explained(path):
            self._connection = sqlite3.connect(path, timeout=60.0, isolation_level=None, check_same_thread=False)
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                self._connection.execute("PRAGMA synchronous = FULL")
                require_format(self._connection, path, also_new=True)
                for statement in _SCHEMA:
                    self._connection.execute(statement)
                self._connection.execute(f"PRAGMA user_version = {FORMAT}")
            except BaseException:
                self._connection.close()
                raise

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction, on the disk when the block ends."""
        with self._lock, explained(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The connection, to read with."""
        with self._lock, explained(self.path):
            yield self._connection

    def close(self) -> None:
        """Fold the write-ahead log into the file and let go of it."""
        with self._lock, explained(self.path):
            self._connection.close()


def open_to_read(path: Path) -> sqlite3.Connection:
    """A connection that writes nothing, beside a run that may be writing. ValueError where it is no ledger of this version."""
    with explained(path):
        connection = sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro", uri=True, timeout=60.0, isolation_level=None)
        try:
            require_format(connection, path, also_new=False)
        except BaseException:
            connection.close()
            raise
        return connection


def require_format(connection: sqlite3.Connection, path: Path, *, also_new: bool) -> None:
    """ValueError where the file has another format; ``also_new``: one that has none yet will do."""
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    if found != FORMAT and not (also_new and found == 0):
        raise ValueError(f"{path} has format {found}; this version of Retouch reads {FORMAT}: use the version that wrote it")


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """SQLite's errors as a ValueError that says what to do."""
    try:
        yield
    except sqlite3.Error as error:
        raise ValueError(
            f"the ledger {path} cannot be used: {error}. If the disk is full, free some space; if the file is damaged, move it "
            "away (the judge is then asked again for what it held) and start the run again"
        ) from error


def text(value: str) -> str:
    """Text that SQLite takes: half of a surrogate pair has no UTF-8."""
    return value.encode("utf-8", "backslashreplace").decode()
