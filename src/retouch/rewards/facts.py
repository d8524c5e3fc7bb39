"""What a reward and the rest of a run tell each other: small records, without the recipe and without torch."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field


def _text(path: Any) -> Any:
    return os.fspath(path) if isinstance(path, os.PathLike) else path


def _address(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("give an address as http://host:port/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("give the address alone, without a user, a key or a query in it")
    return url.rstrip("/")


Address: TypeAlias = Annotated[str, AfterValidator(_address)]
"""A server's address, without a key in it."""
Device: TypeAlias = Annotated[str, Field(pattern=r"^(cpu|mps|cuda(:\d+)?)$")] | None
"""Where a reward's own model runs; None for the device that the run gives to rewards."""
PathText: TypeAlias = Annotated[str, BeforeValidator(_text)]
"""A path or a Hugging Face id; Python may give a ``Path``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFacts:
    """What a reward may need to know about a training phase: ``rows`` samples a step, in groups of ``group_size``, of which
    ``chunk`` are sampled and scored at once."""

    rows: int
    group_size: int
    chunk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a reward may need to know about the run that it scores.

    ``writes_text``: the policy is a language model. ``trained_columns``: the full names of the columns that ``combine`` uses, None
    where they are not known yet. ``eval_column``: the column that evaluation reports, None for the combined reward.
    """

    writes_text: bool
    trained_columns: tuple[str, ...] | None
    eval_column: str | None
    phases: tuple[PhaseFacts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """What a reward may need to know about the tasks of a data section. ``path``: of the section in the recipe, ``data`` say."""

    path: str
    kind: str
    has_source: bool
    has_target: bool


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that a reward loads into the run's own process. ``path``: its folder or Hugging Face id. ``device``: None for the
    device that the run gives to rewards."""

    path: str
    dtype: str
    device: str | None


def whole_group_problems(run: RunFacts, *, column: str, reward: str) -> Iterator[str]:
    """A line for each place where a run does not give whole groups to a reward that compares the images of a task.

    ``column``: the full name of its column. ``reward``: what messages call it.
    """
    if run.trained_columns is not None and column in run.trained_columns and run.eval_column is None:
        yield f"eval.column: {reward} compares images of one task, of which evaluation has one; name another column"
    for phase in run.phases:
        if phase.chunk < phase.rows and phase.chunk % phase.group_size:
            split = f"{phase.chunk} splits groups of {phase.group_size}"
            yield f"rollout.chunk: {split}, which {reward} compares whole; use a multiple"
