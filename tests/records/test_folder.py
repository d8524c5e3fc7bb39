"""A run folder returns exactly the values that were written, and stays readable if writing is killed at any byte."""

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from retouch.records import files
from retouch.records.folder import RunFolder, SampleRecord, Summary, keep_until
from retouch.records.libraries import versions
from retouch.types import Sample, Task

NAMES = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)


def picture(colour):
    return Image.new("RGB", (8, 8), colour)


def judged(group, slot, *, colour=(9, 9, 9), source=(1, 2, 3)):
    task = Task(
        id=f"a/b/../{group}", instruction="make it <b>red</b>\n", images=(picture(source),), target=picture((7, 7, 7)),
        tags={"kind": "recolour"},
    )  # fmt: skip
    return SampleRecord(
        sample=Sample(task, picture(colour)), group=group, slot=slot, scores={"overall": 5.0, "ocr": math.nan}, reward=5.0
    )


def test_metrics_are_stored_bitwise_in_a_fixed_key_order_and_without_times(tmp_path):
    folder = RunFolder(tmp_path)
    folder.append_metrics(1, "rl", {"reward/mean": 0.1 + 0.2, "policy/grad_norm": 1e-300, "b": 3})
    folder.append_metrics(2, "rl", {"b": 3, "policy/grad_norm": math.nan, "reward/mean": math.inf})
    with pytest.raises(ValueError, match="append_timings"):
        folder.append_metrics(3, "rl", {"time/rollout": 1.0})
    assert folder.metrics.read_text() == (
        '{"step": 1, "phase": "rl", "b": 3, "policy/grad_norm": 1e-300, "reward/mean": 0.30000000000000004}\n'
        '{"step": 2, "phase": "rl", "b": 3, "policy/grad_norm": null, "reward/mean": null}\n'
    )
    assert folder.read_metrics()[0]["reward/mean"] == 0.1 + 0.2


@given(st.dictionaries(NAMES, st.floats() | st.integers() | st.none()))
def test_json_lines_round_trip_with_null_for_non_finite_values(values):
    back = json.loads(files.json_line(values), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert back == {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }


def test_unusual_unicode_text_round_trips(tmp_path):
    text = "天 half \ud83d, \u2028 \x00 \x1b \\ud83d"
    files.append_line(tmp_path / "lines", {"text": text})
    files.write_json(tmp_path / "whole", {"text": text})
    assert [line["text"] for line in files.read_lines(tmp_path / "lines")] == [text]
    assert files.read_json(tmp_path / "whole") == {"text": text}
    assert "天".encode() in (tmp_path / "lines").read_bytes()


def test_a_file_cut_at_any_byte_is_read_to_its_last_complete_line_and_continued(tmp_path):
    folder = RunFolder(tmp_path)
    for step in (1, 2, 3):
        folder.append_metrics(step, "rl", {"reward/mean": step / 3, "word": None})
    content = folder.metrics.read_bytes()
    ends = [match.end() for match in re.finditer(rb"\n", content)]
    for cut in range(len(content) + 1):
        folder.metrics.write_bytes(content[:cut])
        whole = sum(end <= cut for end in ends)
        assert [line["step"] for line in folder.read_metrics()] == [1, 2, 3][:whole]
        folder.truncate_after(2)
        for step in range(min(whole, 2) + 1, 4):
            folder.append_metrics(step, "rl", {"reward/mean": step / 3, "word": None})
        assert folder.metrics.read_bytes() == content


def test_truncate_removes_later_steps_from_all_files_and_keeps_earlier_ones(tmp_path):
    folder = RunFolder(tmp_path)
    for step in range(5):
        folder.append_metrics(step, "rl", {"reward/mean": 1.0})
        folder.append_timings(step, {"time/rollout": 0.5})
        folder.write_eval(step, "heldout", table={"all": {"overall": 1.0, "n": 3}}, ci95={})
        folder.write_samples(step, "heldout", [judged(0, 0)])
    folder.truncate_after(2)
    assert [line["step"] for line in folder.read_metrics()] == [0, 1, 2]
    assert [line["step"] for line in folder.read_timings()] == [0, 1, 2]
    assert [line["step"] for line in folder.read_evals()] == [0, 1, 2]
    assert folder.sample_steps() == [0, 1, 2]
    assert not folder.samples(3).exists()


def test_a_complete_line_that_is_not_a_json_object_raises(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"step": 1}\n{"step": \n[3]\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        folder.read_metrics()
    folder.metrics.write_text("[3]\n")
    with pytest.raises(ValueError, match="expected an object, found list"):
        folder.read_metrics()


def test_an_evaluation_made_again_replaces_the_first(tmp_path):
    folder = RunFolder(tmp_path)
    for value in (1.0, 2.0):
        folder.write_eval(0, "heldout", table={"all": {"overall": value, "n": 3}}, ci95={"all": {"overall": (value - 1, math.nan)}})
    folder.write_eval(0, "train", table={"all": {"overall": 9.0, "n": 3}}, ci95={})
    assert folder.read_evals() == [
        {"step": 0, "split": "heldout", "table": {"all": {"overall": 2.0, "n": 3}}, "ci95": {"all": {"overall": [1.0, None]}}},
        {"step": 0, "split": "train", "table": {"all": {"overall": 9.0, "n": 3}}, "ci95": {}},
    ]


def test_samples_are_stored_with_exact_pixels_and_scores_and_replace_those_of_the_same_set(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_samples(4, "group", [judged(2, 0, colour=(5, 6, 7)), judged(2, 1, colour=(8, 9, 10))])
    first, second = folder.read_samples(4)
    assert (first["group"], first["slot"], first["reward"], first["advantage"]) == (2, 0, 5.0, None)
    assert (first["task"], first["instruction"], first["tags"]) == ("a/b/../2", "make it <b>red</b>\n", {"kind": "recolour"})
    assert first["scores"] == {"overall": 5.0, "ocr": None}
    assert first["source"] == second["source"]

    def pixel(name):
        return Image.open(folder.samples(4) / name).getpixel((3, 3))

    assert [pixel(name) for name in (first["image"], second["image"], first["source"])] == [(5, 6, 7), (8, 9, 10), (1, 2, 3)]
    assert all(path.parent == folder.samples(4) for path in tmp_path.rglob("*.png"))
    folder.write_samples(4, "heldout", [judged(0, 0)])
    folder.write_samples(4, "group", [judged(0, 3, source=(50, 50, 50))])
    heldout, again = sorted(folder.read_samples(4), key=lambda line: line["slot"])
    assert [(line["set"], line["slot"]) for line in (heldout, again)] == [("heldout", 0), ("group", 3)]
    assert [pixel(line["source"]) for line in (heldout, again)] == [(1, 2, 3), (50, 50, 50)]


def test_the_recipe_is_stored_with_library_versions(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.write_recipe({"name": "run", "seed": 3})
    kept = folder.read_recipe()
    assert kept["recipe"] == {"name": "run", "seed": 3}
    assert {"python", "retouch", "torch", "diffusers", "transformers", "peft", "platform"} <= set(kept["versions"])
    assert folder.checkpoints.is_dir()
    with pytest.raises(ValueError, match=r"has no recipe\.json"):
        RunFolder(tmp_path).read_recipe()


def test_the_recorded_commit_is_that_of_the_current_directory(tmp_path, monkeypatch):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(tmp_path / "runs" / "a")
    folder.write_recipe({})
    assert "git" not in folder.read_recipe()["versions"]
    (tmp_path / "file").write_text("1")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True, capture_output=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    folder.write_recipe({})
    assert folder.read_recipe()["versions"]["git"] == head
    subprocess.run([*git, "pack-refs", "--all"], check=True)
    assert versions(tmp_path)["git"] == head
    subprocess.run([*git, "worktree", "add", "-q", "-b", "feature/two", str(tmp_path / "other")], check=True, capture_output=True)
    assert versions(tmp_path / "other")["git"] == head
    subprocess.run([*git, "checkout", "-q", "--detach"], check=True)
    assert versions(tmp_path)["git"] == head


@pytest.mark.parametrize("head", ["ref: refs/../../secret", "ref: /secret", "ref: ../secret", "secret", "ref: refs/heads/pipe", ""])
def test_point_3_1_a_hostile_git_folder_reveals_nothing_and_is_not_waited_for(head, tmp_path):
    (tmp_path / ".git" / "refs" / "heads").mkdir(parents=True)
    (tmp_path / "secret").write_text("a password")
    os.mkfifo(tmp_path / ".git" / "refs" / "heads" / "pipe")
    (tmp_path / ".git" / "HEAD").write_text(head)
    assert "git" not in versions(tmp_path)


@pytest.mark.parametrize("buried", [False, True])
def test_point_3_1_no_program_that_a_git_folder_names_is_run(buried, tmp_path):
    place = tmp_path / "clone" / "data"
    place.mkdir(parents=True)
    (place / "file").write_text("1")
    (place / ".gitattributes").write_text("* filter=x\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(place)]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True, capture_output=True)
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    with (place / ".git" / "config").open("a") as config:
        config.write(f'[core]\n\tfsmonitor = {program}\n\tworktree = {place}\n[filter "x"]\n\tclean = {program}\n')
    (place / "file").write_text("2")
    if buried:  # a bare repository, which a clone can contain as ordinary files
        for path in (place / ".git").iterdir():
            path.rename(place / path.name)
        (place / ".git").rmdir()
    assert ("git" in versions(place)) is not buried
    assert not (tmp_path / "ran").exists()


def test_the_summary_contains_the_share_of_the_gap_that_was_closed(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.read_summary() is None
    summary = Summary(
        column="overall", on="held-out tasks", before=8.0, after=8.5, steps=9, ceiling=9.0, gain_ci95=(0.4, 0.6),
        cost={"minutes": 4.5},
    )  # fmt: skip
    folder.write_summary(summary)
    assert folder.read_summary() == summary
    kept = json.loads(folder.summary.read_text())
    assert (kept["gain"], kept["gap_closed"]) == (0.5, 0.5)
    assert Summary(column="c", on="o", before=9.0, after=9.5, steps=1, ceiling=9.0).gap_closed is None
    lower = dataclasses.replace(summary, before=2.0, after=1.5, ceiling=1.0, gain_ci95=None, lower_is_better=True)
    folder.write_summary(lower)
    assert folder.read_summary() == lower
    assert lower.gap_closed == 0.5
    assert dataclasses.replace(lower, ceiling=3.0).gap_closed is None
    folder.summary.write_text('{"befor": 1}')
    with pytest.raises(ValueError, match=r"missing \['column', 'on', 'before', 'after', 'steps'\], unknown \['befor'\]"):
        folder.read_summary()


def test_set_aside_never_writes_over_an_earlier_one(tmp_path):
    places = []
    for count in range(3):
        folder = RunFolder(tmp_path / "run")
        folder.write_recipe({"count": count})
        places.append(folder.set_aside())
        assert not folder.root.exists()
    assert len(set(places)) == 3
    assert re.fullmatch(r"run\.old-\d{8}-\d{6}", places[0].name)
    assert [RunFolder(place).read_recipe()["recipe"]["count"] for place in places] == [0, 1, 2]


WRITER = """
import sys
from pathlib import Path
from retouch.records import files
folder, big = Path(sys.argv[1]), ["x" * 1000] * 500
for count in range(10**9):
    files.write_json(folder / "whole.json", {"count": count, "big": big, "again": count})
    files.append_line(folder / "lines.jsonl", {"step": count})
    print("ready", flush=True) if count == 0 else None
"""


def test_kill_9_leaves_whole_files(tmp_path):
    for attempt in range(4):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as writer:
            writer.stdout.readline()
            time.sleep(0.02 + 0.017 * attempt)
            os.kill(writer.pid, signal.SIGKILL)
        kept = files.read_json(tmp_path / "whole.json")
        assert kept["count"] == kept["again"]
        assert len(kept["big"]) == 500
        keep_until(tmp_path / "lines.jsonl", 10**9)
        assert all("step" in line for line in files.read_lines(tmp_path / "lines.jsonl"))
