"""`make shape` and `make lint` count correctly on a small tree; Retouch has no import cycles and no class names twice."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FILES = {
    "src/house/__init__.py": "",
    "src/house/types.py": "class Batch: ...\nclass _Private: ...\n",
    # A cycle between two files of one package that needs a TYPE_CHECKING import.
    "src/house/one/__init__.py": '"""One."""\n',
    "src/house/one/left.py": "from house.one.right import right\nfrom ..types import Batch\n",
    "src/house/one/right.py": """
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from house.one import left

def right() -> None:
    \"\"\"Only a docstring.\"\"\"
""",
    # Two packages that import each other without a cycle of modules.
    "src/house/two/__init__.py": "",
    "src/house/two/batch.py": "from house.one import left\n\nclass Batch:\n  def method(self):\n    x = 1\n    return x\n",
    "src/house/one/other.py": "import house.two.free\n",
    "src/house/two/free.py": 'def free() -> None:\n    """Free."""\n    if True:\n        import json\n    def inner(): ...\n',
    # A cycle through imports in functions, one of them a string like those of a registry.
    "src/house/two/kinds.py": "KINDS = {'a': 'house.two.incomplete:build'}\n",
    "src/house/two/incomplete.py": "def build():\n    from . import kinds\n",
    "src/wing/__init__.py": "import house.types\n",
    "tests/test_house.py": "def test_it(): ...\n",
}


@pytest.fixture(scope="module")
def counts():
    """The module of `measurements/structure/` that counts."""
    sys.path.insert(0, str(ROOT / "measurements" / "structure"))
    try:
        yield importlib.import_module("shape_counts")
    finally:
        sys.path.remove(str(ROOT / "measurements" / "structure"))


@pytest.fixture
def tree(tmp_path):
    for name, text in {**FILES, "measurements/structure/budgets.toml": "# Budgets.\n\n[house]\nlines = { goal = 9 }\n"}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def shape(tree, task):
    command = [sys.executable, str(ROOT / "measurements" / "structure" / "shape.py"), task, "--tree", str(tree)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_figures_of_each_package_of_the_source_and_of_the_tests_are_counted(counts, tree):
    house = {"lines": 28, "files": 11, "functions": 5, "median_body": 1, "nested_imports": 2}
    wing = {"lines": 1, "files": 1, "functions": 0, "median_body": 0, "nested_imports": 0}
    tests = {"lines": 1, "files": 1, "functions": 1, "median_body": 1, "nested_imports": 0}
    source = {**house, "lines": 29, "files": 12}
    assert counts.figures(tree) == {"house": house, "wing": wing, "src": source, "tests": tests}


def test_a_package_without_a_budget_or_above_it_fails_the_check_until_it_is_added_or_smaller(tree):
    failed = shape(tree, "--check")
    assert failed.returncode == 1
    assert "wing: no budget for files, functions, lines, median_body, nested_imports; " in failed.stderr
    assert shape(tree, "--lower").returncode == 0
    assert shape(tree, "--check").returncode == 0

    file = tree / "src" / "house" / "types.py"
    for lines in (100, 2):
        file.write_text("def f():\n" + "    x = 1\n" * lines + "def g(): ...\n" * 8)
        shape(tree, "--lower")  # never raises a budget
        failed = shape(tree, "--check")
        assert ("house: lines is 135, 35 above its budget of 100\n" in failed.stderr) == (lines == 100)
        assert "house: functions is 14, 4 above its budget of 10\n" in failed.stderr
        assert "raise the budget in measurements/structure/budgets.toml in a commit of its own that says why" in failed.stderr
    budgets = tree / "measurements" / "structure" / "budgets.toml"
    assert "[house]\nlines = { budget = 100, goal = 9 }\n" in budgets.read_text()
    budgets.write_text(budgets.read_text().replace("median_body = { budget = 1 }", "median_body = { budget = 3 }"))
    assert "house: median_body is 1, 2 below its budget of 3\n" in shape(tree, "--check").stderr


def test_every_spelling_of_an_import_is_an_edge(counts, tree):
    edges = counts.imports({source.name: source for source in counts.walk(*counts.packages(tree))})
    assert edges[counts.AT_IMPORT] == {
        ("house.one.left", "house.one.right"),
        ("house.one.left", "house.types"),
        ("house.two.batch", "house.one.left"),
        ("house.one.other", "house.two.free"),
        ("wing", "house.types"),
    }
    assert edges[counts.TYPING] == {("house.one.right", "house.one.left")}
    assert edges[counts.IN_FUNCTION] == {("house.two.kinds", "house.two.incomplete"), ("house.two.incomplete", "house.two.kinds")}


def test_cycles_of_modules_and_of_packages_are_found(counts, tree):
    edges = counts.imports({source.name: source for source in counts.walk(*counts.packages(tree))})
    assert counts.cycle(edges[counts.AT_IMPORT]) == []
    assert set(counts.cycle(edges[counts.AT_IMPORT] | edges[counts.TYPING])) == {"house.one.left", "house.one.right"}
    assert set(counts.cycle(edges[counts.IN_FUNCTION])) == {"house.two.kinds", "house.two.incomplete"}
    assert set(counts.cycle(counts.between_siblings(edges[counts.AT_IMPORT]))) == {"house.one", "house.two"}


def test_retouch_has_no_import_cycles_and_no_class_names_that_occur_twice(counts):
    sources = {source.name: source for source in counts.walk(*counts.packages(ROOT))}
    edges = set.union(*counts.imports(sources).values())
    assert counts.cycle(edges) == []
    assert counts.cycle(counts.between_siblings(edges)) == []
    assert counts.duplicate_classes(sources) == {}
