"""Calls a reward on a batch, and isolates the samples on which the reward fails."""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeAlias

from retouch.rewards.scoring import as_scores, shaped_column, with_images
from retouch.types import Sample, Scores
from retouch_serve.server.hosted_rewards import HostedReward
from retouch_serve.wire.errors import ErrorCode

SampleResult: TypeAlias = Mapping[str, float | None] | ErrorCode
Call: TypeAlias = Callable[[Sequence[Sample]], "Future[Scores]"]

_LOG = logging.getLogger("retouch.serving")


def score_samples(hosted: HostedReward, samples: Sequence[Sample], *, call: Call) -> list[SampleResult]:
    """Return for each sample its columns by their public names (None: the score is missing), or an error code.

    ``call`` runs the reward. If the reward raises an error, the batch is split in halves until the failing samples are isolated.
    As in a run, the reward does not get samples without an image; they have the worst value of each column, and no diagnostics.
    """
    drawn = with_images(samples)
    results = iter(_scored(hosted, drawn, call=call) if drawn else ())
    no_image = {hosted.public[name]: None if column.diagnostic else column.worst for name, column in hosted.reward.columns.items()}
    return [no_image if sample.image is None else next(results) for sample in samples]


def _scored(hosted: HostedReward, samples: Sequence[Sample], *, call: Call) -> list[SampleResult]:
    future = call(samples)
    error = future.exception()
    if error is None:
        return _checked(hosted, future.result(), len(samples))
    if len(samples) == 1:
        _LOG.error("reward %s failed on task %r", hosted.name, samples[0].task.id[:200], exc_info=error)
        return ["reward_failed"]
    half = len(samples) // 2
    return _scored(hosted, samples[:half], call=call) + _scored(hosted, samples[half:], call=call)


def _checked(hosted: HostedReward, returned: object, count: int) -> list[SampleResult]:
    """Check what the reward returned, as a run does, and return the scores by sample. A wrong shape fails the whole batch; a value
    out of range fails its sample."""
    try:
        scores = as_scores(hosted.reward, returned)
        columns = {name: shaped_column(name, scores, count) for name in hosted.reward.columns}
    except ValueError as error:
        _LOG.error("reward %s: %s", hosted.name, error)
        return ["reward_disagrees"] * count
    rows: list[dict[str, float | None]] = [{} for _ in range(count)]
    wrong: set[int] = set()
    for name, column in hosted.reward.columns.items():
        for row, value in enumerate(columns[name].tolist()):
            missing = value != value
            rows[row][hosted.public[name]] = None if missing else value
            if not missing and not column.contains(value):
                _LOG.error("reward %s: column %r gave %r, outside %r to %r", hosted.name, name, value, column.low, column.high)
                wrong.add(row)
    return ["reward_disagrees" if row in wrong else scored for row, scored in enumerate(rows)]
