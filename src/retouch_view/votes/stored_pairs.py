"""Pairs of stored samples: the images of the same held-out tasks after two steps of a run, or in two runs."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from retouch.rewards.ledger.database import UNREADABLE, image_hash
from retouch_view.votes.log import Side, VotePair


class StoredPairs:
    """Makes pairs for the votes in ``folder``. The hashes of unchanged images are cached."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._hashes: dict[Path, tuple[int, str]] = {}

    def pairs(self, first: "StoredSamples", second: "StoredSamples") -> list[VotePair]:
        """A pair for each task that both sets of samples have, unless the two images are equal or one is missing."""
        others = {line["task"]: line for line in second.lines if _is_file(line.get("image"))}
        found = []
        for line in first.lines:
            other = others.get(line["task"])
            if other is None or not _is_file(line.get("image")):
                continue
            sides = self._side(first, line), self._side(second, other)
            if sides[0] is None or sides[1] is None or sides[0].image == sides[1].image:
                continue
            tags = line.get("tags")
            found.append(
                VotePair(
                    task=line["task"],
                    instruction=line["instruction"],
                    first=sides[0],
                    second=sides[1],
                    source=None if not _is_file(line.get("source")) else self._relative(first.folder / line["source"]),
                    tags={str(key): str(value) for key, value in tags.items()} if isinstance(tags, dict) else {},
                )
            )
        return found

    def _side(self, samples: "StoredSamples", line: Mapping[str, Any]) -> Side | None:
        path = samples.folder / line["image"]
        digest = self._hash(path)
        if digest is None:
            return None
        scores = {name: float(value) for name, value in line["scores"].items() if type(value) in (int, float)}
        return Side(arm=samples.arm, image=digest, file=self._relative(path), scores=scores)

    def _hash(self, path: Path) -> str | None:
        try:
            stamp = path.stat().st_mtime_ns
            if self._hashes.get(path, (0, ""))[0] != stamp:
                with Image.open(path) as opened:
                    self._hashes[path] = stamp, image_hash(opened)
            return self._hashes[path][1]
        except UNREADABLE:
            return None

    def _relative(self, path: Path) -> str:
        return Path(os.path.relpath(path, self._folder)).as_posix()


class StoredSamples:
    """The held-out samples of a run after a step. ``lines``: the lines of ``samples.jsonl``. ``folder``: the folder with the
    images."""

    def __init__(self, run: str, step: int, folder: Path, lines: Sequence[Mapping[str, Any]]) -> None:
        self.arm = f"{run} step {step}"
        self.folder = folder
        self.lines = [line for line in lines if line["set"] == "heldout"]


def _is_file(name: object) -> bool:
    """Whether ``name`` is the name of a PNG file in the folder of the samples."""
    return isinstance(name, str) and name.endswith(".png") and Path(name).name == name
