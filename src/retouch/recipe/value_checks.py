"""What a value head and the rest of a recipe mean together, each with what to do about it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from retouch.recipe.learning import GaeAdvantage, PolicyGradient
from retouch.recipe.phases import ResolvedPhase
from retouch.recipe.policy import DenoisingPolicy

if TYPE_CHECKING:
    from retouch.recipe.recipe import Recipe


def value_problems(recipe: "Recipe", phase: ResolvedPhase, at: str) -> Iterator[str]:
    """What is wrong with ``advantage.kind`` gae beside the objective of a phase, which stands at ``at``."""
    advantage, objective = recipe.advantage, phase.objective
    if not isinstance(advantage, GaeAdvantage) or phase.imitates:
        return
    if not isinstance(objective, PolicyGradient):
        yield f"{at}.kind: {objective.kind} compares whole samples and has no value head; take advantage.kind group or batch"
    elif objective.surrogate == "gspo":
        yield f"{at}.surrogate: gspo has one ratio for all actions of a sample, and gae an advantage for each; take clip"
    if advantage.head.coefficient > 0 and isinstance(recipe.policy, DenoisingPolicy):
        yield "advantage.head.coefficient: the head of a denoising policy reads none of its weights; leave it out"
