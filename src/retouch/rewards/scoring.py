"""A single call of a reward: the samples that the reward receives, and the checks of its scores; with or without a run.

Every call of a reward goes through ``ask`` (or, for a reward that answers later, through ``given_to``), so that code from outside
this package gets copies of its own: it may paint on its images and empty its lists.
``retouch.rewards.load("clip")(images, prompts=prompts)`` scores images without a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy
import torch
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor

from retouch.config.imports import is_foreign, source_place, user_code_error
from retouch.protocols import Reward
from retouch.rewards.base import RewardSection, close, visible_samples
from retouch.rewards.worker import unchanged_settings
from retouch.types import Json, Sample, Scores, Task

_TRIED = 64


def score(
    reward: Reward | RewardSection,
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
    """Score one image without building a task: one number per column, NaN if the column could not be judged or does not apply.

    ``reward``: a reward, or its section, which is built for this call on the CPU.
    ``source``: the image or images that were edited. ``mask``: white where the image should change. ``text``: the text that the
    image should show. ``completion``: the text that the policy wrote, for rewards that score text. Raises ValueError if the reward
    needs an argument that is not given, or returns other columns than it declares.

    Example::

        >>> retouch.score(retouch.rewards.Share(channel="red"), image, instruction="red")
        {'share': 1.0}
    """
    images = (source,) if isinstance(source, Image) else tuple(source)
    task = Task("picture", instruction, images, mask, reference, target, text, meta=meta or {})
    built = reward.build(device="cpu") if isinstance(reward, RewardSection) else reward
    try:
        return {name: column.item() for name, column in scores_of(built, [Sample(task, image, completion)]).items()}
    finally:
        if built is not reward:
            close(built)


def scores_of(reward: Reward, samples: Sequence[Sample]) -> Scores:
    """Score samples on the caller's thread: each declared column, (b,), float64. A sample without an image gets the worst value of
    each column, and NaN for a diagnostic.

    Raises the errors of ``checked``.
    """
    drawn = with_images(samples)
    return checked(reward, samples, call_reward(reward, drawn) if drawn else {})


def given_to(reward: Reward, samples: Sequence[Sample]) -> list[Sample]:
    """What the reward receives: the samples without what it may not see, and, for code from outside this package, copies of the
    images and of every list, dictionary, array and tensor, for each sample separately."""
    visible = visible_samples(reward, samples)
    return [sample.copy() for sample in visible] if is_foreign(reward) else visible


def ask(reward: Reward, samples: Sequence[Sample], name: str = "") -> Scores:
    """Call the reward with what it may see and change (``given_to``). ``name``: as in ``call_reward``. Raises ValueError if code
    from outside this package changes a setting of the process (``unchanged_settings``)."""
    if not is_foreign(reward):
        return reward(given_to(reward, samples))
    with unchanged_settings(partial(_label, reward, name)):
        return reward(given_to(reward, samples))


def call_reward(reward: Reward, samples: Sequence[Sample], name: str = "") -> Scores:
    """Call the reward with the samples. ``name``: the name of the reward in the recipe, for messages.

    A reward from outside this package with one column may return a list of numbers, with None for a missing score. If such a
    reward raises an error, or ends the process with ``sys.exit``, ValueError is raised with the file and line, and the sample.
    """
    if not is_foreign(reward):
        return ask(reward, samples)
    try:
        returned: object = ask(reward, samples, name)
    except BaseException as error:
        wrong = user_code_error(error, _label(reward, name))
        if wrong is None:
            if isinstance(error, ValueError) and _is_renamed(reward, name):
                raise ValueError(f"reward {name}: {error}") from error
            raise
        raise ValueError(f"{wrong}\n  {_culprit(reward, samples, type(error))}") from error
    return as_scores(reward, returned, name)


def _label(reward: object, name: str) -> str:
    """The reward as messages name it: its name in the recipe, its class, and the file and line of the class."""
    if getattr(reward, "kind", None) == "function":
        label = f"reward function {getattr(reward, 'name', name)}"
        return f"reward {name}: {label}" if _is_renamed(reward, name) else label
    made_by = type(reward)
    return f"reward {f'{name}, ' if name else ''}{made_by.__module__}:{made_by.__qualname__}{source_place(made_by)}"


def _is_renamed(reward: object, name: str) -> bool:
    """Whether the reward is a function that has another name in the recipe."""
    return getattr(reward, "kind", None) == "function" and name not in ("", getattr(reward, "name", None))


def _culprit(reward: Reward, samples: Sequence[Sample], kind: type[BaseException]) -> str:
    """Describe the sample that makes the reward fail, found by calling the reward with one sample at a time. A sample that raises
    another kind of error is not the cause, because the reward may not work for one sample."""
    for sample in samples[:_TRIED] if len(samples) > 1 else ():
        try:
            ask(reward, [sample])
        except BaseException as error:
            if type(error) is kind:
                return f"sample: task {sample.task.id!r}, instruction {sample.task.instruction!r:.80}"
            if not isinstance(error, Exception):
                raise
    if len(samples) == 1:
        return f"sample: task {samples[0].task.id!r}, instruction {samples[0].task.instruction!r:.80}"
    return f"the error occurs with {len(samples)} samples at once, but with none of the first {_TRIED} samples alone"


def as_scores(reward: Reward, returned: object, name: str = "") -> Scores:
    """What a call of the reward returned, by column: a list of a reward with one column counts as this column. ``name``: as in
    ``call_reward``. Raises ValueError for anything else that is no dictionary."""
    if isinstance(returned, Mapping):
        return dict(returned)
    if len(reward.columns) == 1 and isinstance(returned, list | tuple | Tensor | numpy.ndarray):
        (column,) = reward.columns
        try:
            return {column: column_values(column, returned)}
        except ValueError as error:
            raise ValueError(f"{_label(reward, name)}: {error}") from None
    columns = ", ".join(map(repr, reward.columns)) + ("" if len(reward.columns) > 1 else ", or a list of numbers")
    what = type(returned).__name__
    raise ValueError(f"{_label(reward, name)} returned {what}; return a dictionary with a tensor for each column: {columns}")


def column_values(name: str, returned: object) -> Tensor:
    """A column that a reward returned as a tensor, an array or a list of numbers, with None for a missing score; float64, NaN if
    missing. Raises ValueError if it is something else."""
    if isinstance(returned, list | tuple | numpy.ndarray):
        returned = [math.nan if value is None else value for value in returned]
    try:
        return torch.as_tensor(returned, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"column {name!r}: {error}; return a number for each sample, NaN if it is missing") from None


def with_images(samples: Sequence[Sample]) -> list[Sample]:
    """The samples for which the policy made an image; a reward is called only with these."""
    return [sample for sample in samples if sample.image is not None]


def checked(reward: Reward, samples: Sequence[Sample], returned: Scores) -> Scores:
    """The declared columns of all samples, (b,), float64, from the scores ``returned`` by the reward for ``with_images(samples)``.

    A sample without an image gets the worst value of each column, and NaN for a diagnostic. Raises ValueError if a declared column
    is missing, has a wrong shape, or has a value that is no number, infinite or outside its declared range.
    """
    drawn = torch.tensor([sample.image is not None for sample in samples], dtype=torch.bool)
    count = int(drawn.sum())
    scores: Scores = {}
    for name, column in reward.columns.items():
        fault = float("nan") if column.diagnostic else column.worst
        scores[name] = torch.full((len(samples),), fault, dtype=torch.float64)
        if count:
            try:
                values = shaped_column(name, returned, count)
                low, high = column.limits
                outside = ~torch.isnan(values) & ~((values >= low) & (values <= high) & values.float().isfinite())
                if outside.any():
                    wrong, task = values[outside][0].item(), with_images(samples)[int(outside.nonzero()[0])].task.id
                    how = f", outside its declared range {column.low} to {column.high}; declare the true range"
                    if low <= wrong <= high:
                        how = "; return a finite score, or NaN if it is missing"
                    raise ValueError(f"column {name!r} is {wrong}{how} (task {task!r})")
                scores[name][drawn] = values
            except ValueError as error:
                part, _, _ = name.partition("/")
                inner = getattr(reward, "rewards", {}).get(part, reward)
                if not is_foreign(inner):
                    raise
                raise ValueError(f"{_label(inner, '' if inner is reward else part)}: {error}") from None
    return scores


def shaped_column(name: str, returned: Scores, count: int) -> Float[Tensor, " b"]:
    """The column of ``count`` samples, float64, NaN if missing. Raises ValueError if it is missing, has values that are no numbers,
    or has another shape."""
    if name not in returned:
        raise ValueError(
            f"the reward declares the column {name!r} but did not return it; it returned {', '.join(returned) or 'nothing'}"
        )
    values = column_values(name, returned[name])
    if values.shape != (count,):
        raise ValueError(
            f"column {name!r} has shape {tuple(values.shape)} for {count} samples; return one per sample, NaN if missing"
        )
    return values
