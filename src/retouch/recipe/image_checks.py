"""What a recipe's image model and the pictures of its data mean together, each with what to do about it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from retouch.recipe.data import ComplexEditData, PaintingData, PicturedData, PlaygroundData, PromptData, TripletData, WordData
from retouch.recipe.families import takes_of
from retouch.recipe.phases import ResolvedPhase
from retouch.recipe.policy import DenoisingPolicy, DiffusersModel, ImportedModel
from retouch.recipe.renderer import CodesRenderer

if TYPE_CHECKING:
    from retouch.recipe.recipe import Recipe


def image_model_problems(recipe: "Recipe") -> Iterator[str]:
    """Whether the image model's size is known, and whether it is told only what it knows."""
    model, takes = recipe.image_model, takes_of(recipe.image_model.kind)
    if not isinstance(model, DiffusersModel) or takes is None:
        return
    if model.size is None and takes.pictures[1] == 0:
        yield f"{_at(recipe)}.size: missing; {model.kind} has no source picture to take it from; give [height, width]"
    if model.guidance is not None and not takes.guidance:
        scale = f"{'rollout' if recipe.renderer is None else 'renderer'}.guidance_scale"
        yield f"{_at(recipe)}.guidance: an input of FLUX.1, and {model.kind} has none; leave it out, or take {scale}"


def picture_problems(recipe: "Recipe", phase: ResolvedPhase, at: str) -> Iterator[str]:
    """Whether data of this kind, whose section is ``at``, bring what the image model is given; of folders and hubs each row says
    it."""
    data, model = phase.data, recipe.image_model
    if isinstance(model, ImportedModel):
        return
    if isinstance(data, PicturedData) and None not in (data.size, model.size) and data.size != model.size:
        yield f"{at}.size: {list(data.size or ())} and {_at(recipe)}.size: {list(model.size or ())} differ; give one of them"
    takes = takes_of(model.kind)
    if takes is None:
        return
    if isinstance(data, PromptData | PaintingData) and takes.pictures[0] > 0:
        others = "triplets, folder or hub" if takes.mask else "folder or hub"
        yield f"{at}.kind: {data.kind} have no source picture, which {model.kind} edits; take {others} data"
    if isinstance(data, PlaygroundData | ComplexEditData) and takes.mask:
        yield f"{at}.kind: {data.kind} has no masks, and {model.kind} takes {takes}; take triplets, folder or hub data"
    shows = isinstance(data, PlaygroundData | ComplexEditData | TripletData | WordData)
    if shows and isinstance(recipe.policy, DenoisingPolicy) and takes.pictures[1] == 0:
        yield f"{at}.kind: {data.kind} has source pictures, of which {model.kind} sees nothing; take prompts, or folder or hub data"


def _at(recipe: "Recipe") -> str:
    return "policy.model" if recipe.renderer is None or isinstance(recipe.renderer, CodesRenderer) else "renderer.model"
