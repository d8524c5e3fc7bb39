"""The playground's judge of signs: whether a sign has the ink and paper colours of the reference. ``ocr`` scores the text.

Colours are red, green and blue, 0 to 255; distances between colours are Euclidean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from PIL.Image import Image

from retouch.rewards.base import RewardSection
from retouch.types import Column, Sample, Scores, Task

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from numpy import ndarray

    Pixels: TypeAlias = Int[ndarray, "n 3"]
    InkColour: TypeAlias = Float[ndarray, " 3"]

FARTHEST = 8
CONTRAST = 60.0
SAME, OTHER = 16.0, 80.0


class SignReward(RewardSection):
    """The playground's judge of signs: whether the image, in the white part of the mask, has the ink and paper colours of the
    ``reference``.

    ``paper``, 0 to 1: 1 - clip((d - 16) / 64, 0, 1), where d is the distance between the two paper colours; a paper colour is the
    median of red, green and blue. ``ink``, 0 to 1: the same formula for the two ink colours; an ink colour is the mean of the 8
    pixels that are farthest from the paper colour. ``ink`` is 0 if the image's ink is less than 60 away from its paper, because
    then nothing is written. ``style``: the mean of both. The edges of letters are blurred, differently in every word, which changes
    an ink colour by less than 16.

    Example::

        >>> from retouch_worlds.data.words import WordData
        >>> (task,) = WordData(count=1, style_from_reference=True).tasks()
        >>> scores = retouch.score(retouch.rewards.Sign(), task.target, mask=task.mask, reference=task.reference)
        >>> scores["style"]
        1.0
    """

    kind: Literal["playground-signs"] = "playground-signs"

    columns: ClassVar[Mapping[str, Column]] = {"style": Column(0.0, 1.0), "paper": Column(0.0, 1.0), "ink": Column(0.0, 1.0)}
    data_kinds = ("playground-words",)

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32. A sample without an image, or with an image of another size than the mask, scores 0.

        Raises ValueError if a task has no mask, an empty mask, or no reference.
        """
        import numpy as np
        import torch

        wanted: dict[int, tuple[InkColour, InkColour]] = {}
        found = np.zeros((len(samples), 2), dtype=np.float32)
        for row, sample in enumerate(samples):
            mask, reference = _marked(sample.task)
            if id(sample.task) not in wanted:
                wanted[id(sample.task)] = paper_and_ink(_pixels(reference).reshape(-1, 3))
            if sample.image is not None and sample.image.size == mask.size:
                found[row] = _compare(_pixels(sample.image)[np.asarray(mask) > 127], *wanted[id(sample.task)])
        paper, ink = torch.from_numpy(found).unbind(dim=1)
        return {"style": (paper + ink) / 2, "paper": paper, "ink": ink}


def paper_and_ink(pixels: Pixels) -> tuple[InkColour, InkColour]:
    """Return the paper colour and the ink colour of a sign's pixels. If nothing is written, both are nearly equal."""
    import numpy as np

    paper = np.median(pixels, axis=0)
    away = np.linalg.norm(pixels - paper, axis=1)
    return paper, pixels[np.argsort(-away, kind="stable")[:FARTHEST]].mean(axis=0)


def _compare(pixels: Pixels, paper: InkColour, ink: InkColour) -> tuple[float, float]:
    import numpy as np

    own_paper, own_ink = paper_and_ink(pixels)
    written = np.linalg.norm(own_ink - own_paper) >= CONTRAST
    return _agreement(own_paper, paper), _agreement(own_ink, ink) if written else 0.0


def _agreement(one: InkColour, other: InkColour) -> float:
    import numpy as np

    return 1.0 - float(np.clip((np.linalg.norm(one - other) - SAME) / (OTHER - SAME), 0.0, 1.0))


def _marked(task: Task) -> tuple[Image, Image]:
    if task.mask is None or task.mask.getbbox() is None or task.reference is None:
        raise ValueError(f"task {task.id!r} has no sign (mask) or no reference: playground-signs needs words of the playground")
    return task.mask, task.reference


def _pixels(image: Image) -> Int[ndarray, "h w 3"]:
    import numpy as np

    return np.asarray(image.convert("RGB")).astype(np.int64)
