"""`make shape` counts correctly on a small package with known import cycles, duplicate names and one long file."""

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FILES = {
    "__init__.py": "",
    "types.py": "class Batch: ...\nclass _Private: ...\n",
    "long.py": "x = 1\n" * 401,
    # A cycle between two files of one package that needs a TYPE_CHECKING import.
    "one/__init__.py": '"""One."""\n',
    "one/left.py": "from house.one.right import right\nfrom ..types import Batch\n",
    "one/right.py": """
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from house.one import left

def right() -> None:
    \"\"\"Clip as PPO does (arXiv 1707.06347).\"\"\"
""",
    # Two packages that import each other without a cycle of modules.
    "two/__init__.py": "",
    "two/batch.py": "from house.one import left\n\nclass Batch:\n    def method(self): ...\n",
    "one/other.py": "import house.two.free\n",
    "two/free.py": 'def free() -> None:\n    """Free of sources."""\n',
    # A cycle through imports in functions, one of them a string like those of a registry.
    "two/kinds.py": "KINDS = {'a': 'house.two.lazy:build'}\n",
    "two/lazy.py": "def build():\n    from . import kinds\n",
}


@pytest.fixture(scope="module")
def counts():
    """The module of `benchmarks/structure/` that counts."""
    sys.path.insert(0, str(ROOT / "benchmarks" / "structure"))
    try:
        yield importlib.import_module("shape_counts")
    finally:
        sys.path.remove(str(ROOT / "benchmarks" / "structure"))


@pytest.fixture
def house(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "house"


def test_import_cycles_of_modules_are_counted_by_kind_of_import(counts, house: Path) -> None:
    measured = counts.structure(house)
    assert measured["imports"]["circles of modules, imports at the top"] == 0
    assert measured["imports"]["circles of modules, with TYPE_CHECKING"] == 1
    assert measured["imports"]["circles of modules, with imports in functions"] == 2
    assert measured["imports"]["modules in these circles"] == 4
    assert measured["lists"]["circles"]["modules"] == [["house.one.left", "house.one.right"]]
    assert ["house.two.kinds", "house.two.lazy"] in measured["lists"]["circles"]["modules, with imports in functions"]


def test_packages_that_import_each_other_form_a_cycle_without_a_cycle_of_modules(counts, house: Path) -> None:
    measured = counts.structure(house)
    assert measured["lists"]["circles"]["packages"] == [["house.one", "house.two"]]
    (house / "one" / "other.py").write_text("")
    assert counts.structure(house)["imports"]["circles of packages, with TYPE_CHECKING"] == 0


def test_every_spelling_of_an_import_is_an_edge(counts, house: Path) -> None:
    edges = counts.imports(counts.read(house))
    assert edges[counts.AT_IMPORT] == {
        ("house.one.left", "house.one.right"),
        ("house.one.left", "house.types"),
        ("house.two.batch", "house.one.left"),
        ("house.one.other", "house.two.free"),
    }
    assert edges[counts.TYPING] == {("house.one.right", "house.one.left")}
    assert edges[counts.IN_FUNCTION] == {("house.two.kinds", "house.two.lazy"), ("house.two.lazy", "house.two.kinds")}


def test_public_class_names_defined_twice_are_reported(counts, house: Path) -> None:
    measured = counts.structure(house)
    assert measured["lists"]["duplicates"] == {"Batch": ["house.two.batch", "house.types"]}
    assert measured["imports"]["public class names defined more than once"] == 1


def test_files_are_counted_by_length_folder_and_importers(counts, house: Path) -> None:
    measured = counts.structure(house)
    assert measured["totals"]["files"] == len(FILES)
    assert measured["totals"]["files over 400 lines"] == 1
    assert measured["totals"]["files under 40 lines"] == len(FILES) - 1
    assert measured["totals"]["files under 40 lines, without `__init__.py`"] == len(FILES) - 4
    assert measured["totals"]["most files in a folder"] == 4
    # Imported once: right, types, free, lazy, kinds. Twice: left.
    assert measured["totals"]["files with exactly one importer"] == 5
    assert measured["folders"]["house"] == [3, 403]
    assert measured["folders"]["house/one"] == [4, 12]


def test_docstrings_that_name_a_source_are_counted_as_citations(counts, house: Path) -> None:
    measured = counts.structure(house)
    assert measured["citations"] == {"one": [1, 1, 1], "two": [3, 1, 0], "types": [1, 0, 0], "all": [5, 2, 1]}


@pytest.mark.parametrize("text", ["Eq. (3) there", "Schulman et al. 2017", "as Flow-GRPO does", "arXiv 2402.03300"])
def test_the_citation_pattern_matches_sources(counts, text: str) -> None:
    assert counts.CITATION.search(text)


@pytest.mark.parametrize("text", ["equal groups", "this section", "a wallpaper", "the policy gradient"])
def test_the_citation_pattern_does_not_match_other_text(counts, text: str) -> None:
    assert not counts.CITATION.search(text)


def test_retouch_has_no_import_cycles_duplicate_class_names_or_files_over_400_lines(counts) -> None:
    found = counts.structure(ROOT / "src" / "retouch")
    assert found["lists"]["circles"]["modules"] == []
    assert found["lists"]["circles"]["modules, with imports in functions"] == []
    assert found["lists"]["circles"]["packages"] == []
    assert found["lists"]["circles"]["packages, with imports in functions"] == []
    assert found["lists"]["duplicates"] == {}
    assert found["totals"]["files over 400 lines"] == 0
