"""Which tests notice which faults: random mutants of the source, and the tests that fail for each.

    pip install pytest-cov
    pytest -m "not slow" --cov=src --cov-context=test --cov-report=       # which test runs which line: .coverage
    python measurements/structure/kill_matrix.py run --mutants 1000 --seed 1 --coverage .coverage --out killed.jsonl
    python measurements/structure/kill_matrix.py report killed.jsonl --coverage .coverage

A mutant changes one expression or statement inside a function: a comparison, an operator, a number, a condition, a returned
value, or a statement that is left out. Texts are not changed, and neither is code of a module's own level, which a loaded module
would not run again.

`run` collects the suite once and forks for each mutant. The child gives the loaded functions their mutated code and runs the tests
that ran the line, the quickest first, at most 4 of the cases of a parametrised test, within `--budget` seconds of their usual
time. Tests of other processes do not see the mutant, and are not chosen.

`report` prints the share that was killed, and what would be lost without some tests: as many lines of tests as possible are left
out, so that each line of the source is still run by 1, 2, 3, 5 or 8 of the test functions that ran it, and each mutant of a random
half is still killed. The mutants of the other half show the loss.
"""

import argparse
import ast
import contextlib
import gc
import heapq
import importlib
import json
import os
import pkgutil
import random
import re
import select
import shutil
import signal
import tempfile
import time
import types
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
CASES = 4
OPPOSITE = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn,
    ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Div, ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}  # fmt: skip


def changes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Each place that can be mutated, in order: its line, and what is changed there. `mutate` counts in the same order."""
    for node, line in _nodes(tree):
        for what in _kinds(node):
            yield line, what


def _nodes(tree: ast.Module) -> Iterator[tuple[ast.AST, int]]:
    """The nodes inside functions, each with its line, without annotations and texts."""

    def walk(node: ast.AST, line: int, inside: bool) -> Iterator[tuple[ast.AST, int]]:
        line = getattr(node, "lineno", line)
        if inside:
            yield node, line
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                yield from walk(statement, line, True)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                yield from walk(node.value, line, inside)
        elif not isinstance(node, ast.JoinedStr):
            for child in ast.iter_child_nodes(node):
                yield from walk(child, line, inside)

    yield from walk(tree, 0, False)


def _kinds(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Compare):
        return ["comparison"] if type(node.ops[0]) in OPPOSITE else []
    if isinstance(node, ast.BoolOp | ast.BinOp | ast.AugAssign):
        return ["operator"] if type(node.op) in OPPOSITE else []
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        return ["condition"]
    if isinstance(node, ast.Constant):
        return ["number"] if isinstance(node.value, int | float) else []
    if isinstance(node, ast.Return):
        return [] if node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None) else ["returned"]
    if isinstance(node, ast.Raise):
        return ["left out"]
    if isinstance(node, ast.Expr):
        return [] if isinstance(node.value, ast.Constant | ast.Yield | ast.YieldFrom) else ["left out"]
    return []


def mutate(tree: ast.Module, number: int) -> None:
    """Makes change `number` of `changes(tree)` in place."""
    node = [node for node, _ in _nodes(tree) for _ in _kinds(node)][number]
    if isinstance(node, ast.Compare):
        node.ops[0] = OPPOSITE[type(node.ops[0])]()
    elif isinstance(node, ast.BoolOp | ast.BinOp | ast.AugAssign):
        node.op = OPPOSITE[type(node.op)]()
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        node.test = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
    elif isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
    elif isinstance(node, ast.Return):
        node.value = ast.copy_location(ast.Constant(None), node)
    else:
        for parent in ast.walk(tree):
            for _, value in ast.iter_fields(parent):
                if isinstance(value, list) and node in value:
                    value[value.index(node)] = ast.copy_location(ast.Pass(), node)
    ast.fix_missing_locations(tree)


def functions_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """The outermost functions of a module's code, those of its classes too."""
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            if inner.co_flags & 1:  # CO_OPTIMIZED: a function, and not the body of a class
                yield inner
            else:
                yield from functions_of(inner)


def load_everything() -> None:
    for package in sorted(path.parent.name for path in SRC.glob("*/__init__.py")):
        for found in pkgutil.walk_packages([str(SRC / package)], f"{package}."):
            if not found.name.endswith("__main__"):
                # An extra that is not installed: its tests are skipped, too.
                with contextlib.suppress(ImportError):
                    importlib.import_module(found.name)


class Matrix:
    """A plugin of pytest that runs the mutants in place of the suite."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.pipe = -1
        self.sound: dict[str, bool] = {}  # whether a test passes without a mutant

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.pipe >= 0 and (report.failed or report.when == "call"):
            os.write(self.pipe, f"{'F' if report.failed else 'P'} {report.nodeid}\n".encode())

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self.pipe >= 0:
            os.write(self.pipe, f"S {nodeid}\n".encode())

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        load_everything()
        items = {item.nodeid: item for item in session.items}
        seconds = json.loads(Path(self.arguments.seconds).read_text()) if self.arguments.seconds else {}
        lines = {
            file: {line: found for line, tests in of_file.items() if (found := [test for test in tests if test in items])}
            for file, of_file in covered(self.arguments.coverage).items()
        }
        gc.unfreeze()  # the suite has frozen what was loaded while it was collected
        live = defaultdict(list)
        for thing in gc.get_objects():
            if type(thing) is types.FunctionType and thing.__code__.co_filename.startswith(str(SRC)):
                live[thing.__code__.co_filename, thing.__code__.co_qualname].append(thing)
        gc.freeze()
        chosen = sample(lines, self.arguments.mutants, self.arguments.seed)
        first, of = map(int, self.arguments.part.split("/"))
        with Path(self.arguments.out).open("a") as out:
            for place in chosen[first::of]:
                tests = select_tests(lines[place[0]][place[2]], seconds, self.arguments.budget, random.Random(repr(place)))
                row = self.run_mutant(place, [items[test] for test in tests], live, seconds)
                # A test that fails here without any mutant kills nothing: each is tried once, when it fails for the first time.
                self.sound |= dict.fromkeys(set(row["ran"]) - set(row["killed"]), True)
                if doubtful := [test for test in row["killed"] if test not in self.sound]:
                    failed = self.run_mutant(None, [items[test] for test in doubtful], live, seconds)["killed"]
                    self.sound |= {test: test not in failed for test in doubtful}
                row["killed"] = [test for test in row["killed"] if self.sound[test]]
                out.write(json.dumps(row) + "\n")
                out.flush()
        return True

    def run_mutant(self, place: tuple[str, int, int, str] | None, items: list[pytest.Item], live: dict, seconds: dict) -> dict:
        """Run the tests in a fork with one mutant; None runs them without."""
        file, number, line, what = place or ("", 0, 0, "nothing")
        read, write = os.pipe()
        folder = tempfile.mkdtemp(prefix="mutant-")
        limit = 20 + 4 * sum(seconds.get(item.nodeid, 0.5) for item in items)
        child = os.fork()
        if child == 0:
            os.setsid()
            os.close(read)
            self.pipe = write
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (1, 2):
                os.dup2(null, stream)
            self._in_child(file, number, items, live, Path(folder))
        os.close(write)
        text, began = b"", time.monotonic()
        while True:
            ready, _, _ = select.select([read], [], [], max(0.0, began + limit - time.monotonic()))
            block = os.read(read, 65536) if ready else b""
            if not block:
                break
            text += block
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        shutil.rmtree(folder, ignore_errors=True)
        marks = [entry.split(" ", 1) for entry in text.decode(errors="replace").splitlines() if " " in entry]
        failed = list(dict.fromkeys(test for mark, test in marks if mark == "F"))
        started = [test for mark, test in marks if mark == "S"]
        ended = {test for mark, test in marks if mark in "PF"}
        # A test that neither passed nor failed was skipped, unless it was the last: then the mutant hung or ended the process.
        if started and started[-1] not in ended and "E" not in [mark for mark, _ in marks]:
            failed.append(started[-1])
        applied, seconds_taken = ["A", "x"] in marks, round(time.monotonic() - began, 2)
        row = {"file": file, "line": line, "what": what, "number": number, "applied": applied}
        return row | {"ran": started, "killed": failed, "seconds": seconds_taken}

    def _in_child(self, file: str, number: int, items: list[pytest.Item], live: dict, folder: Path) -> None:
        try:
            if not file or apply(file, number, live):
                os.write(self.pipe, b"A x\n")
                items[0].session.items[:] = items
                items[0].config._tmp_path_factory._basetemp = folder
                for item, following in zip(items, [*items[1:], None], strict=True):
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            os.write(self.pipe, b"E x\n")
        finally:
            os._exit(0)


def apply(file: str, number: int, live: dict) -> bool:
    """Gives the loaded functions of `file` the code of one mutant. False: no loaded function has the changed code."""
    source = (ROOT / file).read_text()
    path = str(ROOT / file)
    tree = ast.parse(source)
    mutate(tree, number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        changed, same = compile(tree, path, "exec"), compile(source, path, "exec")
    found = False
    for new, old in zip(functions_of(changed), functions_of(same), strict=True):
        if new != old:
            # The code tells the functions of a name apart, such as a property's two; decorators have changed their first line.
            for function in live.get((path, old.co_qualname), []):
                if function.__code__.co_code == old.co_code:
                    function.__code__ = new
                    found = True
    return found


def covered(path: str) -> dict[str, dict[int, list[str]]]:
    """The tests that ran each line of each file of `src`: file -> line -> ids."""
    from coverage import CoverageData

    data = CoverageData(path)
    data.read()
    lines: dict[str, dict[int, list[str]]] = {}
    for file in sorted(data.measured_files()):
        name = file[file.index("/src/") + 1 :]
        contexts = data.contexts_by_lineno(file)
        of_file = {line: sorted({each.split("|")[0] for each in found} - {""}) for line, found in contexts.items()}
        lines[name] = {line: tests for line, tests in of_file.items() if tests}
    return lines


def sample(lines: dict[str, dict[int, list[str]]], count: int, seed: int) -> list[tuple[str, int, int, str]]:
    """`count` places to mutate, drawn from all on lines that a test ran: file, number of the change, line, kind."""
    places = []
    for file in sorted(lines):
        for number, (line, what) in enumerate(changes(ast.parse((ROOT / file).read_text()))):
            if line in lines[file]:
                places.append((file, number, line, what))
    return random.Random(seed).sample(places, min(count, len(places)))


def select_tests(tests: list[str], seconds: dict[str, float], budget: float, rng: random.Random) -> list[str]:
    """The quickest tests whose usual seconds fit in `budget`; at most `CASES` of one function."""
    cases = defaultdict(list)
    for test in tests:
        cases[function_of(test)].append(test)
    few = [test for found in cases.values() for test in rng.sample(found, min(CASES, len(found)))]
    few.sort(key=lambda test: (seconds.get(test, 0.5), test))
    kept: list[str] = []
    left = budget
    for test in few:
        left -= seconds.get(test, 0.5) + 0.01
        if kept and left < 0:
            break
        kept.append(test)
    return sorted(kept)


def function_of(test: str) -> str:
    return re.sub(r"\[.*", "", test, flags=re.DOTALL)


def report(rows: list[dict], lines: dict[str, dict[int, list[str]]], sizes: dict[str, int]) -> None:
    killed = [{function_of(test) for test in row["killed"]} for row in rows if row["applied"]]
    one = sum(len(tests) == 1 for tests in killed)
    print(f"{len(killed)} mutants, {sum(map(bool, killed))} killed ({share(killed):.3f}), {one} by one test function only")
    random.Random(0).shuffle(killed)
    known, held_out = killed[: len(killed) // 2], killed[len(killed) // 2 :]
    ran = {
        (file, line): {function_of(test) for test in tests} & sizes.keys() for file in lines for line, tests in lines[file].items()
    }
    print(f"| each line is run by | test functions left out | their lines | killed of the held-out half ({share(held_out):.3f}) |")
    print("| --- | --- | --- | --- |")
    for times in (1, 2, 3, 5, 8):
        gone = set().union(*ran.values()) - covering(ran, sizes, times)
        for tests in known:
            if tests and not tests - gone:
                gone.discard(min(tests, key=lambda test: sizes.get(test, 0)))
        left = [tests - gone for tests in held_out]
        print(f"| {times} | {len(gone)} | {sum(sizes[test] for test in gone)} | {share(left):.3f} |")


def share(killed: list[set[str]]) -> float:
    return sum(map(bool, killed)) / len(killed)


def covering(ran: dict[tuple[str, int], set[str]], sizes: dict[str, int], times: int) -> set[str]:
    """Test functions, few lines of them, by which each line is run ``times`` times, or as often as by all: greedily, the one with
    the most needed lines for each of its own lines first."""
    need = {line: min(times, len(tests)) for line, tests in ran.items()}
    of: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for line, tests in ran.items():
        for test in tests:
            of[test].append(line)
    queue = [(-len(found) / sizes[test], test) for test, found in of.items()]
    heapq.heapify(queue)
    kept: set[str] = set()
    while queue:
        _, test = heapq.heappop(queue)
        gain = sum(need[line] > 0 for line in of[test]) / sizes[test]
        if queue and -gain > queue[0][0]:  # others have become better
            heapq.heappush(queue, (-gain, test))
        elif gain:
            kept.add(test)
            for line in of[test]:
                need[line] -= need[line] > 0
    return kept


def sizes_of_tests() -> dict[str, int]:
    """The lines of each test function, with its decorators and the two empty lines before it."""
    found = {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                found[f"{file.relative_to(ROOT)}::{node.name}"] = (node.end_lineno or first) - first + 3
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    run = actions.add_parser("run")
    run.add_argument("--mutants", type=int, default=1000)
    run.add_argument("--seed", type=int, default=1)
    run.add_argument("--coverage", default=".coverage")
    run.add_argument("--seconds", help="JSON: usual seconds of each test, such as those of --durations=0 -vv; default: 0.5 each")
    run.add_argument("--budget", type=float, default=6.0, help="seconds of tests for a mutant")
    run.add_argument("--part", default="0/1", help="0/2 and 1/2: two halves of the mutants, for two processes")
    run.add_argument("--out", required=True)
    shown = actions.add_parser("report")
    shown.add_argument("files", nargs="+")
    shown.add_argument("--coverage", default=".coverage")
    arguments = parser.parse_args()
    if arguments.action == "run":
        pytest.main(["-q", "-m", "not slow", "-s", "-p", "no:cacheprovider", str(ROOT / "tests")], plugins=[Matrix(arguments)])
    else:
        rows = [json.loads(line) for file in arguments.files for line in Path(file).read_text().splitlines()]
        report(rows, covered(arguments.coverage), sizes_of_tests())


if __name__ == "__main__":
    main()
