"""The weighted sum of the scores of several differentiable rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from retouch.config.imports import is_foreign
from retouch.rewards.combine.combination import Combine, WeightedSum, combination

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from retouch.types import Task


def gradient_weights(rewards: Mapping[str, Any], combine: Combine) -> dict[str, float]:
    """The weight of each reward, by name. A reward without a weight is not scored.

    ``rewards``: differentiable rewards by name (``retouch.protocols.DifferentiableReward``). Raises ValueError for a formula,
    because its roots have no gradient at 0, for an unknown column, and for a reward with several columns and no
    ``gradient_column``.
    """
    if isinstance(combine, str):
        raise ValueError("combine: a formula cannot be used here, because its roots have no gradient at 0; give weights of columns")
    made = combination(
        combine, {f"{name}/{own}": reward.columns[own] for name, reward in rewards.items() for own in [_column(reward)]}
    )
    assert isinstance(made, WeightedSum), "weights make a sum"
    return {column.partition("/")[0]: weight for column, weight in made.weights.items()}


def weighted_scores(
    rewards: Mapping[str, Any], combine: Combine, images: Float[Tensor, "r 3 h w"], tasks: Sequence[Task]
) -> Float[Tensor, " r"]:
    """The weighted sum of the rewards' scores of ``images``, values 0 to 1, with gradient in the images."""
    given = {
        name: (images.clone(), [task.copy() for task in tasks]) if is_foreign(reward) else (images, tasks)
        for name, reward in rewards.items()
    }
    scores = [weight * rewards[name].score_tensors(*given[name]) for name, weight in gradient_weights(rewards, combine).items()]
    total: Tensor = sum(scores[1:], scores[0])
    return total


def _column(reward: Any) -> str:
    """The column that the reward's ``score_tensors`` computes."""
    own: str | None = getattr(reward, "gradient_column", None)
    if own is not None:
        return own
    names = [name for name, column in reward.columns.items() if not column.diagnostic]
    if len(names) != 1:
        raise ValueError(
            f"{type(reward).__name__} has the columns {', '.join(names)}; name the differentiable one in gradient_column"
        )
    return str(names[0])
