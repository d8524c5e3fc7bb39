"""Completions from the data, in the form of a generation: the targets of supervised learning of a language model."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from retouch.policies.engine import Generation
from retouch.protocols import AutoregressiveModel
from retouch.types import Batch, Task

COMPLETION = "completion"
"""The key of a task's completion in its ``meta``."""


@runtime_checkable
class TokenizesText(Protocol):
    """A model that can tokenize a text."""

    def text_ids(self, text: str) -> list[int]: ...


@runtime_checkable
class TokenizesTargets(Protocol):
    """A model of image tokens that can tokenize the target images of tasks."""

    def target_ids(self, tasks: Sequence[Task]) -> list[list[int]]: ...


def has_completion(task: Task) -> bool:
    """Whether the task has a completion in its ``meta``."""
    return COMPLETION in task.meta


def demonstrate(model: AutoregressiveModel, batch: Batch, *, longest: int, device: torch.device) -> Generation:
    """The completion of each row's task, with an end token. ``log_probs`` are NaN, because nothing was sampled.

    Raises ValueError if a task has no completion, if a completion does not fit in ``longest`` tokens, or if the model has no
    ``text_ids``.
    """
    ids_of_tasks = (
        model.target_ids(batch.tasks) if isinstance(model, TokenizesTargets) else [_text_ids(model, task) for task in batch.tasks]
    )
    for task, ids in zip(batch.tasks, ids_of_tasks, strict=True):
        if len(ids) >= longest:
            raise ValueError(
                f"the completion of task {task.id!r} has {len(ids)} tokens and an end token; "
                f"raise rollout.max_new_tokens above {len(ids)}"
            )
    ended = [torch.tensor([*ids, model.stop[0]], device=device) for ids in ids_of_tasks]
    padded = torch.full((len(batch), longest), model.pad, device=device)
    for row, group in enumerate(batch.group):
        padded[row, : len(ended[group])] = ended[group]
    lengths = torch.tensor([len(ended[group]) for group in batch.group], device=device)
    return Generation(ids=padded, lengths=lengths, log_probs=torch.full(padded.shape, torch.nan, device=device))


def _text_ids(model: AutoregressiveModel, task: Task) -> list[int]:
    if not isinstance(model, TokenizesText):
        raise ValueError(f"{type(model).__name__} has no `text_ids(text)`, which tokenizes the completions of the data")
    text = task.meta.get(COMPLETION)
    if not isinstance(text, str):
        raise ValueError(f"task {task.id!r} has no text in meta['{COMPLETION}'], which supervised learning needs; add it")
    return model.text_ids(text)
