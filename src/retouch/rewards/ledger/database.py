"""The database of a run's scores, the hashes by which it knows images and samples, and the images that it keeps.

The file of the ledger: SQLite in write-ahead mode, written by one process and readable by other processes at any time.

It has three tables. ``judges``: the fingerprint of each reward of the run, and the step from which it was used. ``samples``: the
journal, one row for each scored sample, with its position in the run as the key. ``answers``: one row for each question to a judge,
or sample sent to a reward server, indexed by its content. Scores are JSON objects by column; null means "could not be judged".
"""

import hashlib
import json
import logging
import math
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from urllib.parse import quote

from PIL import Image
from PIL.Image import DecompressionBombError

from retouch.records import files
from retouch.types import Json, Sample

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

_TABLES = """
    SELECT COUNT(*) FROM sqlite_master WHERE type = 'table' AND rootpage > 0 AND name IN ('judges', 'samples', 'answers')
    """


class Database:
    """The open file, which is created if necessary. May be used from several threads.

    Raises ValueError if the file is damaged, the disk is full, or the file has the format of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        _require_files(path, writes=True)
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
        """One transaction: its changes are on the disk when the block ends, or are undone completely if the block raises.

        If the file was deleted after it was opened, it is first restored with its whole content.
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
        """Device and inode of the file, and whether its write-ahead log exists; zeros and False if there is no file."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return 0, 0, False
        return found.st_dev, found.st_ino, Path(f"{self.path}-wal").exists()

    def _restore(self) -> None:
        """Restore the file from the open connection; the system keeps a deleted file until it is closed. Raises ValueError if
        another file is at the path."""
        if self.path.exists() and self._identity()[:2] != self._there[:2]:
            raise ValueError(f"the ledger {self.path} was replaced by another file during the run; restore it and resume the run")
        with files.replacing(self.path) as file, closing(sqlite3.connect(file.name)) as copy:
            self._connection.backup(copy)
            self._connection.close()
            for suffix in ("-wal", "-shm"):
                Path(f"{self.path}{suffix}").unlink(missing_ok=True)  # these belong to the deleted file
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


def open_read_only(path: Path, *, seconds: float = 600.0) -> sqlite3.Connection:
    """Open a read-only connection, also while a run is writing; its queries end with an error after ``seconds``.

    Raises ValueError if the file is not a ledger of this version with its own tables (a view or a virtual table may compute without
    end), and OSError if it is a link.
    """
    _require_files(path, writes=False)
    deadline = time.monotonic() + seconds
    with _explained(path):
        address = f"file:{quote(str(path.resolve()))}?mode=ro"
        connection = sqlite3.connect(address, uri=True, timeout=min(seconds, 60.0), isolation_level=None)
        try:
            connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
            connection.execute("PRAGMA trusted_schema = OFF")
            _require_format(connection, path, allow_new=False)
            if connection.execute(_TABLES).fetchone() != (3,):
                raise ValueError(f"{path} is not a ledger: its tables were changed")
        except BaseException:
            connection.close()
            raise
        return connection


@dataclass(frozen=True, slots=True)
class JudgeUsage:
    """The usage of judges. ``requests``: number of requests, including retries; a request without a reply has no tokens. ``cost``:
    in dollars, of the requests to judges with a price list. ``unpriced``: number of requests to judges without a price list.
    ``retries``: number of requests that repeat a question after an error or an unusable answer."""

    requests: float = 0.0
    input_tokens: float = 0.0
    output_tokens: float = 0.0
    cost: float = 0.0
    unpriced: float = 0.0
    retries: float = 0.0

    def __add__(self, other: "JudgeUsage") -> "JudgeUsage":
        return JudgeUsage(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))

    @property
    def known_cost(self) -> float | None:
        """``cost``, or None if no request has a known price."""
        return self.cost if self.requests > self.unpriced else None


def read_usage(connection: sqlite3.Connection, *, after: int = 0) -> tuple[JudgeUsage, int]:
    """The usage of the judges in the answers with a ``number`` above ``after``, without reward servers, and the largest such
    number."""
    total = "TOTAL(attempts), TOTAL(input_tokens), TOTAL(output_tokens), TOTAL(cost)"
    unpriced = "TOTAL(CASE WHEN cost IS NULL THEN attempts ELSE 0 END), TOTAL(MAX(attempts - 1, 0))"
    # The rubric is empty for a sample that was sent to a reward server.
    query = f"SELECT {total}, {unpriced}, COALESCE(MAX(number), ?) FROM answers WHERE number > ? AND rubric != ''"
    *amounts, last = connection.execute(query, (after, after)).fetchone()
    return JudgeUsage(*amounts), last


def ledger_files(run: Path) -> list[Path]:
    """The ledgers in the folder of a run: the ledgers of its ranks and of its benchmarks."""
    found = [*sorted(run.glob("ledger*.sqlite")), *sorted(run.glob("suites/*/ledger*.sqlite"))]
    return [path for path in found if path.is_file() and not path.is_symlink()]


def encode_text(value: str) -> str:
    """Text that SQLite can store: a lone surrogate cannot be encoded as UTF-8 and is escaped."""
    return value.encode("utf-8", "backslashreplace").decode()


def encode_scores(scores: Mapping[str, float]) -> str:
    """Scores by column as JSON, without loss of precision: NaN becomes null, infinity becomes 1e999, which is read as infinity."""
    kept = {
        name: "null" if math.isnan(value) else repr(value) if math.isfinite(value) else "1e999" if value > 0 else "-1e999"
        for name, value in scores.items()
    }
    return "{" + ", ".join(f"{json.dumps(name)}: {number}" for name, number in kept.items()) + "}"


def decode_scores(text: str) -> dict[str, float]:
    """The scores that ``encode_scores`` wrote. Raises ValueError for any other text."""
    try:
        found = json.loads(text, parse_int=float)
    except (RecursionError, TypeError):
        found = None
    if not isinstance(found, dict) or not all(value is None or isinstance(value, float) for value in found.values()):
        raise ValueError(f"{text!r:.100} are not the scores of a ledger")
    return {name: math.nan if value is None else value for name, value in found.items()}


def all_finite(scores: Mapping[str, float]) -> bool:
    """Whether each score is missing (NaN) or finite in float32. Stored scores that are infinite are never reused, so they cannot
    block a run."""
    return all(value != value or abs(value) <= _LARGEST for value in scores.values())


def _require_format(connection: sqlite3.Connection, path: Path, *, allow_new: bool) -> None:
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    if found != FORMAT and not (allow_new and found == 0):
        raise ValueError(f"{path} has format {found}, but this version of Retouch reads {FORMAT}; use the version that wrote it")


def _require_files(path: Path, *, writes: bool) -> None:
    """Raise OSError if a file that SQLite would open is a link, or, with ``writes``, has a second name."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        files.require_file(path.with_name(path.name + suffix), writes=writes)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Convert errors of SQLite into a ValueError that says what to do."""
    try:
        yield
    except sqlite3.Error as error:
        raise ValueError(
            f"the ledger {path} cannot be used: {error}. If the disk is full, free some space; if the file is damaged, move it "
            "away (the judge is then asked again for the lost scores) and start the run again"
        ) from error


UNREADABLE = (OSError, ValueError, SyntaxError, DecompressionBombError)
"""The errors of PIL for a file that is not an intact image; a damaged chunk of a PNG is a SyntaxError."""


def image_hash(image: Image.Image | None) -> str:
    """A hash of the image's mode, size and pixels; empty for None."""
    if image is None:
        return ""
    digest = hashlib.sha256(f"{image.mode} {image.width}x{image.height}\n".encode())
    digest.update(image.tobytes())
    return digest.hexdigest()


@dataclass(eq=False)
class ImageHasher:
    """``image_hash`` with a cache by object, because the samples of a group share their source images."""

    # keeps a reference to the image, so that its id is not reused
    _known: dict[int, tuple[Image.Image, str]] = field(default_factory=dict, init=False)

    def __call__(self, image: Image.Image | None) -> str:
        if image is None:
            return ""
        if id(image) not in self._known:
            self._known[id(image)] = image, image_hash(image)
        return self._known[id(image)][1]


def sample_hash(sample: Sample, judge: str, hasher: ImageHasher) -> str:
    """A hash of everything that a reward receives of a sample, and of the reward's fingerprint ``judge``."""
    task = sample.task
    images = [hasher(image) for image in (task.mask, task.reference, task.target, sample.image)]
    texts: list[Json] = [task.id, task.instruction, task.text, sample.completion, dict(task.tags), dict(task.meta)]
    return json_hash([judge, *texts, *images, *(hasher(image) for image in task.images)])


def json_hash(values: Sequence[Json]) -> str:
    """A hash of JSON values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


class ImageStore:
    """The folder ``pictures/`` of a run. Each image is one file ``pictures/ab/ab12....png``, even if it was scored several
    times."""

    def __init__(self, run: Path) -> None:
        self._root = run / "pictures"

    def path(self, digest: str) -> Path:
        """The path of the image with this SHA-256; the file may not exist."""
        return self._root / digest[:2] / f"{digest}.png"

    def save(self, digest: str, image: Image.Image) -> None:
        """Write the image unless its file exists. If the process is killed, the file is complete or does not exist."""
        path = self.path(digest)
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_png(path, image, compress_level=1)

    def read(self, digest: str) -> Image.Image | None:
        """The image; None if it was not stored, or if its file contains another image."""
        return read_image(self.path(digest), digest)


def read_image(path: Path, digest: str) -> Image.Image | None:
    """The image in a file; None if the file cannot be read, or if its image has another SHA-256."""
    try:
        with files.open_file(path) as file, Image.open(file) as opened:
            opened.load()
            image = opened.copy()
    except UNREADABLE:
        return None
    return image if image_hash(image) == digest else None
