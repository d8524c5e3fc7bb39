"""Imports the scripts of measurements/rehearsal, which import each other from their own folder."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "measurements" / "rehearsal"


def script(name: str) -> ModuleType:
    """Import a script of the folder."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


def call_in_new_process(name: str, function: str, *arguments: object) -> str:
    """The code of a program that prints the result of a script's function as its last line, in JSON."""
    given = ", ".join(map(repr, arguments))
    return f"import json, sys; sys.path.insert(0, {str(FOLDER)!r}); import {name}; print(json.dumps({name}.{function}({given})))"
