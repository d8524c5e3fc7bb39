"""Checks of a recipe's policy together with its rollouts and its renderer."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from retouch.models.train import FullWeights
from retouch.policies.autoregressive.rollout import TokenRollout
from retouch.recipe.policy import DenoisingPolicyKeys
from retouch.recipe.rollout import Rollout

if TYPE_CHECKING:
    from retouch.recipe.keys import RecipeKeys


def parts_problems(recipe: "RecipeKeys") -> Iterator[str]:
    """Whether policy, rollouts and renderer are of one kind; if they are not, nothing else can be checked."""
    policy, renderer = recipe.policy, recipe.renderer
    tokens = not isinstance(policy, DenoisingPolicyKeys)
    if tokens and renderer is None:
        yield (
            'renderer: missing; a policy that writes needs one: {"kind": "response"} before an editor, {"kind": "prompt"} before '
            'another image model, {"kind": "codes"} where it writes image tokens'
        )
    if not tokens and renderer is not None:
        yield "renderer: a denoising policy makes its own pictures; leave it out, or take policy.kind autoregressive"
    images = policy.model.uses_image_tokens
    if tokens and renderer is not None and images is not None and images != (renderer.reads == "vision"):
        why = "writes image tokens: take renderer.kind codes" if images else "writes text, and codes are image tokens"
        yield f"renderer.kind: {policy.model.kind} {why}"
    for at, rollout in _rollouts(recipe):
        if tokens and not rollout.writes_tokens:
            yield f'{at}.kind: missing; a policy that writes takes {{"kind": "tokens", "max_new_tokens": 100}}, no denoising'
        if not tokens and rollout.writes_tokens:
            yield f"{at}.kind: 'tokens' is for policies that write; take it out and give num_steps and transition"


def renderer_problems(recipe: "RecipeKeys") -> Iterator[str]:
    """Whether the policy's model and the renderer's fit together."""
    if recipe.renderer is not None and not isinstance(recipe.policy, DenoisingPolicyKeys):
        yield from recipe.renderer.problems(recipe.policy.model)


def engine_problems(recipe: "RecipeKeys") -> Iterator[str]:
    """Whether the engines can generate what the policy learns from."""
    policy = recipe.policy
    for at, rollout in _rollouts(recipe):
        if not isinstance(rollout, TokenRollout) or rollout.engine is None or isinstance(policy, DenoisingPolicyKeys):
            continue
        full_weights, image_grammar = isinstance(policy.train, FullWeights), policy.model.image_grammar
        for problem in rollout.engine.problems(rollout, full_weights=full_weights, image_grammar=image_grammar):
            yield f"{at}.{problem}"


def _rollouts(recipe: "RecipeKeys") -> Iterator[tuple[str, Rollout]]:
    """Each rollout of the recipe with its key."""
    yield "rollout", recipe.rollout
    for index, phase in enumerate(recipe.phases or ()):
        if phase.rollout is not None:
            yield f"phases.{index}.rollout", phase.rollout
