"""The queue of groups that wait for votes: a folder to which the run writes, and from which the voting page reads.

``votes.jsonl`` contains the votes. Each group has a folder ``groups/<id>`` with its images and ``group.json``, which is written
last, so that no reader sees an incomplete group. The file ``closed`` marks a group whose votes the run has read, and which needs no
more votes.
"""

import hashlib
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL.Image import Image

from retouch.records import files
from retouch.rewards.ledger.database import image_hash
from retouch.types import Json, Task
from retouch_view.votes.log import Side, VoteLog, VotePair, pair_id

GROUP = "group.json"
_CLOSED = "closed"


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
        return VotePair(
            task=self.task,
            instruction=self.instruction,
            first=first,
            second=second,
            source=self.source,
            mask=self.mask,
            text=self.text,
            tags=self.tags,
        )

    def pair_id(self, pair: tuple[int, int]) -> str:
        """Return the identifier of a pair of the group's images (``log.pair_id``)."""
        return pair_id(self.task, self.images[pair[0]][1], self.images[pair[1]][1])


class VoteQueue:
    """The queue in the folder ``root``, with its ``log`` of votes. Several processes may use it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = VoteLog(root)
        self._known: dict[str, QueuedGroup] = {}

    def put(self, task: Task, images: Sequence[Image], *, pairs: int | None) -> QueuedGroup:
        """Queue the distinct images of a task, at least two.

        The same images of the same task give the same group, so that a resumed run finds the existing votes. ``pairs``: the maximum
        number of pairs to vote on; None for all pairs.
        """
        hashes = [image_hash(image) for image in images]
        assert len(set(hashes)) == len(hashes) > 1, "the images must be distinct"
        identity = hashlib.sha256(json.dumps([task.id, task.instruction, pairs, *hashes]).encode()).hexdigest()[:16]
        folder = self._folder(identity)
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
        found = [group for folder in self._open_folders() if (group := self._read(folder)) is not None]
        return sorted(found, key=lambda group: (group.at, group.id))

    def close(self, group: QueuedGroup) -> None:
        """Mark the group as closed: no more votes on it are needed."""
        files.write_atomic(self._folder(group.id) / _CLOSED, b"")

    def unanswered(self, group: QueuedGroup) -> list[tuple[int, int]]:
        """Return the pairs of the group that have no vote, in order."""
        answered = self.log.read().by_pair
        return [pair for pair in group.pairs if not answered.get(group.pair_id(pair))]

    def _folder(self, identity: str) -> Path:
        return self.root / "groups" / identity

    def _open_folders(self) -> Iterator[Path]:
        try:
            folders = sorted(path for path in (self.root / "groups").iterdir() if not path.is_symlink())
        except OSError:  # no group was queued yet
            return
        yield from (path for path in folders if not (path / _CLOSED).exists())

    def _read(self, folder: Path) -> QueuedGroup | None:
        if folder.name not in self._known:
            try:
                group = _group(folder.name, files.read_record(folder / GROUP))
            except (OSError, ValueError, TypeError, KeyError, OverflowError):  # the group is incomplete or damaged
                return None
            self._known[folder.name] = group
        return self._known[folder.name]


def _group(identity: str, found: Mapping[str, Any]) -> QueuedGroup:
    """Parse the content of ``group.json``. Raises ValueError, TypeError, KeyError or OverflowError if it is damaged."""
    place = f"groups/{identity}"
    images = tuple((f"{place}/{_file_name(file)}", str(each)) for file, each in found["images"])
    pairs = tuple((int(first), int(second)) for first, second in found["pairs"])
    if not all(0 <= index < len(images) for pair in pairs for index in pair):
        raise ValueError("a pair names an image that does not exist")
    return QueuedGroup(
        id=identity,
        task=str(found["task"]),
        instruction=str(found["instruction"]),
        images=images,
        pairs=pairs,
        source=f"{place}/{_file_name(found['source'])}" if found.get("source") else None,
        mask=f"{place}/{_file_name(found['mask'])}" if found.get("mask") else None,
        text=None if found.get("text") is None else str(found["text"]),
        tags={str(key): str(value) for key, value in dict(found["tags"]).items()},
        meta=dict(found["meta"]),
        at=float(found["at"]),
    )


def _file_name(name: Any) -> str:
    """Check that the name is that of a PNG file in the group's folder. Raises ValueError for a path or another file."""
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(".png"):
        raise ValueError(f"{name!r} is not an image file of a group")
    return name


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
