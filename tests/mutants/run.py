"""Puts each deliberate bug into a copy of the source and runs the test that must fail; exit status 1 if a test does not fail.

python tests/mutants/run.py [--under PATH]... [WORDS OF A NAME]...

``--under core --under retouch_models/flux`` runs only the bugs in these files and folders. Each test runs in a fork of this
process, which has imported the heavy libraries but not the project.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import pytest

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
HEAVY = {
    "diffusers": ("AutoencoderKL", "AutoencoderKLQwenImage", "QwenImageTransformer2DModel", "SD3Transformer2DModel"),
    "transformers": (
        "CLIPTextModelWithProjection",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2VLImageProcessorPil",
        "T5EncoderModel",
    ),
    "peft": ("LoraConfig",),
}
DIED = 70


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Runs, for each deliberate bug, the test that must fail.")
    parser.add_argument("names", nargs="*", metavar="WORDS", help="only bugs whose name contains one of these words")
    parser.add_argument(
        "--under", action="append", default=[], metavar="PATH", help="only bugs in this file or folder under src; can be repeated"
    )
    asked = parser.parse_args(words)
    chosen = choose(asked.names, asked.under)
    if not chosen:
        parser.error("no deliberate bug matches these names and files; the bugs are listed in tests/mutants")
    os.chdir(ROOT)
    for module, attributes in HEAVY.items():
        for attribute in attributes:
            getattr(import_module(module), attribute)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder).resolve() / "src"
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
        run = runner(copy)
        if run(list(dict.fromkeys(mutant.test for mutant in chosen))) != 0:
            tell("the tests fail even without a deliberate bug; run them and fix this first")
            return 1
        width = max(len(mutant.name) for mutant in chosen)
        outcomes = []
        for mutant in chosen:
            began = time.monotonic()
            outcomes.append(outcome(mutant, copy, run))
            tell(f"{mutant.name:{width}}  {outcomes[-1]:8}  {time.monotonic() - began:4.0f} s  {mutant.test}")
    noticed = outcomes.count("noticed")
    tell(f"{noticed} of {len(outcomes)} deliberate bugs were noticed")
    return 0 if noticed == len(outcomes) else 1


def choose(names: Sequence[str], under: Sequence[str]) -> list[Mutant]:
    """Return the mutants whose name contains one of ``names`` and whose file is in one of ``under``. Empty: all."""
    folders = [Path(path) for path in under]
    return [
        mutant
        for mutant in MUTANTS
        if (not names or any(name in mutant.name for name in names))
        and (not folders or any(Path(mutant.file).is_relative_to(folder) for folder in folders))
    ]


def runner(copy: Path) -> Callable[[Sequence[str]], int]:
    """Run the tests on the copied source in a fork and return pytest's exit status."""

    def run(tests: Sequence[str]) -> int:
        assert "retouch" not in sys.modules, "the fork must load the copy"
        fork = os.fork()
        if fork == 0:
            status = DIED
            try:
                status = tested(copy, tests)
            finally:
                os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])

    return run


def tested(copy: Path, tests: Sequence[str]) -> int:
    """Run the tests in the fork, without output. Byte code is not written, as it would hide a change within the same second."""
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(copy))
    os.environ["PYTHONPATH"] = str(copy)  # for the processes that a test starts
    found = import_module("retouch").__file__
    assert found is not None
    assert Path(found).is_relative_to(copy), f"the tests would import {found}"
    loaded_before = "ignore::pytest.PytestAssertRewriteWarning"
    return int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-W", loaded_before, *tests]))


def outcome(mutant: Mutant, copy: Path, run: Callable[[Sequence[str]], int]) -> str:
    """Return ``noticed``, ``SURVIVED``, ``STALE`` (its old text is gone), or ``BROKEN`` (the test could not be run)."""
    file = copy / mutant.path
    text = file.read_text()
    if text.count(mutant.old) != 1:
        return "STALE"
    changed = text.replace(mutant.old, mutant.new)
    compile(changed, str(file), "exec")
    file.write_text(changed)
    try:
        # pytest's exit statuses: 0: all tests passed, 1: some failed; any other: the tests could not be run.
        return {0: "SURVIVED", 1: "noticed"}.get(run([mutant.test]), "BROKEN")
    finally:
        file.write_text(text)


def tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
