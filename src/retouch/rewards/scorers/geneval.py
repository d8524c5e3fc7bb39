"""GenEval's object checks (arXiv 2310.11513): are the things there that a prompt asks for, so many, in such colours, placed so?

A task brings its requirements in ``meta``, in GenEval's own form::

    {"tag": "position", "include": [{"class": "dog", "count": 1},
                                    {"class": "tie", "count": 1, "position": ["right of", 0]}],
     "exclude": [{"class": "cat", "count": 1}]}
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from retouch.rewards.scorers.detectors import Box, Detector, Found, load_detector, thinned
from retouch.rewards.scorers.two_towers import TwoTowers
from retouch.rewards.scorers.weights_folder import weights_digest, weights_folder
from retouch.types import Column, Sample, Scores, Task

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
_NEAR = 0.1  # of both sizes together: an offset up to this is no direction


class Wanted(BaseModel):
    """One thing that must be there: at least ``count`` of it, of ``color``, each ``position[0]`` every object that satisfies
    requirement number ``position[1]``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(alias="class", min_length=1)
    count: int = Field(1, ge=1)
    color: str | None = None
    position: tuple[str, int] | None = None


class Unwanted(BaseModel):
    """One thing of which there must be fewer than ``count``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(alias="class", min_length=1)
    count: int = Field(ge=1)


class Requirements(BaseModel):
    """What a picture must show."""

    tag: str = ""
    include: tuple[Wanted, ...] = ()
    exclude: tuple[Unwanted, ...] = ()

    @property
    def names(self) -> list[str]:
        """Everything to look for, each once."""
        return list(dict.fromkeys(one.name for one in (*self.include, *self.exclude)))


class ColourNamer(Protocol):
    """Says which of ``COLOURS`` a thing has."""

    def __call__(self, image: Image.Image, boxes: Sequence[Box], name: str) -> list[str]: ...


class ClipColours:
    """The likeliest of ``COLOURS`` by a CLIP, of the picture cut to each box. GenEval also greys out what is not the object, for
    which a detector of boxes has no mask."""

    def __init__(self, path: str | Path = "openai/clip-vit-large-patch14", *, device: torch.device | str = "cpu") -> None:
        self._towers = TwoTowers(path, device=device)

    @property
    def fingerprint(self) -> str:
        """The model's weights."""
        return self._towers.fingerprint

    def __call__(self, image: Image.Image, boxes: Sequence[Box], name: str) -> list[str]:
        """A colour for each box."""
        prompts = (f"a photo of a {{}} {name}", f"a photo of a {{}}-colored {name}", "a photo of a {} object")
        texts = self._towers.texts([prompt.format(colour) for colour in COLOURS for prompt in prompts]).vectors
        colours = torch.nn.functional.normalize(texts.view(len(COLOURS), len(prompts), -1).mean(dim=1), dim=1)
        pictures = self._towers.images([_cut(image, box) for box in boxes])
        return [COLOURS[place] for place in (pictures @ colours.T).argmax(dim=1).tolist()]


class GenEvalReward:
    """Columns, each 0 to 1: ``correct``, 1 where all requirements are met, as GenEval has it; ``met``, the share of them that are.

    ``detector``: OWL-ViT, OWLv2 or Grounding DINO. Objects count above a confidence of ``threshold``, or, in tasks of the tag
    "counting", of ``counting_threshold``; GenEval's detector of COCO's 80 classes takes 0.3 and 0.9, an open-vocabulary one is less
    sure.
    ``clip``: names colours; needed where a task asks for one.
    A sample without a picture is the policy's own fault: 0. ValueError: no weights, or a task without requirements, or with some
    that are not GenEval's.
    """

    columns: Mapping[str, Column] = {"correct": Column(0.0, 1.0), "met": Column(0.0, 1.0)}

    def __init__(
        self,
        detector: str | Path = "google/owlv2-base-patch16-ensemble",
        *,
        clip: str | Path | None = None,
        threshold: float = 0.3,
        counting_threshold: float = 0.4,
        device: torch.device | str = "cpu",
    ) -> None:
        if not (0 <= threshold <= 1 and 0 <= counting_threshold <= 1):
            raise ValueError(f"thresholds {threshold} and {counting_threshold}: a confidence is 0 to 1")
        self.detector: Detector = load_detector(detector, device=device)
        self.colours: ColourNamer | None = None if clip is None else ClipColours(clip, device=device)
        self.threshold, self.counting_threshold = threshold, counting_threshold
        self._weights = weights_digest(weights_folder(detector))

    @property
    def fingerprint(self) -> str:
        """The detector's weights, when its objects count, and who names their colours."""
        colours = self.colours.fingerprint if isinstance(self.colours, ClipColours) else "no colours"
        return f"detector {self._weights}, above {self.threshold:g}, counting {self.counting_threshold:g}; {colours}"

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Each column as (b,), float32."""
        scores = {name: torch.zeros(len(samples)) for name in self.columns}
        for row, sample in enumerate(samples):
            wanted = requirements(sample.task)
            if self.colours is None and any(one.color for one in wanted.include):
                raise ValueError(f"task {sample.task.id!r} asks for a colour, which a CLIP names; give `clip`, its folder or id")
            if sample.image is not None:
                above = self.counting_threshold if wanted.tag == "counting" else self.threshold
                found = thinned(self.detector(sample.image, wanted.names), above=above)
                held = met(wanted, found, sample.image, self.colours)
                scores["correct"][row] = float(all(held))
                scores["met"][row] = sum(held) / len(held)
        return scores


def requirements(task: Task) -> Requirements:
    """What the task's ``meta`` asks for. ValueError where that is nothing, or not in GenEval's form."""
    given = {key: task.meta[key] for key in ("tag", "include", "exclude") if task.meta.get(key) is not None}
    try:
        read = Requirements.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"task {task.id!r}: its meta is not in GenEval's form: {where}: {first['msg']}") from None
    if not read.names:
        raise ValueError(f'task {task.id!r} has no requirements: give meta["include"] or meta["exclude"], as GenEval does')
    for number, one in enumerate(read.include):
        if one.color is not None and one.color not in COLOURS:
            raise ValueError(f"task {task.id!r} asks for the colour {one.color!r}; GenEval's are {', '.join(COLOURS)}")
        if one.position is not None and (one.position[0] not in DIRECTIONS or not 0 <= one.position[1] < number):
            raise ValueError(
                f"task {task.id!r} asks for the position {list(one.position)}; give one of {', '.join(DIRECTIONS)} and the number "
                "of an earlier requirement"
            )
    return read


def met(wanted: Requirements, found: Sequence[Found], image: Image.Image, colours: ColourNamer | None) -> list[bool]:
    """Whether each requirement holds: those to include, in order, then those to exclude. Of the objects of a name only as many as
    are asked for are looked at, the surest first."""
    groups: list[list[Found] | None] = []
    for one in wanted.include:
        objects = [other for other in found if other.name == one.name][: one.count]
        holds = len(objects) == one.count
        if holds and one.color is not None:
            assert colours is not None
            holds = colours(image, [other.box for other in objects], one.name).count(one.color) == one.count
        if holds and one.position is not None:
            direction, number = one.position
            others = groups[number]
            holds = others is not None and all(direction in directions(a.box, b.box) for a in objects for b in others)
        groups.append(objects if holds else None)
    absent = [sum(other.name == one.name for other in found) < one.count for one in wanted.exclude]
    return [*(group is not None for group in groups), *absent]


DIRECTIONS = ("left of", "right of", "above", "below")


def directions(a: Box, b: Box) -> set[str]:
    """Where ``a`` lies as seen from ``b``: the offset of their centres, less a tenth of both sizes together along each axis, over
    the offset's length; a direction counts from a half on. Diagonally there can be two."""
    offset, reduced = [], []
    for axis in (0, 1):
        apart = (a[axis] + a[axis + 2] - b[axis] - b[axis + 2]) / 2
        sizes = abs(a[axis + 2] - a[axis]) + abs(b[axis + 2] - b[axis])
        left = max(abs(apart) - _NEAR * sizes, 0.0)
        offset.append(apart)
        reduced.append(left if apart > 0 else -left)
    length = (offset[0] ** 2 + offset[1] ** 2) ** 0.5
    if max(map(abs, reduced)) < 1e-3:
        return set()
    x, y = (part / length for part in reduced)
    told = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {direction for direction, holds in told.items() if holds}


def _cut(image: Image.Image, box: Box) -> Image.Image:
    """The picture within the box, at least one pixel of it."""
    left, top = (int(min(max(low, 0), limit - 1)) for low, limit in zip(box[:2], image.size, strict=True))
    right, bottom = (int(min(max(high, low + 1), limit)) for high, low, limit in zip(box[2:], (left, top), image.size, strict=True))
    return image.convert("RGB").crop((left, top, right, bottom))
