"""Every test that the maths page names exists, and every module of formulas has a section there."""

import ast
import functools
import re
from pathlib import Path

from retouch.objectives.kinds import OBJECTIVES

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
PAGE = (ROOT / "docs" / "maths.md").read_text()
FORMULAS = ("advantages", "gae", "surrogates", "transitions", "tokens", "windows")


@functools.cache
def functions(path):
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_named_test_exists():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 40
    assert PAGE.count("::test_") == len(named)
    missing = [f"{file}::{test}" for file, test in named if test not in functions(TESTS / file)]
    assert not missing


def test_every_table_row_names_a_test():
    lines = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith(("| ---", "| formula", "| rule"))]
    assert len(lines) > 30
    assert not [line for line in lines if "::test_" not in line]


def test_every_module_of_formulas_has_a_section():
    for module in FORMULAS:
        assert (ROOT / "src" / "retouch" / "core" / f"{module}.py").exists()
        assert re.search(rf"^## .*`core/{module}\.py`", PAGE, re.MULTILINE), module


def test_every_kind_of_objective_and_the_average_of_the_weights_are_on_the_page():
    modules = {path.partition(":")[0] for path in OBJECTIVES.paths.values()}
    files = {f"{module.removeprefix('retouch.').replace('.', '/')}.py" for module in modules}
    assert "objectives/nft.py" in files
    assert not [file for file in sorted(files) if f"`{file}`" not in PAGE]
    assert "`policies/weights.py`" in PAGE
