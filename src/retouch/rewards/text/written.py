"""Who is shown what the policy wrote: rewards of the text itself, and nobody else, so that no writer can talk to its judge."""

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

from retouch.protocols import Reward
from retouch.types import Sample


@runtime_checkable
class ReadsWritten(Protocol):
    """A reward that judges the policy's own words, ``Sample.completion``."""

    reads_completions: Literal[True]


def shown(samples: Sequence[Sample], reward: Reward) -> list[Sample]:
    """The samples as this reward may see them."""
    if isinstance(reward, ReadsWritten):
        return list(samples)
    return [sample if sample.completion is None else Sample(sample.task, sample.image) for sample in samples]


def written(sample: Sample) -> str:
    """What the policy wrote. ValueError where there is no such text."""
    if sample.completion is None:
        raise ValueError(f"task {sample.task.id!r} has nothing written, which this reward judges; it is for policies that write")
    return sample.completion
