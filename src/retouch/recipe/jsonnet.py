"""Jsonnet to JSON. Of the environment only variables whose names begin with ``APP__`` can be read, through ``std.extVar``."""

import json
import os
from pathlib import Path
from typing import Any

import rjsonnet

from retouch.config.packaged import packaged_recipes

PREFIX = "APP__"


def evaluate(file: Path) -> dict[str, Any]:
    """The object that a Jsonnet (or JSON) file describes. Imports are looked for beside the file, then among the packaged recipes.

    ValueError: it does not evaluate, or is no object.
    """
    variables = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    try:
        text = rjsonnet.evaluate_file(str(file), jpathdir=[str(packaged_recipes())], ext_vars=variables)
    except RuntimeError as error:
        hint = f"\nonly environment variables that begin with {PREFIX} are seen" if "external variable" in str(error) else ""
        raise ValueError(f"{error}{hint}") from None
    document = json.loads(text)
    if not isinstance(document, dict):
        raise ValueError("a recipe is an object with keys: { name: 'mine', ... }")
    return document
