"""The documentation site: its navigation lists every page, its API reference every public name, and it builds without a warning."""

import importlib.util
import os
import pkgutil
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import retouch

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
GENERATED = {"index.md", "contributing.md", "source-tree.md"}
"""Pages that `docs/site_hooks.py` makes of files outside docs/."""


def listed(nav):
    for entry in nav:
        for place in entry.values():
            if isinstance(place, str):
                yield place
            else:
                yield from listed(place)


def test_the_navigation_lists_every_page_once():
    pages = {file.relative_to(DOCS).as_posix() for file in DOCS.rglob("*.md")}
    entries = list(listed(CONFIG["nav"]))
    assert sorted(entries) == sorted(pages | GENERATED)


def test_the_api_reference_has_every_public_name():
    shown = re.findall(r"^::: ([\w.]+)$", "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md")), re.MULTILINE)
    assert len(shown) == len(set(shown))
    objects = [pkgutil.resolve_name(name) for name in shown]
    public = {name: getattr(retouch, name) for name in retouch.__all__}
    missing = [name for name, one in public.items() if not hasattr(one, "__path__") and not any(one is each for each in objects)]
    assert missing == [], "add `::: retouch.NAME`, or its path in a wing, to a page of docs/api"


def test_pages_load_nothing_from_other_sites():
    assert CONFIG["theme"]["font"] is False
    assert CONFIG["strict"] is True
    assert not [value for name in ("extra_css", "extra_javascript") for value in CONFIG.get(name, []) if "//" in value]
    for page in DOCS.rglob("*.md"):
        assert not re.findall(r"!\[[^\]]*\]\(https?:|<(?:img|script|link|iframe)\b", page.read_text()), page


def test_the_readmes_results_are_those_of_the_results_page():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    results = (DOCS / "results.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| (\d) \|" + r"[^|]*\|" * 3 + r" (-?\d\.\d\d) \|", results, re.MULTILINE)
    runs: dict[tuple[int, str], list[float]] = {}
    sections = [match.start() for match in re.finditer(r"^## ", results, re.MULTILINE)]
    for match in re.finditer(r"^\| ([^|]+) \| \d \|(?:[^|]*\|){3} (-?\d\.\d\d) \|", results, re.MULTILINE):
        section = sum(start < match.start() for start in sections)
        runs.setdefault((section, match[1]), []).append(float(match[2]))
    assert sum(map(len, runs.values())) == len(rows)
    ranges = {
        f"{min(shares):.2f} to {max(shares):.2f}" if min(shares) < max(shares) else f"{shares[0]:.2f}" for shares in runs.values()
    }
    table = readme.split("| share of the gap closed")[1].split("\n\n")[0]
    named = re.findall(r"-?\d\.\d\d(?: to -?\d\.\d\d)?", table)
    assert len(named) == 15
    assert set(named) <= ranges


def test_the_figures_equal_the_output_of_their_script():
    for name, draw in runpy.run_path(str(DOCS / "figures.py"))["FIGURES"].items():
        assert (DOCS / "pictures" / name).read_text(encoding="utf-8") == draw(), "run `python docs/figures.py`"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra docs")
def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    made = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert (made.returncode, made.stdout, made.stderr) == (0, "", "")
    html = "".join(page.read_text() for page in tmp_path.rglob("*.html"))
    assert not re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(?:https?:)?//', html)
