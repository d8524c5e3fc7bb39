"""Damage to the folder of an interrupted run, caused by crashes, disks or users, and the outcome of resuming the run.

The base is a run of six steps that was killed after the fifth; it has checkpoints of steps 2 and 4. ``FAULTS`` names every fault.
`measurements/robustness/folders.py` applies each fault to a copy of the folder and runs `retouch train` again. The allowed outcomes
are: results bitwise equal to those of an undisturbed run, the same weights with a warning, or an error that leaves the folder
unchanged. Any other outcome is a bug of Retouch.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kill_places import kill_at, recipe
from retouch.recipe.recipe import Recipe, parse

STEPS = 6
OLDER, NEWEST = "checkpoints/step-000002", "checkpoints/step-000004"
TENSORS = ("weights", "optimizer", "copies", "random")
RECORDS = ("recipe.json", "metrics.jsonl", "timings.jsonl", "evals.jsonl", "evals/step-000000.json", "evals/baselines.json")
OTHER_FILES = (
    "preflight.json", "report.html", "ledger.sqlite", "saved.json", "owner.json", "train.log", "samples/step-000002/samples.jsonl",
)  # fmt: skip
CHECKPOINT_FILES = tuple(
    f"{step}/{name}"
    for step in (OLDER, NEWEST)
    for name in ("manifest.json", "state.json", *(f"{each}.safetensors" for each in TENSORS))
)


def six_step_recipe(out: Path, name: str) -> Recipe:
    """Return the recipe of six steps that all runs of this module use."""
    document = recipe(out, name, None).document()
    document |= {"steps": STEPS, "checkpoints": document["checkpoints"] | {"every": 2, "keep": 2}}
    return parse(document)


def train(made: Recipe) -> int:
    """Run `retouch train` in this process and return its exit status."""
    from retouch import cli

    file = made.folder.with_name(f"{made.name}.recipe.json")
    file.write_text(made.model_dump_json())
    return cli.main(["train", str(file)])


def train_until_killed(made: Recipe) -> None:
    kill_at("retouch.run.recorder:Recorder.step", 5, "after")
    train(made)


def delete(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: max(1, path.stat().st_size // 2)])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 0xFF
    path.write_bytes(bytes(content))


def fill(path: Path) -> None:
    path.write_bytes(os.urandom(4096))


def turn_into_a_folder(path: Path) -> None:
    path.unlink()
    (path / "inside").mkdir(parents=True)


def write_nested_lists(path: Path) -> None:
    path.write_text("[" * 100_000 + "]" * 100_000)


def write(name: str, text: str, folder: Path) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def lines_of(change: Callable[[list[str]], list[str]], folder: Path) -> None:
    """Apply ``change`` to the lines of metrics.jsonl."""
    path = folder / "metrics.jsonl"
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))


def with_other_reward(line: str) -> str:
    return json.dumps(json.loads(line) | {"reward/mean": 123.0}) + "\n"


def manifest_of(checkpoint: str, change: Callable[[dict[str, Any]], object], folder: Path) -> None:
    path = folder / checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def replace_and_rehash(name: str, content: bytes, folder: Path) -> None:
    """Replace a file of the newest checkpoint and its entry in the manifest, so that its hash is valid."""
    (folder / NEWEST / name).write_bytes(content)
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest_of(NEWEST, lambda manifest: manifest["files"].update({name: entry}), folder)


def without(groups: tuple[str, ...], folder: Path) -> None:
    """Delete groups of tensors from the newest checkpoint and from its manifest."""
    for group in groups:
        (folder / NEWEST / f"{group}.safetensors").unlink()
    manifest_of(NEWEST, lambda manifest: [manifest["files"].pop(f"{group}.safetensors") for group in groups], folder)


def rename(old: str, new: str, folder: Path) -> None:
    (folder / old).rename(folder / new)


def link_to_itself(name: str, folder: Path) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).symlink_to(folder / name)


def _apply_to(name: str, change: Callable[[Path], None], folder: Path) -> None:
    change(folder / name)


def _faults() -> Iterator[tuple[str, Callable[[Path], None]]]:
    for change in (delete, empty, cut, flip, fill, turn_into_a_folder):
        for name in (*RECORDS, *OTHER_FILES):
            if change is not turn_into_a_folder or name != "train.log":
                yield f"{change.__name__.replace('_', ' ')}: {name}", partial(_apply_to, name, change)
    for change in (delete, empty, flip):
        for name in CHECKPOINT_FILES:
            yield f"{change.__name__}: {name}", partial(_apply_to, name, change)
    in_checkpoint = (f"{NEWEST}/manifest.json", f"{NEWEST}/state.json")
    for name in ("recipe.json", "evals/step-000000.json", "saved.json", "owner.json", *in_checkpoint):
        yield f"nested 100 000 deep: {name}", partial(_apply_to, name, write_nested_lists)
    for name in ("recipe.json", "saved.json", "owner.json", "evals/step-000000.json", f"{NEWEST}/manifest.json"):
        for text in ("{}", "[]", "null", '{"step": "x"}'):
            yield f"{text}: {name}", partial(write, name, text)
    yield "no checkpoints", partial(_apply_to, "checkpoints", delete)
    yield "no newest checkpoint", partial(_apply_to, NEWEST, delete)
    yield "no older checkpoint", partial(_apply_to, OLDER, delete)
    yield "no samples", partial(_apply_to, "samples", delete)
    yield "no evaluations", partial(_apply_to, "evals", delete)
    yield "every line of the metrics twice", partial(lines_of, lambda lines: [line for line in lines for _ in range(2)])
    yield "a line of the metrics contradicts", partial(lines_of, lambda lines: [with_other_reward(lines[1]), *lines])
    yield "a line of the metrics is missing", partial(lines_of, lambda lines: [lines[0], *lines[2:]])
    yield "the metrics are in reverse", partial(lines_of, lambda lines: lines[::-1])
    yield "a foreign line in the metrics", partial(lines_of, lambda lines: [lines[0], "who am I?\n", *lines[1:]])
    yield "a line without a step in the metrics", partial(lines_of, lambda lines: ["{}\n", *lines])
    yield "half a last line in the metrics", partial(lines_of, lambda lines: [*lines[:-1], lines[-1][:9]])
    yield "a stale temporary checkpoint", partial(write, "checkpoints/.tmp-step-000006/weights.safetensors", "half")
    yield "a stale temporary file", partial(write, "checkpoints/.tmp-step-000006", "half")
    yield "a stale temporary link", partial(link_to_itself, "checkpoints/.tmp-old-step-000002")
    yield "a stale temporary record", partial(write, ".tmp-0123456789abcdef", "half")
    yield "a checkpoint that is a file", partial(write, "checkpoints/step-000005", "not a folder")
    yield "an empty checkpoint", lambda folder: (folder / "checkpoints/step-000005").mkdir()
    yield "a checkpoint under another step's name", partial(rename, NEWEST, "checkpoints/step-000005")
    yield "a link to itself as a checkpoint", partial(link_to_itself, "checkpoints/step-000005")
    yield "a folder of samples with a strange name", lambda folder: (folder / "samples/step-of-mine").mkdir()
    yield "a file as the samples of a later step", partial(write, "samples/step-000005", "not a folder")
    yield "a checkpoint without weights", partial(without, ("weights",))
    yield "a checkpoint without an optimizer", partial(without, ("optimizer",))
    yield "a checkpoint without any tensors", partial(without, TENSORS)
    yield "weights that are no safetensors", partial(replace_and_rehash, "weights.safetensors", b"not a tensor in sight")
    yield "a state that is a list", partial(replace_and_rehash, "state.json", b"[]")
    yield "a state of another step", partial(replace_and_rehash, "state.json", b'{"step": 3, "numbers": {}}')
    outside = {"../../recipe.json": {"bytes": 1, "sha256": "0"}}
    yield "a manifest that names a file elsewhere", partial(manifest_of, NEWEST, lambda found: found["files"].update(outside))
    yield "a manifest of another format", partial(manifest_of, NEWEST, lambda manifest: manifest.update(format=99))
    yield "a ledger of another version", partial(_another_ledger)


def _another_ledger(folder: Path) -> None:
    import sqlite3
    from contextlib import closing

    with closing(sqlite3.connect(folder / "ledger.sqlite")) as ledger:
        ledger.execute("PRAGMA user_version = 77")


FAULTS = dict(_faults())
# A resumed run cannot restore some records; then it must print a warning that contains one of these words.
WARNED = re.compile(r"missing|lost|removed|twice|contradicted|not in order|skipping a checkpoint|trained again|no summary|is gone")


@dataclass(frozen=True)
class Outcome:
    """``kind``: "same bits", "same weights, said", "refused", or "WRONG". ``text``: the printed warning or error, or the reason."""

    fault: str
    kind: str
    text: str


def file_hashes(folder: Path, names: tuple[str, ...]) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() if (folder / name).is_file() else "" for name in names}


WEIGHTS = tuple(f"checkpoints/step-{STEPS:06d}/{group}.safetensors" for group in TENSORS)
ALL = (*WEIGHTS, "metrics.jsonl", "evals.jsonl", "evals/step-000000.json", f"evals/step-{STEPS:06d}.json", "evals/baselines.json")


def contents(folder: Path) -> dict[str, str]:
    """Hash the files that an error must not change: all but the log, the recipe, the owner, the ledger and temporary files."""
    ignored = {"train.log", "owner.json", "recipe.json"}
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ignored and not path.name.startswith("ledger.sqlite") and ".tmp-" not in str(path)
    }


def judge_outcome(fault: str, code: int, printed: str, *, before: dict[str, str], folder: Path, whole: Path) -> Outcome:
    """Classify the outcome of a fault. ``before``: the folder's contents before the run was started again."""
    last = printed.strip().splitlines()[-1] if printed.strip() else ""
    if "Traceback" in printed:
        return Outcome(fault, "WRONG", f"a traceback: {last}")
    if code == 2:
        unchanged = contents(folder) == before or file_hashes(folder, WEIGHTS) == file_hashes(whole, WEIGHTS)
        return Outcome(fault, "refused" if unchanged and "retouch train: " in printed else "WRONG", last)
    if code != 0:
        return Outcome(fault, "WRONG", f"exit code {code}: {last}")
    if file_hashes(folder, WEIGHTS) != file_hashes(whole, WEIGHTS):
        return Outcome(fault, "WRONG", "other weights")
    if file_hashes(folder, ALL) == file_hashes(whole, ALL):
        return Outcome(fault, "same bits", "")
    warning = next((line for line in printed.splitlines() if WARNED.search(line)), None)
    return Outcome(fault, "WRONG" if warning is None else "same weights, said", warning or "records were lost without a warning")
