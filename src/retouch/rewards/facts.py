"""Small records that a reward and the rest of a run exchange. They depend neither on the recipe nor on torch."""

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
        raise ValueError("give the address without a user, a password, a query or a fragment")
    return url.rstrip("/")


Address: TypeAlias = Annotated[str, AfterValidator(_address)]
"""The URL of a server, without a key in it."""
Device: TypeAlias = Annotated[str, Field(pattern=r"^(cpu|mps|cuda(:\d+)?)$")] | None
"""The device of a reward's model; None for the run's device for rewards."""
PathText: TypeAlias = Annotated[str, BeforeValidator(_text)]
"""A path or a Hugging Face id; in Python, a ``pathlib.Path`` is accepted too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFacts:
    """Facts about a training phase that a reward may need.

    ``rows``: samples per step. ``group_size``: samples per group. ``chunk``: samples that are rolled out and scored at once.
    """

    rows: int
    group_size: int
    chunk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts about a run that a reward may need.

    ``writes_text``: the policy is a language model. ``trained_columns``: the full names of the columns that ``combine`` uses, None
    if they are not known yet. ``eval_column``: the column that evaluation reports, None for the combined reward.
    """

    writes_text: bool
    trained_columns: tuple[str, ...] | None
    eval_column: str | None
    phases: tuple[PhaseFacts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """Facts about the tasks of a data section that a reward may need. ``path``: the section's path in the recipe, e.g. ``data``."""

    path: str
    kind: str
    has_source: bool
    has_target: bool


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that a reward loads into the process of the run. ``path``: its folder or Hugging Face id. ``device``: None for the
    run's device for rewards."""

    path: str
    dtype: str
    device: str | None


def whole_group_problems(run: RunFacts, *, column: str, reward: str) -> Iterator[str]:
    """Yield one line for each setting that does not give whole groups to a reward that compares the images of a task.

    ``column``: the full name of the reward's column. ``reward``: the name of the reward in messages.
    """
    evaluated = run.trained_columns or () if run.eval_column is None else (run.eval_column,)
    if column in evaluated:
        yield f"eval.column: {reward} compares the images of a task, but evaluation makes one image per task; name another column"
    for phase in run.phases:
        if phase.chunk < phase.rows and phase.chunk % phase.group_size:
            split = f"{phase.chunk} splits groups of {phase.group_size}"
            yield f"rollout.chunk: {split}, but {reward} compares whole groups; use a multiple of the group size"
