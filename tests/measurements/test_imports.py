"""The scripts of measurements/ and examples/ use only names that exist. Most are run by hand, and mypy does not read them."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for folder in ("measurements", "examples") for path in (ROOT / folder).rglob("*.py"))
SEARCHED = (ROOT / "tests" / "support", *sorted({path.parent for path in SCRIPTS}))


def module_file(name, script):
    """The file of a module of this repository; None for other modules."""
    if name.split(".")[0].startswith("retouch"):
        path = ROOT / "src" / Path(*name.split("."))
        return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)
    return next((folder / f"{name}.py" for folder in (script.parent, *SEARCHED) if (folder / f"{name}.py").is_file()), None)


@cache
def names_of(module):
    """The names that a module defines or imports at its top level, and its submodules; None if it computes its names."""
    found = {path.stem for path in module.parent.iterdir()} if module.name == "__init__.py" else set[str]()
    for node in _top_level(ast.parse(module.read_text()).body):
        match node:
            case ast.FunctionDef(name="__getattr__"):
                return None
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Import() | ast.ImportFrom():
                found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            case ast.Name(ctx=ast.Store()):
                found.add(node.id)
    return frozenset(found)


def _top_level(body):
    """All nodes outside of functions and classes, and the definitions of these."""
    for node in body:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from (child for child in ast.walk(node) if child is not node)


def unknown_names(script):
    tree = ast.parse(script.read_text())
    modules: dict[str, Path] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: file for alias in node.names if (file := module_file(alias.name, script))}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            file = module_file(node.module, script)
            known = names_of(file) if file else None
            if known is not None:
                yield from (f"{node.lineno}: {node.module}.{alias.name}" for alias in node.names if alias.name not in known)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            known = names_of(modules[node.value.id])
            if known is not None and node.attr not in known:
                yield f"{node.lineno}: {node.value.id}.{node.attr}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_script_uses_only_names_that_its_modules_have(script):
    assert list(unknown_names(script)) == []


def test_a_missing_name_is_found(tmp_path):
    (tmp_path / "helper.py").write_text("import os\nif os.name:\n    there = 1\n")
    script = tmp_path / "script.py"
    script.write_text("import helper\nfrom helper import there, missing\nfrom retouch.types import Task, Tusk\nhelper.other()\n")
    assert list(unknown_names(script)) == ["2: helper.missing", "3: retouch.types.Tusk", "4: helper.other"]
