"""A recipe: the typed description of a run, read from Jsonnet or JSON.

It is checked as a whole before anything is loaded: its keys, its values, and how they fit together. Reading a recipe imports no
torch.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from pydantic import ValidationError, model_validator

from retouch.config.packaged import find
from retouch.recipe.checks import problems
from retouch.recipe.document import apply, evaluate, refuse_secrets
from retouch.recipe.keys import RecipeKeys


class Recipe(RecipeKeys):
    """A run."""

    @model_validator(mode="after")
    def _checked(self) -> Self:
        found = problems(self)
        if found:
            raise ValueError("\n".join(found))
        return self


def parse(document: object) -> Recipe:
    """A recipe from a JSON document. ValueError with a line for each mistake: an unknown key (and what was probably meant), a value
    that is missing or wrong, or values that cannot stand together."""
    if not isinstance(document, Mapping):
        raise ValueError(f"a recipe is an object with keys, not a {type(document).__name__}")
    try:
        return Recipe.model_validate_json(json.dumps(document))
    except ValidationError as error:
        # Imports every kind of every section, to name the nearest keys; a valid recipe imports only what it names.
        from retouch.config.errors import unknown_keys, wrong_values

        raise ValueError("\n".join(unknown_keys(document, Recipe) + wrong_values(error, document, Recipe))) from None


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a Jsonnet or JSON file, or the packaged one of that name, changed by ``a.b=value`` overrides.

    ValueError: no such file (the packaged ones are listed), Jsonnet that does not evaluate, a secret of the environment in it, or
    mistakes as ``parse`` finds them.
    """
    file = find(path)
    try:
        document = apply(evaluate(file), overrides)
        refuse_secrets(document, os.environ)
        return parse(document)
    except ValueError as error:
        raise ValueError(f"{file}:\n{error}") from None
