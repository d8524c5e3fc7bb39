"""Replaces parts of a run's folder by links out of it, pipes and second names, and then reads the run and continues it.

    python measurements/robustness/links.py [--every N]

There are 60 cases: 30 parts of the folder, for readers (the report, the page of `retouch view`, `retouch export`) and for writers
(`retouch train`, a vote, a request). Nothing outside may be read into a page or changed, nothing may wait, and no traceback may be
printed. Only a second name (a hard link) may be read. The exit code is 1 if a case is wrong.
"""

import argparse
import hashlib
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1] / "tests" / "support"))
import folder_faults as faults  # noqa: E402
from kill_places import import_models, run_in_fork  # noqa: E402

MARK = "outside-of-the-run"
LINE = f'{{"step": 1, "phase": "{MARK}", "reward/mean": 1.0}}\n'
SECONDS = 120
FILES = (
    *(
        "recipe.json",
        "metrics.jsonl",
        "timings.jsonl",
        "evals.jsonl",
        "suites.jsonl",
        "summary.json",
        "preflight.json",
        "alarm.json",
    ),
    *("saved.json", "owner.json", "train.log", "report.html", "votes.jsonl", "ledger.sqlite", "ledger.sqlite-wal"),
    *("ledger.sqlite-journal", "evals/step-000000.json", "evals/baselines.json", "samples/step-000002/samples.jsonl"),
    *("checkpoints/step-000004/manifest.json", "checkpoints/step-000004/weights.safetensors"),
)
FOLDERS = (
    *("samples", "samples/step-000002", "evals", "checkpoints", "checkpoints/step-000004"),
    *("control", "tensorboard", "watch", "queue"),
)
KINDS = ("link", "pipe", "second name")


def place(run: Path, name: str, kind: str, outside: Path) -> None:
    """Put a link (to a file or folder outside), a pipe, or a second name of a file outside, in place of a part of the run."""
    path = run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    is_folder = name in FOLDERS
    if path.is_dir():
        shutil.copytree(path, outside / "folder", dirs_exist_ok=True)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if kind == "link" or is_folder:
        path.symlink_to(outside / ("folder" if is_folder else "file"))
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.hardlink_to(outside / "file")


def read(run: Path) -> str:
    """Read the run as the commands that read do; return everything that they show."""
    from retouch import cli
    from retouch_view.live.runs import Catalogue

    shown = []
    with suppress(OSError, ValueError):
        found = Catalogue(run.parent)
        for each in found.runs().values():
            shown += [repr(each.overview()), repr(each.details()), repr(each.samples())]
    for words in (["report", str(run)], ["export", str(run), "--to", str(run.with_name(f"{run.name}-export"))]):
        cli.main(words)
    page = run / "report.html"
    return "".join(shown) + (page.read_text() if page.is_file() and not page.is_symlink() else "")


def write(run: Path, recipe: Path) -> str:
    """Continue the run, vote on it, and send it a request."""
    from retouch import cli
    from retouch.records.control import make_request
    from retouch.records.folder import RunFolder
    from retouch_view.votes.log import VoteLog

    for action in (lambda: VoteLog(run).undo("x", voter="me"), lambda: make_request(RunFolder(run), "stop", via="links")):
        with suppress(OSError, ValueError):
            action()
    cli.main(["train", str(recipe)])
    return ""


def contents(folder: Path) -> dict[str, str]:
    """The hash of each file below the folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


def attempt(action: Callable[[], str], shown: Path) -> int:
    signal.alarm(SECONDS)
    shown.write_text(action())
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="try only every N-th case")
    every = parser.parse_args().every
    cases = [
        (name, KINDS[number % len(KINDS)], action)
        for action in ("read", "write")
        for number, name in enumerate((*FILES, *FOLDERS), start=action == "write")
    ][::every]
    import_models()
    counted: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary)
        base = faults.six_step_recipe(out, "base")
        assert run_in_fork(lambda: faults.train_until_killed(base), out / "base.log") == -9, (out / "base.log").read_text()
        for number, (name, kind, action) in enumerate(cases):
            made, outside = faults.six_step_recipe(out / f"case-{number}", "run"), out / f"outside-{number}"
            (outside / "folder").mkdir(parents=True)
            (outside / "file").write_text(LINE)
            shutil.copytree(base.folder, made.folder)
            (made.folder / "recipe.json").write_text(made.folder.joinpath("recipe.json").read_text().replace('"base"', '"run"'))
            recipe = out / f"case-{number}.json"
            recipe.write_text(made.model_dump_json())
            place(made.folder, name, kind, outside)
            before, log, shown = contents(outside), out / f"case-{number}.log", out / f"shown-{number}"
            folder = made.folder
            act = partial(read, folder) if action == "read" else partial(write, folder, recipe)
            code = run_in_fork(lambda act=act, shown=shown: attempt(act, shown), log)
            printed = log.read_text()
            wrong = [
                what
                for what, found in (
                    ("changed something outside", contents(outside) != before),
                    (
                        "showed what is outside",
                        kind != "second name" and MARK in printed + (shown.read_text() if shown.exists() else ""),
                    ),
                    ("waited", code == -signal.SIGALRM),
                    ("traceback", "Traceback" in printed or code != 0),
                )
                if found
            ]
            counted["WRONG" if wrong else "refused" if "a run's folder" in printed else "unharmed"] += 1
            last = printed.strip().splitlines()[-1:] if wrong else []
            print(f"{action:6s} {kind:12s} {name:45s} {', '.join(wrong) or 'ok'} {' '.join(last)[:150]}", flush=True)
            shutil.rmtree(out / f"case-{number}")
    print(f"\n{sum(counted.values())} links: " + ", ".join(f"{count} {kind}" for kind, count in counted.most_common()))
    return int(counted["WRONG"] > 0)


if __name__ == "__main__":
    sys.exit(main())
