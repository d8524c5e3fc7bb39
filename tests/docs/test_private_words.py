"""Names in the source and in the tests do not contain private words that a reader of TRL or diffusers could not guess."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
FORBIDDEN = {
    "askers": "clients", "awaited": "wait_for_rewards", "beside": "shared, next_to", "bury": "delete", "drawer": "image_model",
    "lazy": "incomplete", "meet": "join", "mend": "fix", "painter": "text_to_image", "roomy": "preallocated",
    "slips": "wrong_letters", "unshown": "hidden", "vain": "impossible", "worth": "advantage",
}  # fmt: skip
"""Words that names must not contain, and the standard term for each."""


def names(tree):
    """The names that a module defines: functions, classes, arguments, variables, attributes and aliases of imports."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.alias(asname=str(name)):
                yield name


def words(name):
    """``SceneData_x`` as scene, data and x."""
    return [word.lower() for word in re.split(r"_+|(?<=[a-z0-9])(?=[A-Z])", name) if word]


def forbidden_in(code):
    found = dict.fromkeys(names(ast.parse(code)))
    return [f"{name}: the field says {FORBIDDEN[word]}" for name in found for word in words(name) if word in FORBIDDEN]


def test_forbidden_words_are_detected_in_every_kind_of_definition():
    code = "import a as worth\ndef mend(vain): painter = self.roomy = 1\nclass TheSlips: pass\ndef fix(worthless): pass"
    found = {line.partition(":")[0] for line in forbidden_in(code)}
    assert found == {"mend", "TheSlips", "worth", "vain", "painter", "roomy"}


@pytest.mark.parametrize("package", sorted({file.relative_to(SOURCE).parts[0] for file in SOURCE.rglob("*.py")}))
def test_names_in_a_package_contain_no_forbidden_word(package):
    root = SOURCE / package
    files = sorted(root.rglob("*.py")) if root.is_dir() else [root]
    found = [f"{file.relative_to(SOURCE)}: {line}" for file in files for line in forbidden_in(file.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", ["tests", "measurements", "examples", "docs"])
def test_names_outside_of_the_package_contain_no_forbidden_word(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    found = [f"{file.relative_to(ROOT)}: {line}" for file in files for line in forbidden_in(file.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)
