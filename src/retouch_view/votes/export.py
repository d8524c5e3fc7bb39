"""Export votes as a preference data set: a folder of images with ``metadata.jsonl``, on which DPO trains without rollouts.

Each line has a chosen and a rejected image (``data.kind: 'folder'``, ``objective: { kind: 'dpo', pairs: 'data' }``).
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
from retouch.rewards.ledger.database import UNREADABLE, image_hash
from retouch_view.votes.log import Vote, VoteLog


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export. ``pairs``: number of pairs written. ``undecided``: number of pairs with equal votes for both images.
    ``lost``: number of pairs with an image that is missing or has changed."""

    pairs: int
    undecided: int
    lost: int


def export(logs: Sequence[VoteLog], folder: Path) -> Exported:
    """Write the pairs in which a majority of votes prefers one image. Pairs with only ties and "both bad" votes are left out.

    Raises ValueError if the folder exists, or if no pair remains.
    """
    if folder.exists():
        raise ValueError(f"--to: {folder} exists; name a new folder")
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
            raise ValueError(f"there is no pair to export: {undecided} are undecided, and {lost} have missing or changed images")
        files.write_lines(folder / "metadata.jsonl", lines)
    except BaseException:
        shutil.rmtree(folder)
        raise
    return Exported(len(lines), undecided, lost)


def _points(vote: Vote, image: str) -> float:
    """The points of the vote for an image of its pair, 0 to 1."""
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
        files.write_png(folder / f"{pair}-{name}.png", image)
    text = {} if vote.text is None else {"text": vote.text}
    stored = {name: f"{pair}-{name}.png" for name in images}
    return {"id": pair, "instruction": vote.instruction, "source": vote.task, "votes": votes, **text, **stored}


def _open(root: Path, file: str) -> Image.Image | None:
    """Read the image of a file in the folder of the votes, or in another run next to this folder; None if it cannot be read."""
    path = (root / file).resolve()
    if not path.is_relative_to(root.resolve().parent):
        return None
    try:
        with Image.open(path) as opened:
            opened.load()
            return opened
    except UNREADABLE:
        return None
