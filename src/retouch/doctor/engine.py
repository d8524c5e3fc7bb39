"""Whether the engines of a recipe's rollouts are ready: each says so itself, a vLLM server by asking it."""

from collections.abc import Iterator

from retouch.doctor.findings import Finding
from retouch.models.base import ImageModel
from retouch.policies.autoregressive.rollout import TokenRollout
from retouch.recipe.emu3 import TokenModel
from retouch.recipe.recipe import Recipe


def check_engines(recipe: Recipe) -> Iterator[Finding]:
    """What the engines of all phases report, each asked once; nothing where an engine has nothing to report."""
    model = recipe.policy.model
    rollouts = [phase.rollout for phase in recipe.resolved_phases()]
    engines = {each.engine: each.max_new_tokens for each in rollouts if isinstance(each, TokenRollout) and each.engine is not None}
    for engine, max_new_tokens in engines.items():
        base_model = None if isinstance(model, ImageModel) else model.path
        image_grammar = isinstance(model, TokenModel) and model.grammar
        for status, text, fix in engine.diagnose(base_model=base_model, max_new_tokens=max_new_tokens, image_grammar=image_grammar):
            yield Finding(status, "engine", text, fix)
