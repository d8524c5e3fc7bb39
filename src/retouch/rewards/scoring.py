"""One call of a reward: the samples that it sees, and the checks that its scores must pass."""

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor

from retouch.protocols import Reward
from retouch.rewards.base import visible_samples
from retouch.types import Column, Json, Sample, Scores, Task


def score(
    reward: Reward,
    image: Image,
    *,
    instruction: str = "",
    source: Image | Sequence[Image] = (),
    mask: Image | None = None,
    reference: Image | None = None,
    target: Image | None = None,
    text: str | None = None,
    completion: str | None = None,
    meta: Mapping[str, Json] | None = None,
) -> dict[str, float]:
    """The columns of one image, without building a task: a number each, NaN if it could not be judged or does not apply.

    ``source``: the image or images that were edited. ``mask``: white where the image was to change. ``text``: what should be
    written in the image. ``completion``: what the policy wrote, for rewards of text. Raises ValueError if the reward needs
    something that is not given, or returns other columns than it declares.

    Example::

        >>> retouch.score(retouch.rewards.Share(channel="red").build(device="cpu"), image, instruction="red")
        {'share': 1.0}
    """
    images = (source,) if isinstance(source, Image) else tuple(source)
    task = Task("picture", instruction, images, mask, reference, target, text, meta=meta or {})
    return {name: column.item() for name, column in scores_of(reward, [Sample(task, image, completion)]).items()}


def scores_of(reward: Reward, samples: Sequence[Sample]) -> Scores:
    """Every column that the reward declares, (b,), float32, on this thread; a sample without an image scores each column's worst.

    ValueError as ``checked`` raises it.
    """
    drawn = with_images(samples)
    return checked(reward, samples, reward(visible_samples(reward, drawn)) if drawn else {})


def with_images(samples: Sequence[Sample]) -> list[Sample]:
    """The samples that a reward is called with: those for which the policy made an image."""
    return [sample for sample in samples if sample.image is not None]


def checked(reward: Reward, samples: Sequence[Sample], returned: Scores) -> Scores:
    """The declared columns of all samples, (b,), float32, from what the reward ``returned`` for ``with_images(samples)``.

    A sample without an image scores each column's worst, and NaN for a diagnostic. ValueError: a declared column is not there, has
    another shape, or a value that is infinite or outside its declared range.
    """
    drawn = torch.tensor([sample.image is not None for sample in samples], dtype=torch.bool)
    count = int(drawn.sum())
    scores: Scores = {}
    for name, column in reward.columns.items():
        fault = float("nan") if column.diagnostic else column.worst
        scores[name] = torch.full((len(samples),), fault, dtype=torch.float32)
        if count:
            scores[name][drawn] = _checked_column(name, column, returned, count)
    return scores


def _checked_column(name: str, column: Column, returned: Scores, count: int) -> Float[Tensor, " b"]:
    if name not in returned:
        raise ValueError(
            f"the reward declares the column {name!r} and did not return it; it returned {', '.join(returned) or 'nothing'}"
        )
    values = torch.as_tensor(returned[name], dtype=torch.float32).detach().cpu()
    if values.shape != (count,):
        raise ValueError(
            f"column {name!r} has shape {tuple(values.shape)} for {count} samples; return one a sample, NaN where missing"
        )
    outside = ~torch.isnan(values) & ~((values >= column.low) & (values <= column.high) & values.isfinite())
    if outside.any():
        wrong = values[outside][0].item()
        if math.isinf(wrong) and column.low <= wrong <= column.high:
            raise ValueError(f"column {name!r} gave {wrong}; return a finite score, or NaN where there is none")
        raise ValueError(
            f"column {name!r} gave {wrong}, outside its declared range {column.low} to {column.high}; declare the true range"
        )
    return values
