"""Completions that tasks bring along, as if they had been written: what supervised learning of a writer imitates."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from retouch.policies.autoregressive.decoding import Generation
from retouch.protocols import AutoregressiveModel
from retouch.types import Batch, Task

COMPLETION = "completion"  # the key in a task's meta


@runtime_checkable
class Spelling(Protocol):
    """A model that knows the ids of a text."""

    def spell(self, text: str) -> list[int]: ...


@runtime_checkable
class Drawing(Protocol):
    """A model whose words are a picture: it knows the ids that draw the target pictures of tasks."""

    def drawn(self, tasks: Sequence[Task]) -> list[list[int]]: ...


def demonstrates(task: Task) -> bool:
    """Whether the task says what should be written for it."""
    return COMPLETION in task.meta


def demonstrated(model: AutoregressiveModel, batch: Batch, *, longest: int, device: torch.device) -> Generation:
    """Each row's own completion and the token that ends it; ``log_probs`` are NaN, for nothing was drawn.

    ValueError where a task has none, where it does not fit in ``longest`` tokens, or where the model cannot spell.
    """
    lines = model.drawn(batch.tasks) if isinstance(model, Drawing) else [_spelt(model, task) for task in batch.tasks]
    for task, line in zip(batch.tasks, lines, strict=True):
        if len(line) >= longest:
            raise ValueError(
                f"the completion of task {task.id!r} has {len(line)} tokens and one that ends it; "
                f"raise max_new_tokens above {longest}"
            )
    said = [torch.tensor([*line, model.stop[0]], device=device) for line in lines]
    ids = torch.full((len(batch), longest), model.pad, device=device)
    for row, group in enumerate(batch.group):
        ids[row, : len(said[group])] = said[group]
    lengths = torch.tensor([len(said[group]) for group in batch.group], device=device)
    return Generation(ids=ids, lengths=lengths, log_probs=torch.full(ids.shape, torch.nan, device=device))


def _spelt(model: AutoregressiveModel, task: Task) -> list[int]:
    if not isinstance(model, Spelling):
        raise ValueError(f"{type(model).__name__} has no `spell(text)`, which gives the ids of a completion to imitate")
    text = task.meta.get(COMPLETION)
    if not isinstance(text, str):
        raise ValueError(f"task {task.id!r} has no text in meta['{COMPLETION}'], which supervised learning imitates")
    return model.spell(text)
