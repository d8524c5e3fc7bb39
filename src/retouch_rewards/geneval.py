"""GenEval's object checks (arXiv 2310.11513): does the image show the required objects, counts, colours and positions?

The ``meta`` of a task contains its requirements, in GenEval's format::

    {"tag": "position", "include": [{"class": "dog", "count": 1},
                                    {"class": "tie", "count": 1, "position": ["right of", 0]}],
     "exclude": [{"class": "cat", "count": 1}]}

``"negated": true`` in an entry of ``include`` is an addition to this format: the objects must be there, but not with this colour or
position ("a cup that is not red").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from retouch.config.section import Share
from retouch.rewards.base import Device, PathText, RewardSection
from retouch.types import Column, Sample, Scores, Task
from retouch_rewards.weights import weights_digest, weights_folder

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from retouch_rewards.networks import Box, Detection, Detector

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
DIRECTIONS = ("left of", "right of", "above", "below")
_NEAR = 0.1  # fraction of the sum of both boxes' sizes; a smaller offset of the centres counts as no direction


class GenEvalReward(RewardSection):
    """GenEval's checks of objects, counts, colours and positions (arXiv 2310.11513), by an open-vocabulary detector.

    Columns, each 0 to 1: ``correct``, 1 if the image meets all requirements, as in GenEval; ``met``, the share of the requirements
    that it meets.

    Example::

        >>> retouch.rewards.GenEval(clip="openai/clip-vit-base-patch32").threshold
        0.3
    """

    kind: Literal["geneval"] = "geneval"
    detector: PathText = "google/owlv2-base-patch16-ensemble"
    """Folder of an OWL-ViT, OWLv2 or Grounding DINO model, or its id in the Hugging Face cache."""
    clip: PathText | None = None
    """Folder or Hugging Face id of the CLIP model that classifies colours; null if no task requires a colour."""
    threshold: Share = 0.3
    """Confidence above which an object counts as found. GenEval uses 0.3 with its own detector of COCO's 80 classes."""
    counting_threshold: Share = 0.4
    """Confidence threshold for tasks with the tag "counting". GenEval uses 0.9 with its own detector; open-vocabulary detectors are
    less confident."""
    device: Device = None
    """Where the models run; null takes the run's device."""

    columns: ClassVar[Mapping[str, Column]] = {"correct": Column(0.0, 1.0), "met": Column(0.0, 1.0)}
    cli_key = "detector"

    def load(self, device: torch.device | str) -> GenEvalModels:
        """Load the detector, and the CLIP model if ``clip`` is set. Raises ValueError if there are no weights."""
        from retouch_rewards.networks import load_detector

        colours = None if self.clip is None else ClipColours(self.clip, device=device)
        return GenEvalModels(load_detector(self.detector, device=device), colours)

    @property
    def fingerprint(self) -> str:
        """Digest of the detector's weights, the thresholds, and the fingerprint of the colour classifier."""
        named = self.model.colours
        colours = named.fingerprint if isinstance(named, ClipColours) else "no colours"
        weights = weights_digest(weights_folder(self.detector))
        return f"detector {weights}, above {self.threshold:g}, counting {self.counting_threshold:g}; {colours}"

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32. A sample without an image scores 0.

        Raises ValueError if a task has no requirements, has requirements that are not in GenEval's format, or requires a colour
        while ``clip`` is not set.
        """
        import torch

        from retouch_rewards.networks import suppress_overlaps

        scores = {name: torch.zeros(len(samples)) for name in self.columns}
        for row, sample in enumerate(samples):
            wanted = requirements(sample.task)
            if self.model.colours is None and any(one.color for one in wanted.include):
                raise ValueError(f"task {sample.task.id!r} requires a colour; set `clip` to the folder or id of a CLIP model")
            if sample.image is not None:
                above = self.counting_threshold if wanted.tag == "counting" else self.threshold
                found = suppress_overlaps(self.model.detector(sample.image, wanted.names), above=above)
                held = met(wanted, found, sample.image, self.model.colours)
                scores["correct"][row] = float(all(held))
                scores["met"][row] = sum(held) / len(held)
        return scores


class Wanted(BaseModel):
    """A required object: the image must show at least ``count`` of it, each of the colour ``color``.

    Each of them must lie in the direction ``position[0]`` (one of ``DIRECTIONS``) of every object that meets the requirement with
    the index ``position[1]``. If ``negated``, none of them may have the colour, and none may lie in the direction of any of them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(alias="class", min_length=1)
    count: int = Field(1, ge=1)
    color: str | None = None
    position: tuple[str, int] | None = None
    negated: bool = False


class Unwanted(BaseModel):
    """An object of which there must be fewer than ``count``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(alias="class", min_length=1)
    count: int = Field(ge=1)


class Requirements(BaseModel):
    """The requirements of a task: the objects that its image must show, and those that it must not show.

    Source: GenEval (Ghosh et al. 2023, arXiv 2310.11513).
    """

    tag: str = ""
    include: tuple[Wanted, ...] = ()
    exclude: tuple[Unwanted, ...] = ()

    @property
    def names(self) -> list[str]:
        """The distinct names of all objects that the detector must look for."""
        return list(dict.fromkeys([one.name for one in self.include] + [one.name for one in self.exclude]))


ColourNamer: TypeAlias = "Callable[[Image.Image, Sequence[Box], str], list[str]]"
"""Classifies the colour of the objects with a name: one of ``COLOURS`` for each box."""


class ClipColours:
    """Classifies the crop of each box as one of ``COLOURS``, with CLIP. GenEval also greys out the background of the object; a
    detector of boxes has no mask for that."""

    def __init__(self, path: str | Path = "openai/clip-vit-large-patch14", *, device: torch.device | str = "cpu") -> None:
        from retouch_rewards.networks import DualEncoder

        self._encoder = DualEncoder(path, device=device)

    @property
    def fingerprint(self) -> str:
        """Digest of the model's weights."""
        return self._encoder.fingerprint

    def __call__(self, image: Image.Image, boxes: Sequence[Box], name: str) -> list[str]:
        """Return one colour for each box."""
        import torch

        prompts = (f"a photo of a {{}} {name}", f"a photo of a {{}}-colored {name}", "a photo of a {} object")
        texts = self._encoder.texts([prompt.format(colour) for colour in COLOURS for prompt in prompts]).vectors
        colours = torch.nn.functional.normalize(texts.view(len(COLOURS), len(prompts), -1).mean(dim=1), dim=1)
        images = self._encoder.images([_crop(image, box) for box in boxes])
        return [COLOURS[place] for place in (images @ colours.T).argmax(dim=1).tolist()]


@dataclass(frozen=True, slots=True)
class GenEvalModels:
    """The models of the reward. ``colours`` is None if no CLIP model is configured."""

    detector: Detector
    colours: ColourNamer | None


def requirements(task: Task) -> Requirements:
    """Read the requirements from a task's ``meta``. Raises ValueError if there are none, or if they are not in GenEval's format.

    Source: GenEval (Ghosh et al. 2023, arXiv 2310.11513).
    """
    given = {key: task.meta[key] for key in ("tag", "include", "exclude") if task.meta.get(key) is not None}
    try:
        read = Requirements.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"task {task.id!r}: its meta is not in GenEval's format: {where}: {first['msg']}") from None
    if not read.names:
        raise ValueError(f'task {task.id!r} has no requirements: give meta["include"] or meta["exclude"], as GenEval does')
    for number, one in enumerate(read.include):
        if one.color is not None and one.color not in COLOURS:
            raise ValueError(f"task {task.id!r} requires the colour {one.color!r}; GenEval's colours are {', '.join(COLOURS)}")
        if one.position is not None and (one.position[0] not in DIRECTIONS or not 0 <= one.position[1] < number):
            raise ValueError(
                f"task {task.id!r} requires the position {list(one.position)}; give one of {', '.join(DIRECTIONS)} and the index "
                "of an earlier requirement in meta['include']"
            )
        if one.negated and (one.color is None) == (one.position is None):
            raise ValueError(f"task {task.id!r}: a negated requirement needs either a color or a position that must not hold")
    return read


def met(wanted: Requirements, found: Sequence[Detection], image: Image.Image, colours: ColourNamer | None) -> list[bool]:
    """Return for each requirement whether the image meets it: first those of ``include``, in order, then those of ``exclude``.

    For an included object, only the ``count`` most confident detections of its name are checked.

    Source: GenEval (Ghosh et al. 2023, arXiv 2310.11513).
    """
    groups: list[list[Detection] | None] = []
    for one in wanted.include:
        objects = [other for other in found if other.name == one.name][: one.count]
        holds = len(objects) == one.count
        if holds and one.color is not None:
            assert colours is not None
            of_colour = colours(image, [other.box for other in objects], one.name).count(one.color)
            holds = of_colour == (0 if one.negated else one.count)
        if holds and one.position is not None:
            direction, number = one.position
            others = groups[number]
            holds = others is not None and all(
                (direction in directions(a.box, b.box)) != one.negated for a in objects for b in others
            )
        groups.append(objects if holds else None)
    absent = [sum(other.name == one.name for other in found) < one.count for one in wanted.exclude]
    return [*(group is not None for group in groups), *absent]


def directions(a: Box, b: Box) -> set[str]:
    """Return the directions in which box ``a`` lies from box ``b``.

    Along each axis, the absolute offset of the centres is reduced by a tenth of the sum of both sizes (not below 0), and divided by
    the length of the offset. A direction counts if the result is above 0.5. On a diagonal, two directions can count.

    Source: GenEval (Ghosh et al. 2023, arXiv 2310.11513).
    """
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
    held = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {direction for direction, holds in held.items() if holds}


def _crop(image: Image.Image, box: Box) -> Image.Image:
    """Crop the image to the box; the crop has at least one pixel."""
    left, top = (int(min(max(low, 0), limit - 1)) for low, limit in zip(box[:2], image.size, strict=True))
    right, bottom = (int(min(max(high, low + 1), limit)) for high, low, limit in zip(box[2:], (left, top), image.size, strict=True))
    return image.convert("RGB").crop((left, top, right, bottom))
