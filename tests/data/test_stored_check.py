"""The result of a check is stored next to the data set: what is decoded again, which changes are detected, and which stored
results are ignored."""

import json
import logging
import os
import signal

import datasets
import pytest
from PIL import Image

from retouch.data import checks
from retouch.data.base import DataContext
from retouch.data.checks import accept_rows, examine, examine_all
from retouch.data.images import EncodedImage
from retouch.data.kinds import check
from retouch.data.rows import Row, RowRequirements
from retouch.data.sources.folder import FolderData, read_folder
from retouch.data.sources.hub import TableData
from retouch.recipe.recipe import load
from retouch.run.build import build_sets


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A user's cache folder for this test only."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "retouch" / "checks"


@pytest.fixture
def decoded(monkeypatch):
    """The names of the images that are decoded in this process."""
    names = []
    whole = checks.read_header

    def read_header(image, **keys):
        names.append(image.name)
        return whole(image, **keys)

    monkeypatch.setattr(checks, "read_header", read_header)
    return names


def photos(folder, count=4, **more):
    folder.mkdir(exist_ok=True)
    for number in range(count):
        Image.effect_noise((16, 12), 50).convert("RGB").save(folder / f"{number}.png")
    lines = [{"file_name": f"{number}.png", "instruction": f"edit {number}", **more} for number in range(count)]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def damage(path, *, hidden=False):
    """Cut off the end of a file; ``hidden``: keep its size and time."""
    before = path.stat()
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + b"\0" * (len(data) - len(data) // 2 if hidden else 0))
    if hidden:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    else:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))


def kept_files(folder):
    return sorted(path.name for path in (folder / ".retouch").glob("*.json"))


def test_only_changed_files_are_decoded_again(tmp_path, decoded, caplog):
    folder = photos(tmp_path / "photos")
    first = accept_rows(read_folder(folder), on_bad_row="refuse")
    assert sorted(decoded) == ["0.png", "1.png", "2.png", "3.png"]
    decoded.clear()
    assert accept_rows(read_folder(folder), on_bad_row="refuse") == first
    assert check(folder) == decoded == []
    assert len(kept_files(folder)) == 1
    damage(folder / "2.png")
    with caplog.at_level(logging.INFO, logger="retouch"):
        (problem,) = check(folder)
    assert (problem.line, problem.severity) == (3, "error")
    assert "2.png: truncated or damaged" in problem.what
    assert decoded == ["2.png"]
    assert "rows whose image files have changed are checked again: 1" in caplog.text
    with pytest.raises(ValueError, match="1 of 4 rows cannot be used"):
        accept_rows(read_folder(folder), on_bad_row="refuse")
    Image.new("RGB", (8, 6)).save(folder / "2.png")
    assert check(folder) == []


def test_the_existence_of_files_is_tested_again_at_every_check(tmp_path):
    folder = photos(tmp_path / "photos")
    (folder / "1.png").rename(tmp_path / "1.png")
    assert ["no such file" in problem.what for problem in check(folder)] == [True]
    assert ["no such file" in problem.what for problem in check(folder)] == [True]
    (tmp_path / "1.png").rename(folder / "1.png")
    assert check(folder) == []
    (folder / "1.png").unlink()
    assert ["no such file" in problem.what for problem in check(folder)] == [True]


def test_changed_metadata_or_limits_invalidate_the_stored_result(tmp_path, decoded):
    folder = photos(tmp_path / "photos")
    check(folder)
    decoded.clear()
    with (folder / "metadata.jsonl").open("a") as file:
        file.write('{"file_name": "0.png", "instruction": "again", "id": "photos/1"}\n')
    (problem,) = check(folder)
    assert "the id 'photos/1' is taken by" in problem.what
    assert len(decoded) == 5
    assert check(folder) == [problem]  # the problem of the repeated id is stored too
    assert len(decoded) == 5
    assert check(folder, max_pixels=40) != [problem]  # a stored result is for one limit
    (folder / "metadata.jsonl").write_text(
        (folder / "metadata.jsonl").read_text().partition('{"file_name": "0.png", "instruction": "again"')[0]
    )
    check(folder)
    decoded.clear()
    required = RowRequirements(images=(1, 1), mask=True, model="flux-fill", takes="one image and a mask")
    with pytest.raises(ValueError, match="4 of 4 rows cannot be used") as refused:
        accept_rows(read_folder(folder), on_bad_row="refuse", required=required)
    assert "flux-fill takes one image and a mask, and this row has no mask" in str(refused.value)
    assert decoded == []


def test_a_moved_data_set_keeps_its_stored_check_and_reports_the_new_path(tmp_path, decoded):
    folder = photos(tmp_path / "photos")
    damage(folder / "0.png")
    assert str(tmp_path / "photos") in str(check(folder)[0])
    decoded.clear()
    (tmp_path / "other").mkdir()
    folder = folder.rename(tmp_path / "other" / "photos")
    (problem,) = check(folder)
    assert problem.file == str(folder / "metadata.jsonl")
    assert decoded == []


def test_the_check_of_a_read_only_folder_is_stored_in_the_users_cache(tmp_path, cache, decoded, monkeypatch):
    folder = photos(tmp_path / "photos")
    writable = checks._writable
    monkeypatch.setattr(checks, "_writable", lambda path: path.name != ".retouch" and writable(path))
    check(folder)
    assert not (folder / ".retouch").exists()
    assert len(list(cache.glob("*.json"))) == 1
    decoded.clear()
    check(folder)
    assert decoded == []
    monkeypatch.setattr(checks, "_writable", lambda path: False)
    for path in cache.iterdir():
        path.unlink()
    assert check(folder) == []
    assert len(decoded) == 4


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((None, text) for text in ("", "{", "[]", '{"version": 1}', "null", '{"version": 2, "digest": "x"}')),
        ("rows", None), ("rows", []), ("rows", ["x"] * 4),
        ("rows", [{"problems": [], "decoded": True, "readable": True, "line": "1"}] * 4),
        ("rows", [{"problems": [], "decoded": True, "readable": True, "files": [["0.png", 1]]}] * 4),
        (
            "rows",
            [{"problems": [{"file": "", "line": 1, "what": "x", "severity": "fatal"}], "decoded": True, "readable": True}] * 4,
        ),
    ],
)  # fmt: skip
def test_an_invalid_stored_result_is_ignored(tmp_path, decoded, key, value):
    folder = photos(tmp_path / "photos")
    check(folder)
    (name,) = kept_files(folder)
    path = folder / ".retouch" / name
    path.write_text(value if key is None else json.dumps({**json.loads(path.read_text()), key: value}))
    decoded.clear()
    assert check(folder) == []
    assert len(decoded) == 4


def test_a_reward_that_compares_with_a_target_refuses_rows_without_one_before_training(tmp_path):
    photos(tmp_path / "plain")
    reward = 'reward={"kind": "target", "combine": {"closeness": 1}}'
    recipe = load("recipes/photos.jsonnet", [f"data.path={tmp_path / 'plain'}", reward])
    with pytest.raises(ValueError, match=r"4 of 4 rows cannot be used") as refused:
        build_sets(recipe, recipe.data, size=None)
    assert "no target image for the reward to compare with; add a column `target`" in str(refused.value)
    metadata = photos(tmp_path / "paired") / "metadata.jsonl"
    pairs = [json.loads(line) for line in metadata.read_text().splitlines()]
    metadata.write_text("".join(json.dumps({**line, "target": line["file_name"]}) + "\n" for line in pairs))
    paired = load("recipes/photos.jsonnet", [f"data.path={tmp_path / 'paired'}", "data.held_out=1", reward])
    assert len(build_sets(paired, paired.data, size=None).heldout) == 1


def test_check_5_decodes_5_rows_at_the_start_and_the_others_when_they_are_drawn(tmp_path, decoded):
    folder = photos(tmp_path / "photos", count=30)
    damage(folder / "7.png")
    sampled = FolderData(path=str(folder), check=5, held_out=0).build(DataContext(eval_split="train"))
    assert len(decoded) == 5
    assert len(sampled.train) == 30
    with pytest.raises(ValueError, match=r"metadata.jsonl:8: 7.png: truncated or damaged.*not checked before training"):
        sampled.train[7]
    assert sampled.train[8].instruction == "edit 8"
    # A later start with more rows decodes the rest only.
    FolderData(path=str(folder), check=5, held_out=0).build(DataContext(eval_split="train"))
    assert len(decoded) == 5
    with pytest.raises(ValueError, match="1 of 30 rows cannot be used"):
        FolderData(path=str(folder), held_out=0).build(DataContext(eval_split="train"))
    assert len(decoded) == 30


def test_a_row_that_cannot_be_decoded_is_replaced_by_the_next_one(tmp_path, caplog):
    folder = photos(tmp_path / "photos", count=70)
    damage(folder / "66.png")
    data = FolderData(path=str(folder), check="first", held_out=0, on_bad_row="skip").build(DataContext(eval_split="train"))
    with caplog.at_level(logging.WARNING):
        assert [data.train[index].instruction for index in (65, 66, 67, 66)] == ["edit 65", "edit 67", "edit 67", "edit 67"]
    assert len(caplog.records) == 1


def test_checks_of_in_memory_tables_are_stored_by_content(tmp_path, cache, decoded):
    rows = [{"prompt": f"make it {number}", "image": Image.new("RGB", (8, 6), (number, 0, 0))} for number in range(3)]
    for _ in range(2):
        TableData.of(rows, held_out=0).build(DataContext(eval_split="train"))
        assert len(decoded) == 3
    table = datasets.Dataset.from_list([{"prompt": "x", "image": Image.new("RGB", (8, 6))}] * 2)
    for _ in range(2):
        TableData.of(table, held_out=0).build(DataContext(eval_split="train"))
        assert len(decoded) == 5
    assert len(list(cache.glob("*.json"))) == 2


def test_checking_with_processes_gives_the_same_reports_as_with_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "PARALLEL_FROM", 30)
    folder = photos(tmp_path / "photos", count=40)
    for number in (0, 20, 39):
        damage(folder / f"{number}.png")
    rows = read_folder(folder)

    def found(cpus):
        monkeypatch.setattr(checks, "available_cpus", lambda: cpus)
        return list(examine_all(rows, range(40), max_pixels=10**6, decode=range(40)))

    alone = found(1)
    assert found(2) == alone == [(index, examine(rows, index, max_pixels=10**6)) for index in range(40)]
    assert [index for index, report in alone if report.problems] == [0, 20, 39]


class KillsReader:
    """Rows that kill the process that reads them."""

    problems = ()

    def __len__(self):
        return 300

    def __getitem__(self, index):
        if os.getpid() != PARENT:
            os.kill(os.getpid(), signal.SIGKILL)
        return Row("x", index, str(index), "x", images=(EncodedImage("x", b""),))


PARENT = os.getpid()


def test_a_killed_worker_process_raises_with_the_probable_cause(monkeypatch):
    monkeypatch.setattr(checks, "available_cpus", lambda: 2)
    with pytest.raises(ValueError, match="was killed, probably because the memory was used up"):
        list(examine_all(KillsReader(), range(300), max_pixels=10, decode=range(300)))


def test_a_long_check_logs_its_progress_and_the_remaining_time(tmp_path, monkeypatch, caplog):
    folder = photos(tmp_path / "photos", count=70)
    monkeypatch.setattr(checks, "_FIRST_REPORT", 0.0)
    with caplog.at_level(logging.INFO, logger="retouch"):
        list(examine_all(read_folder(folder), range(70), max_pixels=10**6, decode=range(70), name="photos"))
    assert "checking photos: 64 of 70 rows, about 0 s left" in caplog.text
