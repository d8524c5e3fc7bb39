"""The pairs of images that people vote on: those of groups that wait in a queue, and those of stored samples.

A queue is a folder to which the run writes, and from which the voting page reads. ``votes.jsonl`` contains the votes. Each group
has a folder ``groups/<id>`` with its images and ``group.json``, which is written last, so that no reader sees an incomplete group.
The file ``closed`` marks a group whose votes the run has read, and which needs no more votes.
"""

import hashlib
import json
import os
import random
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from retouch.records import files
from retouch.rewards.ledger.database import UNREADABLE, image_hash
from retouch.types import Json, Task
from retouch_view.votes.log import OF_TASK, Side, Vote, VoteLog, VotePair, Votes, pair_id

GROUP = "group.json"
_CLOSED = "closed"
REPEAT_EVERY = 8
"""Number of new pairs for each hidden repeat."""
_LEAST_BETWEEN = 3
_AHEAD = 8


@dataclass(frozen=True, slots=True)
class QueuedGroup:
    """The distinct images that a policy made for one task. File names are relative to the queue's folder.

    ``images``: (file, hash) of each image. ``pairs``: indices of the images to compare, the most useful pairs first. ``at``: the
    time at which the group was queued, in seconds since 1970. ``meta``: the task's ``meta``, for simulated voters.
    """

    id: str
    task: str
    instruction: str
    images: tuple[tuple[str, str], ...]
    pairs: tuple[tuple[int, int], ...]
    source: str | None
    mask: str | None
    text: str | None
    tags: Mapping[str, str]
    meta: Mapping[str, Json]
    at: float

    def pair(self, indices: tuple[int, int]) -> VotePair:
        """Return two images of the group as a pair to vote on."""
        first, second = (Side(arm="", image=self.images[index][1], file=self.images[index][0]) for index in indices)
        return VotePair(first=first, second=second, **{name: getattr(self, name) for name in OF_TASK})

    def pair_id(self, pair: tuple[int, int]) -> str:
        """Return the identifier of a pair of the group's images (``log.pair_id``)."""
        return pair_id(self.task, self.images[pair[0]][1], self.images[pair[1]][1])


class VoteQueue:
    """The queue in the folder ``root``, with its ``log`` of votes. Several processes may use it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = VoteLog(root)
        self._known: dict[str, QueuedGroup] = {}

    def put(self, task: Task, images: Sequence[Image.Image], *, pairs: int | None) -> QueuedGroup:
        """Queue the distinct images of a task, at least two. The same images of the same task give the same group, so that a
        resumed run finds the existing votes. ``pairs``: the maximum number of pairs to vote on; None for all pairs."""
        hashes = [image_hash(image) for image in images]
        assert len(set(hashes)) == len(hashes) > 1, "the images must be distinct"
        identity = hashlib.sha256(json.dumps([task.id, task.instruction, pairs, *hashes]).encode()).hexdigest()[:16]
        folder = self.root / "groups" / identity
        known = self._read(folder)
        if known is not None:
            (folder / _CLOSED).unlink(missing_ok=True)
            return known
        folder.mkdir(parents=True, exist_ok=True)
        own = {"source": task.images[0] if task.images else None, "mask": task.mask}
        named = {name: image for name, image in own.items() if image is not None}
        stored = {f"{index:02d}": image for index, image in enumerate(images)} | named
        for name, image in stored.items():
            files.write_png(folder / f"{name}.png", image)
        files.write_json(
            folder / GROUP,
            {
                "task": task.id,
                "instruction": task.instruction,
                "images": [[f"{index:02d}.png", each] for index, each in enumerate(hashes)],
                "pairs": [list(pair) for pair in pairs_to_compare(len(images), most=pairs, seed=identity)],
                **{name: f"{name}.png" for name in named},
                "text": task.text,
                "tags": dict(task.tags),
                "meta": dict(task.meta),
                "at": time.time(),
            },
        )
        group = self._read(folder)
        assert group is not None
        return group

    def open_groups(self) -> list[QueuedGroup]:
        """Return the groups that the run has not closed, the oldest first. Damaged groups are left out."""
        try:
            folders = sorted(path for path in (self.root / "groups").iterdir() if not path.is_symlink())
        except OSError:  # no group was queued yet
            return []
        still_open = (folder for folder in folders if not (folder / _CLOSED).exists())
        found = [group for folder in still_open if (group := self._read(folder)) is not None]
        return sorted(found, key=lambda group: (group.at, group.id))

    def close(self, group: QueuedGroup) -> None:
        """Mark the group as closed: no more votes on it are needed."""
        files.write_atomic(self.root / "groups" / group.id / _CLOSED, b"")

    def unanswered(self, group: QueuedGroup) -> list[tuple[int, int]]:
        """Return the pairs of the group that have no vote, in order."""
        answered = self.log.read().by_pair
        return [pair for pair in group.pairs if not answered.get(group.pair_id(pair))]

    def _read(self, folder: Path) -> QueuedGroup | None:
        if folder.name not in self._known:
            try:
                found = files.read_record(folder / GROUP)

                def file(name: object) -> str:
                    if not _is_png(name):
                        raise ValueError(f"{name!r} is not an image file of a group")
                    return f"groups/{folder.name}/{name}"

                images = tuple((file(name), str(each)) for name, each in found["images"])
                pairs = tuple((int(first), int(second)) for first, second in found["pairs"])
                if not all(0 <= index < len(images) for pair in pairs for index in pair):
                    raise ValueError("a pair names an image that does not exist")
                group = QueuedGroup(
                    id=folder.name,
                    task=str(found["task"]),
                    instruction=str(found["instruction"]),
                    images=images,
                    pairs=pairs,
                    source=file(found["source"]) if found.get("source") else None,
                    mask=file(found["mask"]) if found.get("mask") else None,
                    text=None if found.get("text") is None else str(found["text"]),
                    tags={str(key): str(value) for key, value in dict(found["tags"]).items()},
                    meta=dict(found["meta"]),
                    at=float(found["at"]),
                )
            except (OSError, ValueError, TypeError, KeyError, OverflowError):  # the group is incomplete or damaged
                return None
            self._known[folder.name] = group
        return self._known[folder.name]


def _is_png(name: object) -> bool:
    return isinstance(name, str) and name.endswith(".png") and Path(name).name == name


def pairs_to_compare(count: int, *, most: int | None, seed: str) -> list[tuple[int, int]]:
    """Return pairs of ``count`` images, each pair once, at most ``most``, ordered so that every image occurs as early as possible.

    The images are placed on a circle in random order. The neighbours come first (every second pair, then the others), so that the
    first ``count / 2`` pairs contain every image and the first ``count`` pairs connect all images. Then come the images at distance
    2, and so on.
    """
    order = list(range(count))
    shuffled = random.Random(seed)
    shuffled.shuffle(order)
    found: dict[frozenset[int], tuple[int, int]] = {}
    for distance in range(1, count // 2 + 1):
        starts = [*range(0, count, 2), *range(1, count, 2)]
        for start in starts:
            pair = order[start], order[(start + distance) % count]
            found.setdefault(frozenset(pair), pair if shuffled.random() < 0.5 else pair[::-1])
    return list(found.values())[:most]


class StoredPairs:
    """Makes pairs for the votes in ``folder``. The hashes of unchanged images are cached."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._hashes: dict[Path, tuple[int, str]] = {}

    def pairs(self, first: "StoredSamples", second: "StoredSamples") -> list[VotePair]:
        """A pair for each task that both sets of samples have, unless the two images are equal or one is missing."""
        others = {line["task"]: line for line in second.lines if _is_png(line.get("image"))}
        found = []
        for line in first.lines:
            other = others.get(line["task"])
            if other is None or not _is_png(line.get("image")):
                continue
            sides = self._side(first, line), self._side(second, other)
            if sides[0] is None or sides[1] is None or sides[0].image == sides[1].image:
                continue
            given = line.get("tags")
            tags = {str(key): str(value) for key, value in given.items()} if isinstance(given, dict) else {}
            source = self._relative(first.folder / line["source"]) if _is_png(line.get("source")) else None
            about = {"task": line["task"], "instruction": line["instruction"], "source": source, "tags": tags}
            found.append(VotePair(first=sides[0], second=sides[1], **about))
        return found

    def _side(self, samples: "StoredSamples", line: Mapping[str, Any]) -> Side | None:
        path = samples.folder / line["image"]
        try:
            stamp = path.stat().st_mtime_ns
            if self._hashes.get(path, (0, ""))[0] != stamp:
                with Image.open(path) as opened:
                    self._hashes[path] = stamp, image_hash(opened)
        except UNREADABLE:
            return None
        scores = {name: float(value) for name, value in line["scores"].items() if type(value) in (int, float)}
        return Side(arm=samples.arm, image=self._hashes[path][1], file=self._relative(path), scores=scores)

    def _relative(self, path: Path) -> str:
        return Path(os.path.relpath(path, self._folder)).as_posix()


@dataclass(frozen=True, slots=True)
class StoredSamples:
    """The held-out samples of a run after a step. ``arm``: the run and the step. ``folder``: the folder with the images.
    ``lines``: their lines of ``samples.jsonl``."""

    arm: str
    folder: Path
    lines: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class NextPair:
    """The next pair of a voter. ``exchanged``: the second image is on the left. ``repeat``: the voter has answered this pair
    before, with exchanged sides."""

    pair: VotePair
    exchanged: bool
    repeat: bool


def next_pair(pairs: Sequence[VotePair], votes: Votes, voter: str, *, shared: bool) -> NextPair | None:
    """The next pair for a voter; None if none is left.

    ``shared``: one vote of any voter on a pair is enough, and a voter gets one of the first pairs without a vote, as in a queue.
    Otherwise each voter sees all pairs, in a different order for each voter. After ``REPEAT_EVERY`` pairs, an earlier pair is asked
    again with its sides exchanged, so that a voter who always chooses the same side contradicts the first answer.
    """
    known = {pair.id: pair for pair in pairs}
    own = [vote for vote in votes.votes if vote.voter == voter]
    here = [vote for vote in own if vote.pair in known]
    answered = votes.by_pair if shared else {vote.pair: (vote,) for vote in here}
    left = [pair for identity, pair in known.items() if not answered.get(identity)]
    if not left:
        return None
    again = _repeat(own if shared else here, known)
    if again is not None:
        pair = known[again.pair]
        return NextPair(pair, exchanged=again.left.image == pair.first.image, repeat=True)
    ahead = left[:_AHEAD] if shared else left  # so that the voters of a queue do not all get the same pair
    chosen = min(ahead, key=lambda pair: _draw(voter, pair.id, "order"))
    return NextPair(chosen, exchanged=_draw(voter, chosen.id, "side")[0] % 2 == 1, repeat=False)


def _repeat(votes: Sequence[Vote], known: Container[str]) -> Vote | None:
    """The vote on the pair of ``known`` that is to be repeated; None if no repeat is due."""
    repeats = {vote.pair for vote in votes if vote.repeat}
    # Counted from the last repeat: in a queue, repeats that were due while no earlier pair was open must not follow each other.
    since = next((number for number, vote in enumerate(reversed(votes)) if vote.repeat), len(votes))
    if since < REPEAT_EVERY:
        return None
    recent = {vote.pair for vote in votes[-_LEAST_BETWEEN:]}
    waiting = [vote for vote in votes if not vote.repeat and vote.pair in known and vote.pair not in repeats | recent]
    return min(waiting, key=lambda vote: _draw(vote.voter, vote.pair, "repeat")) if waiting else None


def _draw(voter: str, pair: str, purpose: str) -> bytes:
    return hashlib.sha256(f"{purpose}\n{pair}\n{voter}".encode(errors="surrogatepass")).digest()
