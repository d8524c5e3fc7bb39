"""What an IP-Adapter and the rest of a recipe mean together, each with what to do about it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from retouch.models.base import ImageModel
from retouch.models.ip_adapter.section import IpAdapter

if TYPE_CHECKING:
    from retouch.recipe.keys import RecipeKeys


def ip_adapter_problems(recipe: "RecipeKeys") -> Iterator[str]:
    """Whether the model can have the adapter, and the tasks a reference to show it."""
    train, model = recipe.policy.train, recipe.policy.model
    if not isinstance(train, IpAdapter):
        return
    assert isinstance(model, ImageModel)
    if not model.ip_adapter_blocks:
        yield f"policy.train.kind: ip-adapter is for models of Flux and Qwen-Image, and not for {model.kind}; take lora"
    elif train.blocks not in model.ip_adapter_blocks:
        yield "policy.train.blocks: Qwen-Image has double blocks alone; take double"
    phases = recipe.resolved_phases()
    if train.dropout > 0 and not any(phase.imitates for phase in phases):
        yield "policy.train.dropout: no phase is supervised, and every other shows each reference; take 0"
    for index, phase in enumerate(phases):
        own = recipe.phases is not None and recipe.phases[index].data is not None
        at = f"phases.{index}.data" if own else "data"
        if phase.data.contents().reference is not False:
            continue  # a row of a folder without a reference is reported when it is read
        if "columns" in type(phase.data).model_fields:
            yield f"{at}.columns: an IP-Adapter reads a reference image; say which column `reference` is"
        else:
            yield f"{at}.kind: {phase.data.label} have no reference image, which an IP-Adapter reads; take triplets, folder or hub"
