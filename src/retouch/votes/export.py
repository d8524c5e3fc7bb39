"""Votes as a preference data set: a folder of images with ``metadata.jsonl``, from which DPO trains without rollouts.

A line has a chosen and a rejected image (``data.kind: 'folder'``, ``objective: { kind: 'dpo', pairs: 'data' }``).
"""

import math
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from retouch.records import files
from retouch.rewards.ledger.hashing import image_hash
from retouch.rewards.votes.log import Vote, VoteLog


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written. ``undecided``: pairs with as many votes for one image as for the other. ``lost``: pairs of which an image
    is no longer there, or has changed."""

    pairs: int
    undecided: int
    lost: int


def export(logs: Sequence[VoteLog], folder: Path) -> Exported:
    """Write the pairs of which most votes prefer one image. Pairs in which only "both bad" or ties were voted are left out.

    Raises ValueError if the folder exists, or if no pair remains.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists; name a new folder")
    by_pair: dict[str, list[tuple[Path, Vote]]] = defaultdict(list)
    for log in logs:
        for vote in log.read().votes:
            by_pair[vote.pair].append((log.folder, vote))
    lines: list[dict[str, Any]] = []
    undecided = lost = 0
    folder.mkdir(parents=True)
    try:
        for pair, given in sorted(by_pair.items()):
            root, vote = given[0]
            for_left = math.fsum(_points(each, vote.left.image) for _, each in given) / len(given)
            if for_left == 0.5:
                undecided += 1
                continue
            line = _line(root, vote, folder, pair=pair, left_is_better=for_left > 0.5, votes=len(given))
            lost += line is None
            lines += [] if line is None else [line]
        if not lines:
            raise ValueError(f"no pair with a decision and its images: {undecided} undecided, {lost} without their images")
        files.write_lines(folder / "metadata.jsonl", lines)
    except BaseException:
        shutil.rmtree(folder)
        raise
    return Exported(len(lines), undecided, lost)


def _points(vote: Vote, image: str) -> float:
    """What the vote gives to an image of its pair."""
    return vote.left_points if vote.left.image == image else 1 - vote.left_points


def _line(root: Path, vote: Vote, folder: Path, *, pair: str, left_is_better: bool, votes: int) -> dict[str, Any] | None:
    chosen, rejected = (vote.left, vote.right) if left_is_better else (vote.right, vote.left)
    named = {"chosen": chosen.file, "rejected": rejected.file, "image": vote.source, "mask": vote.mask}
    images = {name: _open(root, file) for name, file in named.items() if file is not None}
    expected = {"chosen": chosen.image, "rejected": rejected.image}
    if any(image is None for image in images.values()) or any(image_hash(images[name]) != each for name, each in expected.items()):
        return None
    for name, image in images.items():
        assert image is not None
        image.save(folder / f"{pair}-{name}.png")
    text = {} if vote.text is None else {"text": vote.text}
    stored = {name: f"{pair}-{name}.png" for name in images}
    return {"id": pair, "instruction": vote.instruction, "source": vote.task, "votes": votes, **text, **stored}


def _open(root: Path, file: str) -> Image.Image | None:
    """The image of a file in the folder of the votes, or in another run next to it; None if there is none."""
    path = (root / file).resolve()
    if not path.is_relative_to(root.resolve().parent):
        return None
    try:
        with Image.open(path) as opened:
            opened.load()
            return opened
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
