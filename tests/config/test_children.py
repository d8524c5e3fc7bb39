"""Interpreters and programs that Retouch starts take nothing from the current folder."""

import ast
import asyncio
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from starlette.requests import Request

from retouch.config import imports
from retouch.distributed.launching import guardian
from retouch.recipe.document import evaluate_jsonnet
from retouch.records.folder import RunFolder
from retouch_view.live.trying import TrialWorker
from source_files import source_files

STARTERS = {
    "distributed/launching.py": {"subprocess.Popen"}, "recipe/document.py": {"subprocess.run"},
    "retouch_view/live/trying.py": {"asyncio.create_subprocess_exec"},
    # These fork, so they start no interpreter; `imports` starts those that do not fork.
    "config/imports.py": {"multiprocessing.get_context('spawn')"}, "data/checks.py": {"multiprocessing.get_context('fork')"},
    "retouch_serve/replicas.py": {"multiprocessing.get_context('fork')"},
}  # fmt: skip
"""The calls in the source that start a process."""
NAMES = ("numpy", "torch", "struct", "pickle", "socket", "json", "sitecustomize", "usercustomize", "rjsonnet", "retouch")


def calls(path):
    yield from (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))


def starts(call):
    name = ast.unparse(call.func)
    process = ("subprocess.Popen", "subprocess.run", "subprocess.call", "subprocess.check_", "asyncio.create_sub")
    system = (
        "os.exec", "os.spawn", "os.posix_spawn", "os.system", "os.popen", "pty.", "multiprocessing.get_context", "get_context",
    )  # fmt: skip
    return name.startswith((*process, *system)) or name in ("multiprocessing.Process", "multiprocessing.Pool", "Popen", "Process")


def test_point_3_2_no_process_is_started_around_the_launcher():
    found: dict[str, set[str]] = {}
    for place, path in source_files().items():
        for call in filter(starts, calls(path)):
            name = ast.unparse(call.func)
            found.setdefault(place, set()).add(ast.unparse(call) if "get_context" in name else name)
            if "multiprocessing" not in name:
                text = path.read_text()
                assert "imports.python(" in text
                assert "imports.environment()" in text
                assert any(word.arg == "env" for word in call.keywords), f"{place}:{call.lineno} passes no environment"
        if place != "config/imports.py":
            assert "sys.executable" not in path.read_text(), f"{place} builds a command line of its own"
    assert found == STARTERS


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """The current folder, with modules that shadow others and write ``ran``; PYTHONPATH names it by an empty entry."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name + ' '!r})\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}{os.pathsep}.{os.pathsep}./")
    return tmp_path / "ran"


def test_point_3_2_neither_a_child_nor_its_own_child_imports_from_the_current_folder(hostile):
    inner = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import json, struct, pickle'], check=True)"
    subprocess.run(imports.python("-c", inner), env=imports.environment(), check=True)
    assert not hostile.exists()


def test_point_3_2_spawned_processes_import_nothing_from_the_current_folder(hostile):
    before = dict(os.environ)
    with imports.spawning() as context, ProcessPoolExecutor(1, mp_context=context) as pool:
        assert pool.submit(abs, -3).result(60) == 3
    assert not hostile.exists()
    assert dict(os.environ) == before


def test_point_3_2_recipes_and_guardians_import_nothing_from_the_current_folder(hostile):
    recipe = Path("recipe.jsonnet")
    recipe.write_text("{a: 1}")
    assert "1" in evaluate_jsonnet(recipe, folders=[], variables={})
    with guardian():
        pass
    assert not hostile.exists()


@pytest.mark.slow
def test_point_3_2_a_tried_checkpoint_imports_nothing_from_the_current_folder(hostile):
    async def connected():
        return {"type": "http.request"}

    async def send_a_wrong_job():
        bench = TrialWorker("cpu")
        asked = bench.events(RunFolder(hostile.parent), {}, Request({"type": "http"}, connected))
        said = "".join([line async for line in asked])
        await bench.stop()
        return said

    assert "KeyError" in asyncio.run(send_a_wrong_job())
    assert not hostile.exists()


@pytest.mark.parametrize("start", [["-P", "-c", "from retouch.cli import main; main()"], ["-m", "retouch"]])
def test_point_3_2_a_command_imports_nothing_from_the_current_folder(start, hostile):
    (hostile.parent / "retouch.py").unlink()  # with -m, Python itself looks for it here
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = ["doctor", "quickstart", "--no-rehearsal", "--set", "steps=0"]
    subprocess.run([sys.executable, *start, *words], env=environment, capture_output=True, check=False)
    assert not hostile.exists(), hostile.read_text()
