"""Which images the model of a run reads, for the form of ``retouch view --try``."""

from collections.abc import Mapping

from retouch.recipe.recipe import parse
from retouch.records.folder import RunFolder


def trial_inputs(folder: RunFolder) -> Mapping[str, bool]:
    """Return whether the page asks for a ``mask`` and a ``reference`` image, and whether the reference can be ``context``
    (``retouch.inference.reference_context``).

    All are false if the recipe of the run cannot be read; a try then fails with the reason.
    """
    try:
        recipe = parse(folder.read_recipe()["recipe"])
    except (ValueError, OSError):
        return {"mask": False, "reference": False, "context": False}
    takes = recipe.image_model.takes if recipe.renderer is None or recipe.renderer.uses_sources else None
    mask, reference = takes is not None and takes.mask, recipe.policy.train.reads_reference
    return {"mask": mask, "reference": reference, "context": mask and reference and recipe.renderer is None}
