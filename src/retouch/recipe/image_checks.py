"""Checks of a recipe's image model together with its data."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from retouch.models.base import DiffusersModel
from retouch.recipe.phases import ResolvedPhase
from retouch.recipe.policy import DenoisingPolicyKeys

if TYPE_CHECKING:
    from retouch.recipe.keys import RecipeKeys


def image_model_problems(recipe: "RecipeKeys") -> Iterator[str]:
    """Whether the size of the image model's images is known."""
    model = recipe.image_model
    if isinstance(model, DiffusersModel) and not model.has_size:
        yield f"{recipe.image_model_key}.size: missing; {model.kind} has no source image to take it from; give [height, width]"


def picture_problems(recipe: "RecipeKeys", phase: ResolvedPhase, at: str) -> Iterator[str]:
    """Whether the tasks of a phase have the images that the model takes. ``at``: the data's section. Where rows differ, each row is
    checked when it is read."""
    data, model = phase.data, recipe.image_model
    takes, size = model.takes, recipe.image_size
    has, own = data.contents(), data.image_size
    if has.tokens:
        if model.uses_image_tokens is False:
            yield f"{at}.kind: tokens are for a policy that generates image tokens, for example emu3, and not for {model.kind}"
        return
    if None not in (own, size) and own != size:
        yield f"{at}.size: {list(own or ())} and {recipe.image_model_key}.size: {list(size or ())} differ; give one of them"
    if takes is None:
        return
    if has.images is False and takes.images[0] > 0:
        others = "triplets, folder or hub" if takes.mask else "folder or hub"
        yield f"{at}.kind: {data.label} have no source image, which {model.kind} edits; take {others} data"
    elif has.mask is False and takes.mask:
        yield f"{at}.kind: {data.label} has no masks, and {model.kind} takes {takes}; take triplets, folder or hub data"
    if has.images and isinstance(recipe.policy, DenoisingPolicyKeys) and takes.images[1] == 0:
        yield f"{at}.kind: {data.label} has source images, which {model.kind} does not take; take prompts, or folder or hub data"
