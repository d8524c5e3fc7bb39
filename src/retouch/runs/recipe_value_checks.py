"""What a value head and the rest of a recipe mean together, each with what to do about it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from retouch.runs.recipe_learning import GaeAdvantage, Objective, PolicyGradient, Sft, Supervised
from retouch.runs.recipe_policy import DenoisingPolicy

if TYPE_CHECKING:
    from retouch.runs.recipe import Recipe


def value_problems(recipe: "Recipe", objective: Objective, at: str) -> Iterator[str]:
    """What is wrong with ``advantage.kind`` gae beside a phase's objective, which stands at ``at``."""
    advantage = recipe.advantage
    if not isinstance(advantage, GaeAdvantage) or isinstance(objective, Supervised | Sft):
        return
    if not isinstance(objective, PolicyGradient):
        yield f"{at}.kind: {objective.kind} compares whole samples and has no value head; take advantage.kind group or batch"
    elif objective.surrogate == "gspo":
        yield f"{at}.surrogate: gspo has one ratio for all actions of a sample, and gae an advantage for each; take clip"
    if advantage.head.coefficient > 0 and isinstance(recipe.policy, DenoisingPolicy):
        yield "advantage.head.coefficient: the head of a denoising policy reads none of its weights; leave it out"
