"""The contract of a reward: it returns its declared columns, one score per sample, and NaN if it cannot score."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from PIL import Image

from retouch.core.random import generator
from retouch.protocols import Reward
from retouch.rewards.function import FunctionReward, RewardFunction
from retouch.rewards.scoring import ask
from retouch.types import Sample, Scores
from retouch_worlds.testing.assertions import call_twice, require, require_close

SAME = 1e-5


def check_reward(reward: Reward | RewardFunction, samples: Sequence[Sample]) -> None:
    """Raises AssertionError if ``reward`` violates the contract on ``samples``; give three or more, all with an image.

    ``reward``: an object with ``columns`` and ``__call__(samples)``, or a reward function (``retouch.reward``).

    - It returns exactly the declared columns, each (b,) in a floating-point dtype, within its range or NaN.
    - Permuting the samples permutes the scores (up to 1e-5 of the largest), and nothing is drawn from torch's global generator.
    - Unusual images (one pixel, all black, very wide, another mode) give a score or NaN and raise no error.

    Example::

        >>> from retouch.types import Sample, Task
        >>> samples = [Sample(Task(str(side), "red"), Image.new("RGB", (side, 8), "red")) for side in (8, 9, 10)]
        >>> retouch.testing.check_reward(retouch.rewards.Share(channel="red").build(device="cpu"), samples)
    """
    if isinstance(reward, type):
        raise AssertionError(f"{reward.__name__} is a class; give an object of it, such as {reward.__name__}()")
    if not isinstance(reward, Reward):
        reward = FunctionReward.of(reward).build(device="cpu")
    require(len(samples) >= 2, "give at least two samples")
    require(all(sample.image is not None for sample in samples), "give samples with an image: a reward is never called without one")
    scores, again = call_twice(lambda: _score(reward, samples, "the samples"), "the reward")
    _check_columns(reward, scores, len(samples))
    for name, column in scores.items():
        require_close(again[name], column, limit=SAME, what=f"column {name!r} scored twice")
    permutation = torch.randperm(len(samples), generator=generator("retouch.testing", "order")).tolist()
    for order in (list(reversed(range(len(samples)))), permutation):
        permuted = _score(reward, [samples[index] for index in order], "the samples in another order")
        for name, column in scores.items():
            require_close(permuted[name], column[order], limit=SAME, what=f"column {name!r} in the order {order}")
    for what, image in _unusual_images():
        odd = _score(reward, [replace(samples[0], image=image), samples[1]], what)
        _check_columns(reward, odd, 2)
        for name, column in odd.items():
            require_close(column[1:], scores[name][1:2], limit=SAME, what=f"column {name!r} of a sample in a batch with {what}")


def _check_columns(reward: Reward, scores: Scores, count: int) -> None:
    declared, given = sorted(reward.columns), sorted(scores)
    require(declared == given, f"the reward declares the columns {declared} and returns {given}")
    for name, column in reward.columns.items():
        values = scores[name]
        require(tuple(values.shape) == (count,), f"column {name!r} has shape {tuple(values.shape)} for {count} samples")
        require(values.is_floating_point(), f"column {name!r} is {values.dtype}, which cannot represent NaN")
        outside = values[~values.isnan() & ~((values >= column.low) & (values <= column.high))]
        require(not len(outside), f"column {name!r} gives {outside[:3].tolist()}, outside its range {column.low} to {column.high}")


def _unusual_images() -> Iterator[tuple[str, Image.Image]]:
    yield "an image of one pixel", Image.new("RGB", (1, 1), (200, 30, 90))
    yield "a black image", Image.new("RGB", (32, 32))
    yield "a very wide image", Image.new("RGB", (160, 2), (9, 200, 120))
    yield "a grey image (mode L)", Image.new("L", (24, 24), 77)


def _score(reward: Reward, samples: Sequence[Sample], what: str) -> Scores:
    """Score the samples. Raises AssertionError if the reward raises an error; the message names the samples as ``what``."""
    try:
        return ask(reward, samples)
    finally:
        error = sys.exception()
        if isinstance(error, Exception):
            raised = f"{type(error).__name__}: {error}"
            raise AssertionError(
                f"the reward raised an error on {what}; it must return NaN where it cannot score\n{raised}"
            ) from error
