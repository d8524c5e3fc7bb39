"""What a recipe's image model and the pictures of its data mean together, each with what to do about it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from retouch.models.base import DiffusersModel
from retouch.recipe.data import ComplexEditData, PaintingData, PicturedData, PlaygroundData, PromptData, TripletData, WordData
from retouch.recipe.phases import ResolvedPhase
from retouch.recipe.policy import DenoisingPolicyKeys
from retouch.recipe.renderer import CodesRenderer

if TYPE_CHECKING:
    from retouch.recipe.keys import RecipeKeys


def image_model_problems(recipe: "RecipeKeys") -> Iterator[str]:
    """Whether the size of the image model's images is known."""
    model = recipe.image_model
    if isinstance(model, DiffusersModel) and not model.has_size:
        yield f"{_at(recipe)}.size: missing; {model.kind} has no source picture to take it from; give [height, width]"


def picture_problems(recipe: "RecipeKeys", phase: ResolvedPhase, at: str) -> Iterator[str]:
    """Whether data of this kind, whose section is ``at``, bring what the image model is given; of folders and hubs each row says
    it."""
    data, model = phase.data, recipe.image_model
    takes, size = model.takes, recipe.image_size
    if isinstance(data, PicturedData) and None not in (data.size, size) and data.size != size:
        yield f"{at}.size: {list(data.size or ())} and {_at(recipe)}.size: {list(size or ())} differ; give one of them"
    if takes is None:
        return
    if isinstance(data, PromptData | PaintingData) and takes.images[0] > 0:
        others = "triplets, folder or hub" if takes.mask else "folder or hub"
        yield f"{at}.kind: {data.kind} have no source picture, which {model.kind} edits; take {others} data"
    if isinstance(data, PlaygroundData | ComplexEditData) and takes.mask:
        yield f"{at}.kind: {data.kind} has no masks, and {model.kind} takes {takes}; take triplets, folder or hub data"
    shows = isinstance(data, PlaygroundData | ComplexEditData | TripletData | WordData)
    if shows and isinstance(recipe.policy, DenoisingPolicyKeys) and takes.images[1] == 0:
        yield f"{at}.kind: {data.kind} has source pictures, of which {model.kind} sees nothing; take prompts, or folder or hub data"


def _at(recipe: "RecipeKeys") -> str:
    return "policy.model" if recipe.renderer is None or isinstance(recipe.renderer, CodesRenderer) else "renderer.model"
