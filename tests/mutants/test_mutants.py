"""Every deliberate bug still applies to the source, and the test that must fail exists. (`make mutants` runs these tests.)"""

import ast
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from mutants import MUTANTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies_to_the_source_and_its_test_exists(mutant):
    text = (ROOT / "src" / mutant.path).read_text()
    assert text.count(mutant.old) == 1
    compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")
    file, _, function = mutant.test.partition("::")
    assert function.partition("[")[0] in functions(file)


@cache
def functions(file):
    return {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}


def test_mutant_names_are_unique():
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)


def test_slices_by_folder_leave_no_mutant_out():
    choose = runpy.run_path(str(Path(__file__).parent / "run.py"))["choose"]
    folders = {mutant.file.split("/")[0] for mutant in MUTANTS}
    slices = [choose([], [folder]) for folder in folders]
    assert sorted(mutant.name for each in slices for mutant in each) == sorted(mutant.name for mutant in MUTANTS)
    assert choose([], []) == list(MUTANTS)
    file, name = MUTANTS[0].file, MUTANTS[0].name
    assert choose([name], [file, "types.py"]) == [MUTANTS[0]]
    assert choose([name], ["types.py"]) == choose([], [file.removesuffix("y")]) == []


@pytest.mark.slow  # the files and functions are checked above; this collects a third of all tests
def test_pytest_collects_every_test_that_a_mutant_names():
    tests = dict.fromkeys(mutant.test for mutant in MUTANTS)
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-n", "0", "-p", "no:cacheprovider", *tests]
    found = subprocess.run(collect, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
