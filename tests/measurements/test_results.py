"""The stored runs of docs/results.md: each belongs to a row of the page, and the lists of modules name files that exist."""

import importlib
import re
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "measurements" / "results"


@pytest.fixture(scope="module")
def kept():
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("kept")
    finally:
        sys.path.remove(str(FOLDER))
        for name in ("kept", "page"):
            sys.modules.pop(name, None)


def test_every_row_has_its_stored_runs_and_every_file_belongs_to_a_row(kept):
    sections = sys.modules["page"].SECTIONS
    rows = [(entry, seed) for section in sections for entry in section.entries for seed in entry.seeds]
    assert {kept.place(*row) for row in rows} == set(kept.KEPT.iterdir())
    assert len({kept.place(*row) for row in rows}) == len(rows)
    for entry, seed in rows:
        assert kept.read(entry, seed)["result"]["seed"] == seed


def test_fault_7_every_twin_of_a_full_size_recipe_has_a_row_or_a_statement(kept):
    page = sys.modules["page"]
    rows = {entry.recipe for section in page.SECTIONS for entry in section.entries}
    written = [name for name, _ in page.WITHOUT_RESULT] + [section.about for section in page.SECTIONS]
    patterns = [pattern for text in written for pattern in re.findall(r"`([\w*/-]+-playground)`", text)]
    twins = [file.relative_to(kept.ROOT).as_posix() for file in (kept.ROOT / "recipes").glob("*/*-playground.jsonnet")]
    assert len(twins) > 20
    names = {twin: twin.removeprefix("recipes/").removesuffix(".jsonnet") for twin in twins}
    assert [twin for twin in twins if twin not in rows and not any(fnmatch(names[twin], pattern) for pattern in patterns)] == []


def test_the_listed_modules_exist(kept):
    modules = {module for listed in (*kept.DECIDING.values(), kept.REFERENCED) for module in listed}
    assert [module for module in sorted(modules) if not (kept.SOURCE / (module.replace(".", "/") + ".py")).is_file()] == []


def test_a_digest_changes_with_the_settings_and_not_with_the_name(kept, monkeypatch):
    entry = sys.modules["page"].SECTIONS[0].entries[0]
    document = kept.evaluate(kept.ROOT / entry.recipe)
    before = kept.settings_digest(entry)
    monkeypatch.setattr(kept, "evaluate", lambda path: {**document, "name": "another", "out": "elsewhere", "seed": 9})
    assert kept.settings_digest(entry) == before
    monkeypatch.setattr(kept, "evaluate", lambda path: {**document, "steps": 7})
    assert kept.settings_digest(entry) != before


def test_the_page_matches_the_stored_runs(kept):
    page = sys.modules["page"]
    entries = [entry for section in page.SECTIONS for entry in section.entries]
    found = {entry: [kept.read(entry, seed)["result"] for seed in entry.seeds] for entry in entries}
    assert (kept.ROOT / "docs" / "results.md").read_text(encoding="utf-8") == page.page(found)
