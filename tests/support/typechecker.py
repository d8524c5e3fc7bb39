"""Checks annotations while the tests run, with beartype; an int is accepted for a float, as in PEP 484.

Modules that are imported when a recipe is parsed import ``torch`` and other heavy modules in an ``if TYPE_CHECKING:`` block. The
checker needs these names at run time, so it runs such blocks first.
"""

import ast
import sys
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from beartype import BeartypeConf, beartype

T = TypeVar("T")
_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def checked(thing: T) -> T:
    """Return the function or class with its annotations checked at each call."""
    _run_type_checking_blocks(thing.__module__)
    checked_thing: Any = _check(thing)
    return checked_thing


@cache
def _run_type_checking_blocks(name: str) -> None:
    """Execute the imports in the module's ``if TYPE_CHECKING:`` blocks in its namespace."""
    module = sys.modules.get(name)
    if module is None or getattr(module, "__file__", None) is None:
        return
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            block = ast.Module([entry for entry in node.body if isinstance(entry, ast.Import | ast.ImportFrom)], [])
            exec(compile(block, module.__file__, "exec"), vars(module))
