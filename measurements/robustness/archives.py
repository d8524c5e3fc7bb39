"""Starts commands in 20 hostile archives: folders with a trained run, its recipe, and something that would run code or redirect a
file.

    python measurements/robustness/archives.py [--every N]

In each archive, `train`, `doctor`, `eval`, `view`, `report`, `export` and `bench` are started as new processes in the archive's
folder. No code of the archive may run, and no file outside of the archive may change. The exit code is 1 if one does.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1] / "tests" / "support"))
from links import contents, place  # noqa: E402

import folder_faults as faults  # noqa: E402
from kill_places import import_models, run_in_fork  # noqa: E402

SECONDS = 300
RETOUCH = [sys.executable, "-P", "-W", "ignore", "-c", "import sys; from retouch.cli import main; sys.exit(main())"]
"""What the installed command `retouch` does: its folder, and not the current one, is on Python's path."""
COMMANDS = (
    ("train", "recipe.json"),
    ("doctor", "recipe.json", "--no-rehearsal"),
    ("eval", "runs/base", "--set", "eval.tasks=2"),
    ("view", "runs/base", "--export", "page.html"),
    ("report", "runs/base"),
    ("export", "runs/base", "--to", "exported"),
    ("bench", "list"),
)
MODULES = (
    *("numpy.py", "torch/__init__.py", "struct.py", "json.py"),
    *("retouch/__init__.py", "sitecustomize.py", "usercustomize.py", "rjsonnet.py"),
)
LINKS = ("votes.jsonl", "owner.json", "train.log", "report.html", "ledger.sqlite", "samples")


def module(name: str) -> Callable[[Path, Path], None]:
    """Put a module of this name into the archive."""

    def write(archive: Path, outside: Path) -> None:
        (archive / name).parent.mkdir(parents=True, exist_ok=True)
        (archive / name).write_text(f"open({str(outside / 'ran')!r}, 'a').write({name!r})\n")

    return write


def git(buried: bool, key: str) -> Callable[[Path, Path], None]:
    """Make the archive, or its folder of runs, a repository whose configuration names a program."""

    def write(archive: Path, outside: Path) -> None:
        program = outside.with_name(f"{outside.name}-program")
        program.write_text(f"#!/bin/sh\ntouch {outside / 'ran'}\n")
        program.chmod(0o755)
        (archive / ".gitattributes").write_text("* filter=x\n")
        words = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(archive)]
        for command in (["init", "-q"], ["add", "recipe.json", ".gitattributes"], ["commit", "-qm", "one"]):
            subprocess.run([*words, *command], check=True, capture_output=True)
        with (archive / ".git" / "config").open("a") as file:
            file.write(f"[core]\n\tworktree = {archive}\n[{key.partition('.')[0]}]\n\t{key.partition('.')[2]} = {program}\n")
        (archive / ".gitattributes").write_text("* filter=x \n")
        if buried:
            for path in [*(archive / ".git").iterdir()]:
                path.rename(archive / path.name)
            (archive / ".git").rmdir()

    return write


def linked(name: str, kind: str = "link") -> Callable[[Path, Path], None]:
    return lambda archive, outside: place(archive / "runs" / "base", name, kind, outside)


def names_a_class(archive: Path, outside: Path) -> None:
    """The recipe names a class of a module in the archive."""
    module("mine.py")(archive, outside)
    recipe = json.loads((archive / "recipe.json").read_text())
    recipe["reward"] = {"kind": "import", "class": "mine:Reward"}
    for file, document in (("recipe.json", recipe), ("runs/base/recipe.json", {"recipe": recipe, "versions": {}})):
        (archive / file).write_text(json.dumps(document))


def declares_a_plugin(archive: Path, outside: Path) -> None:
    names_a_class(archive, outside)
    about = archive / "mine-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[retouch.plugins]\nmine = mine:Reward\n")


ARCHIVES: dict[str, Callable[[Path, Path], None]] = {
    "core.fsmonitor": git(False, "core.fsmonitor"),
    "a filter of git": git(False, 'filter "x".clean'),
    "a buried bare repository": git(True, "core.fsmonitor"),
    **{
        f"a module {name}": module(name)
        for name in ("numpy.py", "torch/__init__.py", "struct.py", "json.py", "retouch/__init__.py")
    },
    **{f"a module {name}": module(name) for name in ("sitecustomize.py", "usercustomize.py", "rjsonnet.py")},
    "a recipe that names a class": names_a_class,
    "a package that declares a plugin": declares_a_plugin,
    **{
        f"a link {name}": linked(name)
        for name in ("votes.jsonl", "owner.json", "train.log", "report.html", "ledger.sqlite", "samples")
    },
    "a second name metrics.jsonl": linked("metrics.jsonl", "second name"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="try only every N-th archive")
    chosen = list(ARCHIVES.items())[:: parser.parse_args().every]
    import_models()
    ran = changed = tracebacks = 0
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary)
        (out / "runs").mkdir()
        base = faults.six_step_recipe(out / "runs", "base")
        assert run_in_fork(lambda: faults.train(base), out / "base.log") == 0, (out / "base.log").read_text()
        # An empty entry of PYTHONPATH names the current folder; the interpreter of the command itself must not have one.
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))),
        }
        for number, (name, attack) in enumerate(chosen):
            archive, outside = out / f"archive-{number}", out / f"outside-{number}"
            (outside / "folder").mkdir(parents=True)
            (outside / "file").write_text("echo\n")
            shutil.copytree(base.folder, archive / "runs" / "base")
            document = json.loads(base.model_dump_json()) | {"out": "runs"}
            (archive / "recipe.json").write_text(json.dumps(document))
            attack(archive, outside)
            before, seen = contents(outside), []
            for command in COMMANDS:
                words = [*RETOUCH, *command]
                done = subprocess.run(
                    words, cwd=archive, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS
                )
                seen.append(f"{command[0]} {done.returncode}")
                tracebacks += "Traceback" in done.stderr
            after = contents(outside)
            ran += "ran" in after
            changed += after != before
            print(f"{'WRONG' if after != before else 'ok':6s} {name:40s} {', '.join(seen)}", flush=True)
            shutil.rmtree(archive)
    print(
        f"\n{len(chosen)} archives, {len(chosen) * len(COMMANDS)} commands: {ran} with code that ran, {changed} with files outside "
        f"that changed, {tracebacks} tracebacks"
    )
    return int(ran + changed + tracebacks > 0)


if __name__ == "__main__":
    sys.exit(main())
