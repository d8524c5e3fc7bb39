"""Ladders of a user: valid files are read, and invalid ones raise with file and line."""

import json

import numpy as np
import pytest
from PIL import Image

import retouch
from biased_judge import BiasedJudge
from retouch_judge.audit_ladders import read_ladders

GOOD = {
    "id": "barn",
    "instruction": "paint the barn red",
    "source": "source.png",
    "target": "best.png",
    "rungs": [
        {"image": "best.png", "truth": 5, "name": "right"},
        {"image": "half.png", "truth": 3},
        {"image": "bad.png", "truth": 1.5},
    ],
}


@pytest.fixture
def folder(tmp_path):
    source = np.random.default_rng(0).integers(0, 200, (48, 64, 3), dtype=np.uint8)
    for name, share in (("source", 0.0), ("bad", 0.1), ("half", 0.5), ("best", 1.0)):
        made = source.copy()
        made[:, : round(64 * share), 0] = 255
        Image.fromarray(made).save(tmp_path / f"{name}.png")
    return tmp_path


def write(folder, *rows):
    (folder / "ladder.jsonl").write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")


def test_a_ladder_is_read_with_all_probes(folder):
    write(folder, GOOD, "", {**GOOD, "id": "", "target": None})
    first, second = read_ladders(folder)
    assert (first.id, second.id) == ("barn", "3")
    assert [(rung.name, rung.truth) for rung in first.rungs] == [("right", 5.0), ("truth 3", 3.0), ("truth 1.5", 1.5)]
    assert first.base == "truth 3"
    names = {probe.name for probe in first.probes}
    assert {"swapped", "unedited", "brighter", "darker", "smaller", "praise", "other text", "long instruction"} < names
    swapped = next(probe.sample for probe in first.probes if probe.name == "swapped")
    assert swapped.image is first.rungs[0].sample.task.images[0]
    assert swapped.task.images[0] is first.rungs[0].sample.image
    sizes = {probe.name: probe.sample.image.size for probe in first.probes}
    assert sizes["smaller"] == (32, 24)
    assert sizes["blur of the best"] == sizes["brighter"] == (64, 48)


def test_an_audit_runs_on_the_users_ladders(folder):
    write(folder, *({**GOOD, "id": str(number)} for number in range(5)))
    result = retouch.judge_audit(BiasedJudge(), ladder=folder, out=folder / "audit")
    assert result.items == 5
    assert [rung.name for rung in result.rungs] == ["right", "truth 3", "truth 1.5"]
    assert {line.name: line.status for line in result.lines}["order of the rungs"] == "pass"
    write(folder, {**GOOD, "source": None})
    (item,) = read_ladders(folder)
    assert not {"swapped", "unedited"} & {probe.name for probe in item.probes}


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("{", "line 1: not JSON"),
        ("[1]", "line 1: should be a JSON object, not list"),
        ({**GOOD, "instruction": ""}, "instruction: .*at least 1"),
        ({**GOOD, "rungs": GOOD["rungs"][:1]}, "rungs: .*at least 2"),
        ({**GOOD, "rungs": [{"image": "best.png"}] * 2}, "rungs.0.truth: missing"),
        ({**GOOD, "rungs": [{"image": "best.png", "truth": "high"}] * 2}, "rungs.0.truth"),
        (
            {**GOOD, "rungs": [{"image": "best.png", "truth": 1}, {"image": "bad.png", "truth": 1}]},
            "at least two images with different values of truth",
        ),
        ('{"instruction": "x", "rungs": [{"image": "bad.png", "truth": NaN}]}', "NaN is not a JSON number"),
        ({**GOOD, "rungs": [{**rung, "name": "one"} for rung in GOOD["rungs"]]}, "two have the name 'one'"),
        ({**GOOD, "sources": "x"}, "sources: unknown key; did you mean source"),
        ({**GOOD, "source": "gone.png"}, "gone.png: no such file in"),
        ({**GOOD, "source": "../x.png"}, "outside the folder"),
        ({**GOOD, "source": "ladder.jsonl"}, "ladder.jsonl"),
        ({**GOOD, "source": 3}, "source"),
    ],
)
def test_invalid_rows_raise_with_file_and_line(folder, row, told):
    write(folder, row)
    with pytest.raises(ValueError, match=f"(?s)ladder.jsonl line 1: .*{told.removeprefix('line 1: ')}"):
        read_ladders(folder)


def test_all_invalid_lines_are_reported_together_and_empty_files_raise(folder):
    write(folder, GOOD, GOOD, {**GOOD, "id": "c", "source": "gone.png"}, "{")
    with pytest.raises(ValueError, match="line 2: an earlier line has the same id 'barn'") as error:
        read_ladders(folder)
    assert [line.partition(": ")[0] for line in str(error.value).splitlines()] == [
        f"ladder.jsonl line {number}" for number in (2, 3, 4)
    ]
    for nothing in ("", "\ufeff", "\u3000\n"):
        write(folder, nothing)
        with pytest.raises(ValueError, match="has no items; write one JSON object"):
            read_ladders(folder)
    (folder / "ladder.jsonl").write_bytes('{"instruction": "Türen rot"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"ladder\.jsonl line 1: not UTF-8 at byte 18 of the line; save the file as UTF-8"):
        read_ladders(folder)
