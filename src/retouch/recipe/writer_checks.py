"""What a recipe's values mean together where the policy writes, each with what to do about it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from retouch.models.base import ImportedModel
from retouch.models.kinds import IMAGE_MODELS
from retouch.models.train import FullWeights
from retouch.policies.autoregressive.rollout import TokenRollout
from retouch.recipe.emu3 import TokenModel
from retouch.recipe.policy import DenoisingPolicyKeys
from retouch.recipe.renderer import CodesRenderer, PromptRenderer, ResponseRenderer
from retouch.recipe.writer import AutoregressivePolicy, QwenWriter

if TYPE_CHECKING:
    from retouch.recipe.keys import RecipeKeys


def parts_problems(recipe: "RecipeKeys") -> Iterator[str]:
    """Whether policy, rollouts and renderer are of one kind; with any of these nothing else can be said."""
    writes = isinstance(recipe.policy, AutoregressivePolicy)
    if writes and recipe.renderer is None:
        yield (
            'renderer: missing; a policy that writes needs one: {"kind": "response"} before an editor, {"kind": "prompt"} before '
            'another image model, {"kind": "codes"} where it writes image tokens'
        )
    if not writes and recipe.renderer is not None:
        yield "renderer: a denoising policy makes its own pictures; leave it out, or take policy.kind autoregressive"
    model = recipe.policy.model
    if recipe.renderer is not None and writes and not isinstance(model, ImportedModel):
        tokens = isinstance(model, TokenModel)
        if isinstance(recipe.renderer, CodesRenderer) != tokens:
            why = "writes image tokens: take renderer.kind codes" if tokens else "writes text, and codes are image tokens"
            yield f"renderer.kind: {model.kind} {why}"
    for index, rollout in enumerate([recipe.rollout, *(phase.rollout for phase in recipe.phases or ())]):
        at = f"phases.{index - 1}.rollout" if index else "rollout"
        if writes and rollout is not None and not isinstance(rollout, TokenRollout):
            yield f'{at}.kind: missing; a policy that writes takes {{"kind": "tokens", "max_new_tokens": 100}}, no denoising'
        if not writes and isinstance(rollout, TokenRollout):
            yield f"{at}.kind: 'tokens' is for policies that write; take it out and give num_steps and transition"


def renderer_problems(recipe: "RecipeKeys") -> Iterator[str]:
    """Whether writer and image model understand each other."""
    policy, renderer = recipe.policy, recipe.renderer
    if isinstance(policy, DenoisingPolicyKeys):
        return
    writer = policy.model
    if isinstance(renderer, ResponseRenderer):
        if renderer.model.takes is None or not renderer.model.takes.responses:
            editors = ", ".join(kind for kind in IMAGE_MODELS if _reads_responses(kind))
            yield f"renderer.model.kind: {renderer.model.kind} reads no responses; take one of {editors}, or kind prompt"
        if isinstance(writer, ImportedModel) or writer.kind in ("qwen", "playground-enhancer"):
            yield (
                f"policy.model.kind: an editor reads a writer's ids in its own tokens and pictures, so {writer.kind} cannot stand "
                "before one; take qwen-vl, or renderer.kind prompt"
            )
        if isinstance(writer, QwenWriter) and (writer.system is not None or writer.area is not None):
            yield "policy.model.system, policy.model.area: the editor's template and sizes hold for its writer too; leave both out"
    if isinstance(renderer, PromptRenderer):
        takes = renderer.model.takes
        if takes is not None and takes.images[0] > 0:
            yield (
                f"renderer.model.kind: {renderer.model.kind} edits a source picture, and a prompt has none; take qwen-image, "
                f"sd3, z-image or flux{', or renderer.kind response' if takes.responses else ''}"
            )
        if writer.kind == "playground-writer":
            yield "policy.model.kind: playground-writer writes for an editor; take playground-enhancer, or renderer.kind response"


def _reads_responses(kind: str) -> bool:
    takes = getattr(IMAGE_MODELS.load(kind), "takes", None)
    return takes is not None and takes.responses


def engine_problems(recipe: "RecipeKeys") -> Iterator[str]:
    """Whether the engines can generate what the policy learns from."""
    for index, rollout in enumerate([recipe.rollout, *(phase.rollout for phase in recipe.phases or ())]):
        if not isinstance(rollout, TokenRollout) or rollout.engine is None:
            continue
        at = f"phases.{index - 1}.rollout" if index else "rollout"
        model, full_weights = recipe.policy.model, isinstance(recipe.policy.train, FullWeights)
        image_grammar = isinstance(model, TokenModel) and model.grammar
        for problem in rollout.engine.problems(rollout, full_weights=full_weights, image_grammar=image_grammar):
            yield f"{at}.{problem}"
