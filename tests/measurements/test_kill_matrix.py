"""Random mutants: what is changed, that loaded functions get the changed code, and what the report counts."""

import ast
import importlib
import random
import sys
from collections import defaultdict
from pathlib import Path

import pytest

SOURCE = '''"""A text."""
LIMIT = 3


def decorate(function):
    return function


class Counter:
    @decorate
    def grown(self, by: int = 2) -> int | None:
        """A text."""
        if by > 1 and not by == 7:
            print("never", f"{by - 1}")
            return by * 2
        raise ValueError("too small")
'''


@pytest.fixture(scope="module")
def kill_matrix():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "measurements" / "structure")
        yield importlib.import_module("kill_matrix")
    del sys.modules["kill_matrix"]


def test_every_change_makes_another_function_and_texts_defaults_and_the_modules_own_level_stay(kill_matrix, tmp_path, monkeypatch):
    (tmp_path / "counter.py").write_text(SOURCE)
    monkeypatch.setattr(kill_matrix, "ROOT", tmp_path)
    places = list(kill_matrix.changes(ast.parse(SOURCE)))
    assert places == [
        *((6, "returned"), (13, "condition"), (13, "operator"), (13, "comparison"), (13, "number")),
        *(
            (13, "comparison"),
            (13, "number"),
            (14, "left out"),
            (15, "returned"),
            (15, "operator"),
            (15, "number"),
            (16, "left out"),
        ),
    ]
    seen = set()
    for number in range(len(places)):
        space: dict = {}
        exec(compile(SOURCE, str(tmp_path / "counter.py"), "exec"), space)
        functions = [space["decorate"], space["Counter"].grown]
        live = defaultdict(list)
        for function in functions:
            live[function.__code__.co_filename, function.__code__.co_qualname].append(function)
        assert kill_matrix.apply("counter.py", number, live)
        seen.add(tuple(function.__code__ for function in functions))
    assert len(seen) == len(places)


def test_tests_are_left_out_whose_lines_others_run_and_whose_mutants_others_kill(kill_matrix, capsys):
    lines = {"f.py": {1: ["t::long", "t::short"], 2: ["t::long", "t::short"], 3: ["t::long"]}}
    sizes = {"t::long": 20, "t::short": 4}
    rows = [{"applied": True, "killed": ["t::long[1]", "t::short"]}, {"applied": True, "killed": []}] * 4
    kill_matrix.report([*rows, {"applied": False, "killed": []}], lines, sizes)
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "8 mutants, 4 killed (0.500), 0 by one test function only"
    assert told[3].startswith("| 1 | 0 | 0 |")
    lines["f.py"].pop(3)
    kill_matrix.report(rows, lines, sizes)
    assert [line[:14] for line in capsys.readouterr().out.splitlines()[3:5]] == ["| 1 | 1 | 20 |", "| 2 | 0 | 0 | "]


def test_the_quickest_tests_are_chosen_and_few_of_many_cases(kill_matrix):
    seconds = {"a::slow": 5.0, "a::quick": 0.1} | {f"a::cases[{k}]": 0.2 for k in range(9)}
    chosen = kill_matrix.select_tests([*seconds], seconds, 3.0, random.Random(0))
    assert (len(chosen), {kill_matrix.function_of(test) for test in chosen}) == (5, {"a::quick", "a::cases"})
