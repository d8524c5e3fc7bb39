"""What `shape.py` reads from the source alone: the figures that have budgets, import cycles, and class names that occur twice."""

import ast
import re
import statistics
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

BUDGETS = "measurements/structure/budgets.toml"
STEPS = {"lines": 100, "files": 5, "functions": 10, "nested_imports": 5}
"""A budget is the figure rounded up to a multiple of this. ``median_body`` has none: its budget is a minimum."""
AT_IMPORT, TYPING, IN_FUNCTION = "at import", "TYPE_CHECKING", "in a function"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Source:
    """One Python file of a package."""

    name: str
    path: Path
    lines: int
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


def walk(*folders: Path) -> Iterator[Source]:
    """Read the Python files in packages, or in the tests, one after the other."""
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            parts = [folder.name, *path.relative_to(folder).with_suffix("").parts]
            text = path.read_text(encoding="utf-8")
            yield Source(".".join(parts).removesuffix(".__init__"), path, len(text.splitlines()), ast.parse(text))


def packages(root: Path) -> list[Path]:
    """The folders of the import packages of the checkout ``root``."""
    return sorted(path.parent for path in (root / "src").glob("*/__init__.py"))


def figures(root: Path) -> dict[str, dict[str, int]]:
    """The figures of each package, of `src` as a whole and of `tests`, for the checkout ``root``."""
    found = {folder.name: list(map(_measured, walk(folder))) for folder in packages(root)}
    found["src"] = [file for files in found.values() for file in files]
    found["tests"] = list(map(_measured, walk(root / "tests")))
    return {
        place: {
            "lines": sum(lines for lines, _, _ in files),
            "files": len(files),
            "functions": sum(len(bodies) for _, bodies, _ in files),
            "median_body": int(statistics.median([body for _, bodies, _ in files for body in bodies] or [0])),
            "nested_imports": sum(nested for _, _, nested in files),
        }
        for place, files in found.items()
    }


def _measured(source: Source) -> tuple[int, list[int], int]:
    """The file's lines, the lines of the body of each of its functions, and its imports in functions.

    A function is every ``def``, also a method or a nested one. Its docstring does not count as body.
    """
    bodies, nested = [], 0
    for node, inside in _statements(source.tree, False):
        if isinstance(node, FUNCTIONS):
            body = node.body[ast.get_docstring(node, clean=False) is not None :]
            bodies.append((body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0)
        nested += inside and isinstance(node, ast.Import | ast.ImportFrom)
    return source.lines, bodies, nested


def _statements(node: ast.AST, inside: bool) -> Iterator[tuple[ast.AST, bool]]:
    """All statements in ``node``, and whether each is in a function. Expressions, most of the tree, are not visited."""
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, part, ()):
            yield child, inside
            yield from _statements(child, inside or isinstance(child, FUNCTIONS))


def load_budgets(root: Path) -> dict[str, dict[str, dict[str, int]]]:
    return tomllib.loads((root / BUDGETS).read_text(encoding="utf-8"))


def over_budget(root: Path) -> Iterator[str]:
    """One message for each figure that is above its budget, and for each package without a budget."""
    budgets = load_budgets(root)
    for place, found in figures(root).items():
        budget = {name: row["budget"] for name, row in budgets.get(place, {}).items() if "budget" in row}
        if missing := ", ".join(sorted(found.keys() - budget.keys())):
            yield f"{place}: no budget for {missing}; `python measurements/structure/shape.py --lower` adds it to {BUDGETS}"
        for name, limit in budget.items():
            too_much = (found[name] - limit) * (-1 if name == "median_body" else 1)
            if too_much > 0:
                side = "below" if name == "median_body" else "above"
                yield f"{place}: {name} is {found[name]:,}, {too_much:,} {side} its budget of {limit:,}"


def lowered(root: Path) -> str:
    """The file of budgets with every budget lowered to the present figure, and with the figures that had none."""
    head = (root / BUDGETS).read_text(encoding="utf-8").partition("\n[")[0].rstrip()
    budgets = load_budgets(root)
    for place, found in figures(root).items():
        rows = budgets.setdefault(place, {})
        for name, value in found.items():
            row, step = rows.setdefault(name, {}), STEPS.get(name, 1)
            nearest = -(-value // step) * step
            row["budget"] = (max if name == "median_body" else min)(row.get("budget", nearest), nearest)
    blocks = [head]
    for place, rows in budgets.items():
        lines = (f"{name} = {{ {', '.join(f'{key} = {row[key]}' for key in sorted(row))} }}" for name, row in rows.items())
        blocks.append("\n".join([f"[{place}]", *lines]))
    return "\n\n".join(blocks) + "\n"


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


def cycle(edges: Iterable[tuple[str, str]]) -> list[str]:
    """One cycle of the imports, which ends with the module that it starts with. Empty if there is none."""
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for importer, imported in sorted(edges):
        sorter.add(importer, imported)
    try:
        sorter.prepare()
    except CycleError as error:
        return [*error.args[1]]
    return []


def between_siblings(edges: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Each import as one between two children of a package: those in which importer and imported differ first."""
    found = set()
    for start, end in edges:
        one, other = start.split("."), end.split(".")
        for depth, (left, right) in enumerate(zip(one, other, strict=False), start=1):
            if left != right:
                found.add((".".join(one[:depth]), ".".join(other[:depth])))
                break
    return found


def duplicate_classes(sources: Mapping[str, Source]) -> dict[str, list[str]]:
    """Public class names that more than one module defines, with the modules."""
    places: dict[str, list[str]] = defaultdict(list)
    for source in sources.values():
        for name in {node.name for node in source.tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_"}:
            places[name].append(source.name)
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}
