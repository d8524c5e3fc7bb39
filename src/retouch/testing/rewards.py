"""The contract of a reward: it gives what it declares, for each sample on its own, and NaN where it cannot judge."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from PIL import Image

from retouch.core.random import generator
from retouch.protocols import Reward
from retouch.testing.figures import require, require_close, twice
from retouch.types import Sample, Scores

SAME = 1e-5


def check_reward(reward: Reward, samples: Sequence[Sample]) -> None:
    """AssertionError where ``reward`` breaks a promise on ``samples``, of which there should be three or more, all with a picture.

    - It returns exactly the columns that it declares, each (b,), floating, within its range or NaN.
    - The samples' order changes nothing but the order of their scores (1e-5 of the largest), and no draw from torch's global
      generator does.
    - Odd pictures (of one pixel, all black, very wide, of another mode) give a score or NaN and raise nothing.
    """
    require(len(samples) >= 2, "give at least two samples")
    require(all(sample.image is not None for sample in samples), "give samples with a picture: a judge is shown no other")
    scores, again = twice(lambda: _judged(reward, samples, "the samples"), "the reward")
    _check_columns(reward, scores, len(samples))
    for name, column in scores.items():
        require_close(again[name], column, limit=SAME, what=f"column {name!r} judged twice")
    drawn = torch.randperm(len(samples), generator=generator("retouch.testing", "order")).tolist()
    for order in (list(reversed(range(len(samples)))), drawn):
        moved = _judged(reward, [samples[index] for index in order], "the samples in another order")
        for name, column in scores.items():
            require_close(moved[name], column[order], limit=SAME, what=f"column {name!r} in the order {order}")
    for what, image in _odd_pictures():
        odd = _judged(reward, [replace(samples[0], image=image), samples[1]], what)
        _check_columns(reward, odd, 2)
        for name, column in odd.items():
            require_close(column[1:], scores[name][1:2], limit=SAME, what=f"column {name!r} of a sample beside {what}")


def _check_columns(reward: Reward, scores: Scores, count: int) -> None:
    declared, given = sorted(reward.columns), sorted(scores)
    require(declared == given, f"the reward declares the columns {declared} and returns {given}")
    for name, column in reward.columns.items():
        values = scores[name]
        require(tuple(values.shape) == (count,), f"column {name!r} has shape {tuple(values.shape)} for {count} samples")
        require(values.is_floating_point(), f"column {name!r} is {values.dtype}, in which there is no NaN")
        outside = values[~values.isnan() & ~((values >= column.low) & (values <= column.high))]
        require(not len(outside), f"column {name!r} gives {outside[:3].tolist()}, outside its range {column.low} to {column.high}")


def _odd_pictures() -> Iterator[tuple[str, Image.Image]]:
    yield "a picture of one pixel", Image.new("RGB", (1, 1), (200, 30, 90))
    yield "a black picture", Image.new("RGB", (32, 32))
    yield "a very wide picture", Image.new("RGB", (160, 2), (9, 200, 120))
    yield "a grey picture (mode L)", Image.new("L", (24, 24), 77)


def _judged(reward: Reward, samples: Sequence[Sample], what: str) -> Scores:
    """The scores, or what was being judged when the reward raised."""
    try:
        return reward(samples)
    finally:
        error = sys.exception()
        if isinstance(error, Exception):
            raise AssertionError(f"the reward raised on {what}; where it cannot judge it returns NaN") from error
