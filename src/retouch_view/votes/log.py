"""Votes on disk: a file of JSON lines to which lines are only appended.

A vote is one line. To undo a vote, a line is appended that names the vote; this vote is then ignored. Several processes may append
to one file. A line that a crash has truncated, or that another program has damaged, is skipped and counted.
"""

import hashlib
import json
import os
import secrets
import threading
import time
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import AllowInfNan, BeforeValidator, Strict, TypeAdapter, ValidationError

from retouch.records import files

FILE = "votes.jsonl"
LONGEST_NAME = 64
Choice: TypeAlias = Literal["left", "right", "tie", "both_bad"]
CHOICES: tuple[str, ...] = get_args(Choice)
_Text: TypeAlias = Annotated[str, Strict()]
_Number: TypeAlias = Annotated[float, Strict(), AllowInfNan(False)]


def _finite(scores: object) -> object:
    """Leave out the scores that are not numbers, not finite, or too large for a float."""
    if not isinstance(scores, dict):
        return scores
    kept = {}
    for name, value in scores.items():
        try:
            kept[name] = _NUMBER.validate_python(value)
        except ValidationError:
            continue
    return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two images of a vote.

    ``arm``: the origin of the image, such as a run and a step; empty if arms are not compared. ``image``: the SHA-256 of its pixels
    (``image_hash``). ``file``: its path relative to the folder of the votes. ``scores``: its scores by column.
    """

    arm: _Text
    image: _Text
    file: _Text
    scores: Annotated[Mapping[str, float], BeforeValidator(_finite)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """The answer of a voter to a pair of images of one task.

    ``voter``: the name that the voter gave. ``at``: the time in seconds since 1970. ``source``, ``mask``: files of the task's
    images, relative to the folder of the votes; None if there is none. ``repeat``: the voter had answered this pair before, and was
    not told so.
    """

    id: _Text
    at: _Number
    voter: _Text
    task: _Text
    instruction: _Text
    left: Side
    right: Side
    choice: Choice
    source: _Text | None = None
    mask: _Text | None = None
    text: _Text | None = None
    tags: Mapping[_Text, _Text] = field(default_factory=dict)
    repeat: Annotated[bool, BeforeValidator(lambda given: given is True)] = False

    @property
    def pair(self) -> str:
        """The identifier of the task and the two images; it does not depend on which image is on the left."""
        return pair_id(self.task, self.left.image, self.right.image)

    @property
    def left_points(self) -> float:
        """The points of the left image: 1 if it was preferred, 0 if the right image was, 0.5 for ``tie`` and ``both_bad``."""
        return {"left": 1.0, "right": 0.0}.get(self.choice, 0.5)

    @property
    def is_decided(self) -> bool:
        """Whether one image was preferred."""
        return self.choice in ("left", "right")

    def to_json(self) -> dict[str, Any]:
        """Return the vote as JSON, for one line of the file."""
        return {**_VOTE.dump_python(self, exclude_none=True), "pair": self.pair}


_NUMBER, _VOTE = TypeAdapter(_Number), TypeAdapter(Vote)
OF_TASK = ("task", "instruction", "source", "mask", "text", "tags")
"""The fields of a pair and of a vote that describe the task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VotePair:
    """Two images of one task to vote on. The order of ``first`` and ``second`` contains no information about the images; the other
    fields are those of ``Vote``."""

    task: str
    instruction: str
    first: Side
    second: Side
    source: str | None = None
    mask: str | None = None
    text: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The identifier of the pair, equal to ``Vote.pair``."""
        return pair_id(self.task, self.first.image, self.second.image)

    def vote(self, choice: Choice, *, voter: str, exchanged: bool = False, repeat: bool = False) -> Vote:
        """Create a vote with a new id and the current time. ``exchanged``: the second image was on the left."""
        left, right = (self.second, self.first) if exchanged else (self.first, self.second)
        own: dict[str, Any] = {name: getattr(self, name) for name in OF_TASK}
        own |= {"id": secrets.token_hex(8), "at": time.time(), "voter": voter, "choice": choice, "repeat": repeat}
        return Vote(left=left, right=right, **own)


def pair_id(task: str, first: str, second: str) -> str:
    """Return a hash of a task and two images (16 hexadecimal digits), which does not depend on the order of the images."""
    return hashlib.sha256(json.dumps([task, *sorted((first, second))]).encode()).hexdigest()[:16]


def voter_name(given: str) -> str:
    """Remove control characters and repeated spaces. Raises ValueError if the name is empty or longer than 64 characters."""
    visible = "".join(" " if char.isspace() else char for char in given if unicodedata.category(char)[0] != "C" or char.isspace())
    name = " ".join(visible.split())
    if not name or len(name) > LONGEST_NAME:
        raise ValueError(f"give a name of 1 to {LONGEST_NAME} characters")
    return name


@dataclass(frozen=True, slots=True)
class Votes:
    """The ``votes`` that count, in the order of their lines, and the same votes ``by_pair``. ``undone``: number of undone votes.
    ``damaged``: number of lines that are not valid votes."""

    votes: tuple[Vote, ...] = ()
    by_pair: Mapping[str, tuple[Vote, ...]] = field(default_factory=dict)
    undone: int = 0
    damaged: int = 0


class VoteLog:
    """The votes in ``folder/votes.jsonl``. ``read`` parses only the lines appended since the last call. Threads may share a log."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / FILE
        self._lock = threading.Lock()
        self._begin(None)

    def _begin(self, inode: int | None) -> None:
        self._inode, self._offset = inode, 0
        self._found: dict[str, Vote] = {}
        self._pairs: dict[str, tuple[Vote, ...]] = {}
        self._undone = self._damaged = 0
        self._last = Votes()

    def add(self, vote: Vote) -> None:
        """Append a vote. The vote is on disk when this method returns."""
        self._append(vote.to_json())

    def undo(self, vote: str, *, voter: str) -> None:
        """Undo the vote with this id. This has an effect only if the same voter gave the vote."""
        self._append({"id": secrets.token_hex(8), "at": time.time(), "voter": voter, "undo": vote})

    def read(self) -> Votes:
        """Return all votes that count; none if the file does not exist."""
        with self._lock:
            try:
                with files.open_file(self.path) as file:
                    stat = os.fstat(file.fileno())
                    if stat.st_ino != self._inode or stat.st_size < self._offset:
                        self._begin(stat.st_ino)
                    if stat.st_size == self._offset:
                        return self._last
                    file.seek(self._offset)
                    complete, newline, _ = file.read().rpartition(b"\n")
            except FileNotFoundError:
                self._begin(None)
                return self._last
            self._offset += len(complete) + len(newline)
            for line in complete.split(b"\n") if newline else ():
                self._take(line)
            self._last = Votes(tuple(self._found.values()), dict(self._pairs), self._undone, self._damaged)
            return self._last

    def _take(self, line: bytes) -> None:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and isinstance(row.get("undo"), str):
            undone = self._found.get(row["undo"])
            if undone is not None and undone.voter == row.get("voter"):
                del self._found[undone.id]
                self._pairs[undone.pair] = tuple(vote for vote in self._pairs[undone.pair] if vote.id != undone.id)
                self._undone += 1
            return
        try:
            vote: Vote | None = _VOTE.validate_python(row)
        except ValidationError:
            vote = None
        if vote is None or vote.id in self._found:
            self._damaged += 1
            return
        self._found[vote.id] = vote
        self._pairs[vote.pair] = (*self._pairs.get(vote.pair, ()), vote)

    def _append(self, row: Mapping[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with files.locked(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT) as handle:
            size = os.fstat(handle).st_size
            if size and os.pread(handle, 1, size - 1) != b"\n":
                os.write(handle, b"\n")  # a crash has truncated the last line: the next row begins a new one
            files.append_line(self.path, row)


def logs_of(folder: Path) -> list[VoteLog]:
    """Return the vote logs of a run: in the run's folder, and in its queue. Raises ValueError if there is none."""
    found = [VoteLog(place) for place in (folder, folder / "queue") if (place / FILE).is_file()]
    if not found:
        raise ValueError(f"{folder} has no {FILE}; collect votes with: retouch view {folder} --vote")
    return found
