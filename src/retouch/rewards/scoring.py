"""One call of a reward: the samples that it sees, and the checks that its scores must pass."""

import inspect
import math
from collections.abc import Mapping, Sequence

import numpy
import torch
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor

from retouch.config.imports import blamed
from retouch.protocols import Reward
from retouch.rewards.base import visible_samples
from retouch.types import Column, Json, Sample, Scores, Task

_TRIED = 64


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
    return checked(reward, samples, call_reward(reward, visible_samples(reward, drawn)) if drawn else {})


def call_reward(reward: Reward, samples: Sequence[Sample], name: str = "") -> Scores:
    """What the reward returns for the samples. ``name``: the reward's own in a recipe, for messages.

    A reward of the user's own with one column may return a list of numbers, None where there is none. ValueError: it raised an
    error; the message has its file and line, and the sample.
    """
    if not _is_own(reward):
        return reward(samples)
    try:
        returned: object = reward(samples)
    except BaseException as error:
        wrong = blamed(error, _label(reward, name))
        if wrong is None:
            raise
        raise ValueError(f"{wrong}\n  {_culprit(reward, samples, type(error))}") from error
    return _as_scores(reward, returned, name)


def _is_own(reward: object) -> bool:
    """Whether the reward is code from outside this package."""
    return getattr(reward, "kind", None) == "function" or type(reward).__module__.partition(".")[0] != "retouch"


def _label(reward: object, name: str) -> str:
    """The reward in messages: its name in the recipe, its class, and where that is written."""
    if getattr(reward, "kind", None) == "function":
        return f"reward function {getattr(reward, 'name', name)}"
    made_by = type(reward)
    try:
        place = f" ({inspect.getsourcefile(made_by)}:{inspect.getsourcelines(made_by)[1]})"
    except (OSError, TypeError):
        place = ""
    return f"reward {f'{name}, ' if name else ''}{made_by.__module__}:{made_by.__qualname__}{place}"


def _culprit(reward: Reward, samples: Sequence[Sample], kind: type[BaseException]) -> str:
    """Which of the samples it is, found by calling the reward with one at a time."""
    for sample in samples[:_TRIED] if len(samples) > 1 else ():
        try:
            reward([sample])
        except BaseException as error:
            if type(error) is not kind:
                raise
            return f"sample: task {sample.task.id!r}, instruction {sample.task.instruction!r:.80}"
    if len(samples) == 1:
        return f"sample: task {samples[0].task.id!r}, instruction {samples[0].task.instruction!r:.80}"
    return f"with {len(samples)} samples at once, not with one of the first {_TRIED} alone"


def _as_scores(reward: Reward, returned: object, name: str) -> Scores:
    if isinstance(returned, Mapping):
        return dict(returned)
    if len(reward.columns) == 1 and isinstance(returned, list | tuple | Tensor | numpy.ndarray):
        (column,) = reward.columns
        values = returned if isinstance(returned, Tensor) else [math.nan if value is None else value for value in returned]
        return {column: torch.as_tensor(values, dtype=torch.float32)}
    columns = ", ".join(map(repr, reward.columns)) + ("" if len(reward.columns) > 1 else ", or a list of numbers")
    what = type(returned).__name__
    raise ValueError(f"{_label(reward, name)} returned {what}; return a dictionary with a tensor for each column: {columns}")


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
            try:
                scores[name][drawn] = _checked_column(name, column, returned, with_images(samples))
            except ValueError as error:
                part, _, _ = name.partition("/")
                inner = getattr(reward, "rewards", {}).get(part, reward)
                if not _is_own(inner):
                    raise
                raise ValueError(f"{_label(inner, '' if inner is reward else part)}: {error}") from None
    return scores


def _checked_column(name: str, column: Column, returned: Scores, samples: Sequence[Sample]) -> Float[Tensor, " b"]:
    count = len(samples)
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
        wrong, task = values[outside][0].item(), samples[int(outside.nonzero()[0])].task.id
        if math.isinf(wrong) and column.low <= wrong <= column.high:
            raise ValueError(f"column {name!r} gave {wrong}; return a finite score, or NaN where there is none (task {task!r})")
        raise ValueError(
            f"column {name!r} gave {wrong}, outside its declared range {column.low} to {column.high}; declare the true range "
            f"(task {task!r})"
        )
    return values
