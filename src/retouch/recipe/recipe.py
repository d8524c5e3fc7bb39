"""A recipe: the typed description of a run, read from Jsonnet or JSON.

It is checked as a whole before anything is loaded: its keys, its values, and how they fit together. Reading a recipe imports no
torch.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

from pydantic import ValidationError, model_validator

from retouch.config import consent
from retouch.config.packaged import find
from retouch.recipe.checks import problems
from retouch.recipe.document import apply, evaluate, refuse_secrets, value_of
from retouch.recipe.keys import RecipeKeys


class Recipe(RecipeKeys):
    """The complete description of a run, whose keys have been checked against each other.

    Example::

        >>> retouch.Trainer.from_recipe("quickstart", ["steps=2"]).recipe.steps
        2
    """

    @model_validator(mode="after")
    def _checked(self) -> Self:
        found = problems(self)
        if found:
            raise ValueError("\n".join(found))
        return self


def parse(document: object, overrides: Sequence[str] = (), *, allow_imports: Iterable[str] = ()) -> Recipe:
    """Read a recipe from a JSON document, changed by ``a.b=value`` overrides.

    ``allow_imports``: modules that the recipe may import, in addition to those that the overrides name and those that the user has
    allowed (``retouch.config.consent``). Raises ValueError with a line for each mistake: an unknown key (and what was probably
    meant), a value that is missing or wrong, values that contradict each other, or a class whose module is not allowed.
    """
    if not isinstance(document, Mapping):
        raise ValueError(f"a recipe is an object with keys, not a {type(document).__name__}")
    changed = apply(document, overrides)
    typed = consent.named_in_words(overrides, value_of)
    with consent.reading(changed, source=document, allow=[*consent.module_names(allow_imports), *typed]):
        try:
            return Recipe.model_validate_json(json.dumps(changed))
        except RecursionError:
            raise ValueError("the recipe is nested too deeply") from None
        except ValidationError as error:
            # Imports every kind of every section, to name the nearest keys; a valid recipe imports only what it names.
            from retouch.config.errors import unknown_keys, wrong_values

            raise ValueError("\n".join(unknown_keys(changed, Recipe) + wrong_values(error, changed, Recipe))) from None


def load(path: str | Path, overrides: Sequence[str] = (), *, allow_imports: Iterable[str] = ()) -> Recipe:
    """Read the recipe in a Jsonnet or JSON file, or the packaged recipe of that name, changed by ``a.b=value`` overrides.

    ``allow_imports``: as in ``parse``. Raises ValueError if there is no such file (the message names packaged recipes with similar
    names), if the Jsonnet cannot be evaluated, if the recipe contains a secret of the environment, and for the mistakes that
    ``parse`` finds.
    """
    file = find(path)
    try:
        document = evaluate(file)
        refuse_secrets(apply(document, overrides), os.environ)
        return parse(document, overrides, allow_imports=allow_imports)
    except ValueError as error:
        raise ValueError(f"{file}:\n{error}") from None
