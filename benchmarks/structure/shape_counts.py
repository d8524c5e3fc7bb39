"""The counts of `shape.py` that do not run the package: files, lines, import cycles, duplicate class names, citations."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

AT_IMPORT, TYPING, IN_FUNCTION = "at import", "TYPE_CHECKING", "in a function"
CITATION = re.compile(
    r"arxiv|\bet al\b|\bpapers?\b|\b(equation|section|appendix|algorithm) [0-9A-Z]\b|\beqs?\. ?\(?\d"
    r"|\b(?-i:[A-Z][\w.-]* ?GRPO|GRPO|RLOO|GSPO|DAPO|PPO|DPO|DiffusionNFT|AWM|TRL|diffusers|verl|Schulman)\b",
    re.IGNORECASE,
)
"""Text that counts as a citation: arXiv, "et al.", "paper", a numbered equation or section, or a well-known method or system."""


@dataclass(frozen=True)
class Source:
    """One Python file of the package."""

    name: str
    path: Path
    lines: int
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


def read(package: Path) -> dict[str, Source]:
    """Read all modules of the package in the folder ``package``. Returns them by dotted name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        found[name] = Source(name, path, len(text.splitlines()), ast.parse(text))
    return found


def imports(sources: Mapping[str, Source]) -> dict[str, set[tuple[str, str]]]:
    """The imports (importer, imported) between modules of the package, by the time of the import.

    A string "package.module:name" counts as an import in a function, because registries name their entries in this form.
    """
    found: dict[str, set[tuple[str, str]]] = {AT_IMPORT: set(), TYPING: set(), IN_FUNCTION: set()}
    for source in sources.values():
        for target, when in _imported(source, source.tree, AT_IMPORT, sources):
            if target != source.name:
                found[when].add((source.name, target))
    return found


def _imported(source: Source, node: ast.AST, when: str, known: Mapping[str, Source]) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Import):
        yield from ((alias.name, when) for alias in node.names if alias.name in known)
    elif isinstance(node, ast.ImportFrom):
        above = source.name.split(".")[: None if source.is_package and node.level == 1 else source.is_package - node.level]
        base = ".".join([*(above if node.level else []), *([node.module] if node.module else [])])
        for alias in node.names:
            yield from (
                (name, when) for name in (f"{base}.{alias.name}", base) if name in known and _first(name, base, alias, known)
            )
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+:\w+", node.value):
        name = node.value.partition(":")[0]
        if name in known:
            yield name, IN_FUNCTION
    typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for child in ast.iter_child_nodes(node):
        inside = when
        if when == AT_IMPORT and typing and child in node.body:  # type: ignore[attr-defined]
            inside = TYPING
        elif when == AT_IMPORT and is_function:
            inside = IN_FUNCTION
        yield from _imported(source, child, inside, known)


def _first(name: str, base: str, alias: ast.alias, known: Mapping[str, Source]) -> bool:
    """`from base import name` imports the submodule `base.name` if it exists, else the package `base`."""
    return name != base or f"{base}.{alias.name}" not in known


def circles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """The strongly connected components of more than one node, largest first (Tarjan 1972)."""
    after = defaultdict(list)
    for start, end in sorted(set(edges)):
        after[start].append(end)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for end in after.get(node, ()):
            if end not in index:
                visit(end)
            if end in stack:
                low[node] = min(low[node], low[end])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for node in list(after):
        if node not in index:
            visit(node)
    return sorted(found, key=lambda members: (-len(members), members))


def package_circles(edges: Iterable[tuple[str, str]], sources: Mapping[str, Source]) -> list[list[str]]:
    """Import cycles between the children of a package, in which at least one child is itself a package."""
    siblings: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for start, end in edges:
        one, other = start.split("."), end.split(".")
        shared = 0
        while shared < min(len(one), len(other)) and one[shared] == other[shared]:
            shared += 1
        if shared < min(len(one), len(other)):
            siblings[".".join(one[:shared])].add((".".join(one[: shared + 1]), ".".join(other[: shared + 1])))
    found = [members for parent in sorted(siblings) for members in circles(siblings[parent])]
    return [members for members in found if any(sources[name].is_package for name in members)]


def duplicate_classes(sources: Mapping[str, Source]) -> dict[str, list[str]]:
    """Public class names that more than one module defines, with the modules."""
    places: dict[str, list[str]] = defaultdict(list)
    for source in sources.values():
        for name in {node.name for node in source.tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_"}:
            places[name].append(source.name)
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def citations(sources: Mapping[str, Source]) -> dict[str, list[int]]:
    """For each package, three counts: public functions and classes, those with a docstring, and those that cite a source."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for source in sources.values():
        package = source.name.split(".")[1] if "." in source.name else source.name
        for node in source.tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name[0] != "_":
                text = ast.get_docstring(node) or ""
                for at, hit in enumerate((True, bool(text), bool(CITATION.search(text)))):
                    counts[package][at] += hit
    total = [sum(column) for column in zip(*counts.values(), strict=True)]
    return {**dict(sorted(counts.items())), "all": total}


def structure(package: Path) -> dict[str, Any]:
    """Everything that can be counted without running the package. `tests/benchmarks/test_shape.py` checks parts of it."""
    sources = read(package)
    edges = imports(sources)
    checked = edges[AT_IMPORT] | edges[TYPING]
    every = checked | edges[IN_FUNCTION]
    folders: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for source in sources.values():
        row = folders[source.path.parent.relative_to(package.parent).as_posix()]
        row[0], row[1] = row[0] + 1, row[1] + source.lines
    importers = Counter(end for _, end in every)
    named = [source for source in sources.values() if not source.is_package]
    per_folder = Counter(source.path.parent for source in named)
    duplicates = duplicate_classes(sources)
    circle_lists = {
        "modules": circles(checked),
        "modules, with imports in functions": circles(every),
        "packages": package_circles(checked, sources),
        "packages, with imports in functions": package_circles(every, sources),
    }
    return {
        "folders": dict(sorted(folders.items())),
        "totals": {
            "files": len(sources),
            "lines": sum(source.lines for source in sources.values()),
            "files over 400 lines": sum(source.lines > 400 for source in named),
            "files under 50 lines": sum(source.lines < 50 for source in sources.values()),
            "files under 40 lines": sum(source.lines < 40 for source in sources.values()),
            "files under 40 lines, without `__init__.py`": sum(source.lines < 40 for source in named),
            "files with exactly one importer": sum(count == 1 for count in importers.values()),
            "folders": len(folders),
            "folders of more than 15 files, without `__init__.py`": sum(count > 15 for count in per_folder.values()),
            "most files in a folder": max(per_folder.values()),
        },
        "imports": {
            "circles of modules, imports at the top": len(circles(edges[AT_IMPORT])),
            "circles of modules, with TYPE_CHECKING": len(circle_lists["modules"]),
            "circles of modules, with imports in functions": len(circle_lists["modules, with imports in functions"]),
            "modules in these circles": sum(map(len, circle_lists["modules, with imports in functions"])),
            "circles of packages, imports at the top": len(package_circles(edges[AT_IMPORT], sources)),
            "circles of packages, with TYPE_CHECKING": len(circle_lists["packages"]),
            "circles of packages, with imports in functions": len(circle_lists["packages, with imports in functions"]),
            "packages in these circles": sum(map(len, circle_lists["packages, with imports in functions"])),
            "public class names defined more than once": len(duplicates),
        },
        "citations": citations(sources),
        "lists": {
            "circles": circle_lists,
            "duplicates": duplicates,
            "under 40 lines": [source.name for source in named if source.lines < 40],
        },
    }
