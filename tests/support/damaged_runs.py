"""Damaged and hostile forms of a run's folder, as they may arrive in an archive. Each of ``FORMS`` changes a ``whole_run``."""

import json
import os
import socket
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from retouch.records.folder import RunFolder, SampleRecord, Summary
from retouch.rewards.ledger.database import Database
from retouch.types import Sample, Task
from retouch_judge.cache import AnswerCache, JudgeCall

DOCUMENTS = ("recipe.json", "summary.json", "alarm.json", "preflight.json", "owner.json")
LINES = ("metrics.jsonl", "timings.jsonl", "evals.jsonl", "suites.jsonl", "samples/step-000004/samples.jsonl")
IMAGE = "samples/step-000004/heldout-0000-000.png"
HUGE = "9" * 400
DEEP = "[" * 900 + "]" * 900
CYCLE = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"


def whole_run(root: Path) -> RunFolder:
    """Write a run of four steps with all its records: metrics, evaluations, a benchmark, samples, an alarm, a ledger."""
    folder = RunFolder(root)
    folder.write_recipe({"name": root.name, "steps": 9, "tasks_per_step": 2, "group_size": 3})
    for step in range(1, 5):
        folder.append_metrics(step, "main", {"reward/mean": 0.1 * step, "policy/loss": float("nan")})
        folder.append_timings(step, {"time/step": 2.0, "time/rollout": 1.5})
    table = {"all": {"overall": {"mean": 6.0, "low": 5.0, "high": 7.0, "n": 4}}}
    for step in (0, 4):
        task = Task("task/1", "make it red", images=(Image.new("RGB", (30, 20), "white"),))
        sample = Sample(task, Image.new("RGB", (30, 20), (40 * step, 0, 0)))
        for kind in ("heldout", "group"):
            record = SampleRecord(sample=sample, group=0, slot=0, scores={"share": 0.25 * step}, reward=0.25 * step)
            folder.write_samples(step, kind, [record])  # type: ignore[arg-type]
        folder.write_eval(step, "heldout", table={"all": {"n": 1, "share": 0.25 * step}}, ci95={"all": {"share": [0.0, 1.0]}})
        folder.write_suite(step, "playground", {"headline": "overall", "table": table, "missing": 0}, alarm=None)
        folder.evaluation(step).parent.mkdir(exist_ok=True)
        folder.evaluation(step).write_text(json.dumps({"tasks": ["a"], "rewards": [0.1], "scores": {"share": [0.25 * step]}}))
    folder.write_summary(Summary(column="share", on="held-out tasks", before=0.0, after=1.0, steps=4))
    folder.write_preflight([{"name": "ratio", "ok": True, "value": 0.0, "limit": 1e-6, "text": "the ratio is 1"}])
    folder.write_alarm({"step": 4, "back_to": None, "alarms": [{"rule": "gap", "text": "words", "response": "stop"}]})
    folder.log().write_text("2026-01-01 00:00:00,000  the last line\n")
    database = Database(root / "ledger.sqlite")
    call = JudgeCall(content="a", image="", judge="j", scores={"share": 0.5}, rubric="r", input_tokens=10, output_tokens=1)
    AnswerCache(database).record([call])
    database.close()
    return folder


def _replace(name: str, content: str | bytes, root: Path) -> None:
    path = root / name
    path.unlink(missing_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))


def _edit(name: str, old: str, new: str, root: Path) -> None:
    """Replace each ``old`` of a text file."""
    text = (root / name).read_text()
    assert old in text, (name, old)
    _replace(name, text.replace(old, new), root)


def _append(name: str, line: str | bytes, root: Path) -> None:
    with (root / name).open("ab") as file:
        file.write((line if isinstance(line, bytes) else line.encode()) + b"\n")


def _socket(path: Path) -> None:
    here = os.getcwd()  # the address of a socket has at most 108 bytes
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _folder(path: Path) -> None:
    (path / "inside").mkdir(parents=True)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def _instead(name: str, make: Callable[[Path], None], root: Path) -> None:
    (root / name).unlink(missing_ok=True)
    make(root / name)


def _sql(*given: Any) -> None:
    """Run statements on the ledger of the run whose folder comes last."""
    *statements, root = given
    with closing(sqlite3.connect(root / "ledger.sqlite", isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def _bomb(root: Path) -> None:
    Image.new("1", (30_000, 30_000)).save(root / IMAGE)


def _growing(root: Path) -> None:
    """A line of 100 MB: a file to which another program appends without an end of line."""
    _append("metrics.jsonl", b'{"step": 5, "text": "' + b"x" * 100_000_000 + b'"}', root)


def _nested_folders(root: Path) -> None:
    here = root / "samples"
    for _ in range(300):
        here = here / "step-000001"
    here.mkdir(parents=True)


def _forms() -> Iterator[tuple[str, Callable[[Path], object]]]:
    objects = {"fifo": os.mkfifo, "socket": _socket, "folder": _folder, "endless device": _endless, "link to itself": _loop}
    for name in ("recipe.json", "metrics.jsonl", "alarm.json", "owner.json", "ledger.sqlite", "train.log", IMAGE):
        for kind, make in objects.items():
            yield f"{kind}: {name}", partial(_instead, name, make)
    for name in ("ledger.sqlite-wal", "ledger.sqlite-shm", "control", "samples", "votes.jsonl"):
        yield f"fifo: {name}", partial(_next_to, name)
    values = {"digits": HUGE, "deep": DEEP, "number": "5", "null": "null", "text": '"x"', "list of lists": "[[]]", "NaN": "NaN"}
    for name in DOCUMENTS:
        for kind, value in values.items():
            yield f"{kind}: {name}", partial(_replace, name, value)
    for name in LINES:
        for kind in ("digits", "deep", "list of lists"):
            line = json.dumps({"step": 4, "split": "heldout", "set": "heldout", "suite": "s", "task": "t", "instruction": "i"})
            inside = (
                f'"table": {values[kind]}, "scores": {values[kind]}, "reward/mean": {values[kind]}, "time/step": {values[kind]}'
            )
            yield f"{kind} in a line: {name}", partial(_append, name, f"{line[:-1]}, {inside}}}")
    steps = {
        "negative": "-1", "fraction": "4.5", "text": '"4"', "10**18": "1" + "0" * 18, "10**400": "1" + "0" * 400, "list": "[4]",
    }  # fmt: skip
    for kind, step in steps.items():
        yield f"a step that is {kind}", partial(_append, "metrics.jsonl", f'{{"step": {step}, "reward/mean": 1e999}}')
    yield from _others()


def _next_to(name: str, root: Path) -> None:
    target = root / name
    if target.is_dir():
        target.rename(root / "moved")
    target.unlink(missing_ok=True)
    os.mkfifo(target)


def _others() -> Iterator[tuple[str, Callable[[Path], object]]]:
    yield "alarms that are a number", partial(_replace, "alarm.json", '{"step": 4, "back_to": null, "alarms": 5}')
    yield "alarms that are texts", partial(_replace, "alarm.json", '{"step": [], "alarms": ["a", {"text": {"a": 1}}]}')
    yield "a recipe with 10**400 steps", partial(_edit, "recipe.json", '"steps": 9', f'"steps": 1{"0" * 400}')
    yield "a recipe whose phases are numbers", partial(_edit, "recipe.json", '"steps": 9', '"phases": [5, null, {"steps": 1e300}]')
    yield "a summary of texts", partial(_edit, "summary.json", "1.0", '"<b>"')
    yield "a summary with 400 digits", partial(_edit, "summary.json", '"steps": 4', f'"steps": {HUGE}')
    yield "an owner with 400 digits", partial(_replace, "owner.json", json.dumps({**_OWNER, "pid": 0}).replace("0", HUGE))
    yield "an owner whose process is a path", partial(_replace, "owner.json", json.dumps({**_OWNER, "pid": "../../etc"}))
    yield "an evaluation without a table", partial(_append, "evals.jsonl", '{"step": 5, "split": "heldout"}')
    yield "an evaluation whose rows are texts", partial(_append, "evals.jsonl", '{"step": 5, "split": "x", "table": {"all": "n"}}')
    texts = '{"step": 5, "suite": "s", "table": {"all": {"a": "n"}}}'
    yield "a benchmark whose cells are texts", partial(_append, "suites.jsonl", texts)
    yield "a benchmark with a repeated key", partial(_append, "suites.jsonl", '{"step": 5, "suite": "s", "table": 1, "table": {}}')
    yield "scores that are texts", partial(_edit, LINES[-1], '"share": 1.0', '"share": "a"')
    yield "tags that are numbers", partial(_edit, LINES[-1], '"tags": {}', '"tags": 5')
    yield "an image outside of the run", partial(_edit, LINES[-1], "heldout-0000-000.png", "../../../../../../etc/passwd")
    yield "a line in latin-1", partial(_append, "metrics.jsonl", b'{"step": 5, "phase": "\xe9"}')
    yield "half of a surrogate pair", partial(_append, LINES[-1], json.dumps({**_SAMPLE, "instruction": "\ud800"}))
    yield "a byte order mark", partial(_replace, "recipe.json", '\ufeff{"recipe": {}}')
    name = '"name": "<img onerror=x>\\u202e\\u0000"'
    yield "a name of control characters and HTML", partial(_edit, "recipe.json", '"group_size": 3', name)
    yield "a terabyte of zeros as metrics", partial(_instead, "metrics.jsonl", _sparse)
    yield "a terabyte of zeros as recipe", partial(_instead, "recipe.json", _sparse)
    yield "a terabyte of zeros as ledger", partial(_instead, "ledger.sqlite", _sparse)
    yield "a terabyte of zeros as log", partial(_instead, "train.log", _sparse)
    yield "a line of 100 MB", _growing
    yield "300 folders in each other", _nested_folders
    yield "a step in Arabic digits", lambda root: (root / "samples" / "step-٣").mkdir()
    yield "a step of 400 digits", lambda root: _sample_folder(root, "9" * 200)
    yield "an image of 900 million pixels", _bomb
    yield "an image that is cut off", lambda root: os.truncate(root / IMAGE, 60)
    yield "files of the year 10**6", lambda root: os.utime(root / "metrics.jsonl", (3e13, 3e13))
    for table in ("answers", "samples"):
        endless = f"CREATE VIEW {table} AS {CYCLE} SELECT i AS number, '' AS rubric, 1 AS attempts, 1 AS step FROM n"
        yield f"a ledger whose {table} are an endless view", partial(_sql, f"DROP TABLE {table}", endless)
    index = "CREATE VIRTUAL TABLE answers USING fts5(number, rubric)"
    yield "a ledger whose answers are a search index", partial(_sql, "DROP TABLE answers", index)
    yield "a ledger without tables", partial(_sql, "DROP TABLE answers", "DROP TABLE samples", "DROP TABLE judges")
    words = "UPDATE answers SET attempts = 'many', cost = x'00ff', number = 9223372036854775807"
    yield "a ledger with texts for numbers", partial(_sql, words)
    impossible = "UPDATE answers SET attempts = 9e999, cost = -9e999, input_tokens = 9e300"
    yield "a ledger with impossible numbers", partial(_sql, impossible)
    row = "INSERT INTO samples VALUES ('train', {}, 0, 0, 't', 'p', NULL, 'j', {}, 1, 1)"
    for kind, scores in {"a list": "'[]'", "400 digits": f"'{{\"a\": {HUGE}}}'", "bytes": "x'ff00'", "deep": f"'{DEEP}'"}.items():
        yield f"a ledger whose scores are {kind}", partial(_sql, row.format(3, scores))
    yield "a ledger whose step is a text", partial(_sql, row.format("'x'", "'{}'"))


_OWNER = {"token": "t", "host": "h", "pid": 1, "since": "s", "machine": "m", "began": "b"}
_SAMPLE = {"step": 4, "set": "heldout", "task": "t", "instruction": "i", "group": 0, "slot": 0, "scores": {}, "image": None}
_SAMPLE |= {"source": None, "target": None, "reward": None, "advantage": None, "tags": {}}


def _sample_folder(root: Path, digits: str) -> None:
    (root / "samples" / f"step-{digits}").mkdir()
    (root / "samples" / f"step-{digits}" / "samples.jsonl").touch()


FORMS: dict[str, Callable[[Path], Any]] = dict(_forms())
