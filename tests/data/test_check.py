"""`check` and `accept` on folders with every known defect, one per line; kinds of data sources and `check_data_source`."""

import json
import logging
from dataclasses import replace
from typing import ClassVar

import pytest
from PIL import Image

from retouch.config.packaged import packaged_recipes
from retouch.data.base import DataSets, DataSource
from retouch.data.checks import accept_rows
from retouch.data.images import EncodedImage
from retouch.data.kinds import check
from retouch.data.rows import Problem, Row
from retouch.data.sources.folder import read_folder
from retouch.data.tasks import Subset, Tasks
from retouch.recipe.derived_facts import differences
from retouch.recipe.document import evaluate
from retouch.recipe.recipe import parse
from retouch.types import Task, TaskContents
from retouch_worlds.data import PlaygroundData
from retouch_worlds.testing import check_data_source


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    Image.new("RGB", (8, 6), "red").save(folder / "a.png")
    Image.effect_noise((40, 40), 50).convert("RGB").save(folder / "noise.jpg")
    Image.new("L", (8, 6), 255).save(folder / "mask.png")
    return folder


def write(folder, *lines):
    path = folder / "metadata.jsonl"
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")
    return str(path)


def row(file_name="a.png", instruction="make it blue", **more):
    return {"file_name": file_name, "instruction": instruction, **more}


def errors(problems):
    return [(problem.line, problem.what) for problem in problems if problem.severity == "error"]


def notes(problems):
    return [(problem.line, problem.what) for problem in problems if problem.severity == "note"]


def test_a_missing_path_and_a_folder_of_images_without_metadata_are_reported(photos, tmp_path):
    (found,) = check(photos)
    assert "a folder of images without metadata.jsonl; write one, with a line for each image" in found.what
    (problem,) = check(tmp_path / "none")
    assert problem == Problem(str(tmp_path / "none"), 0, f"{tmp_path / 'none'}: no such file or folder")


def test_every_defect_is_reported_with_file_and_line(photos, tmp_path):
    whole = (photos / "noise.jpg").read_bytes()
    (photos / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (photos / "empty.png").write_bytes(b"")
    (photos / "page.png").write_text("<html>not found</html>")
    Image.new("RGB", (8, 6)).save(photos / "old.gif")
    Image.new("RGB", (300, 300)).save(photos / "huge.png")
    Image.new("L", (8, 7), 255).save(photos / "wide.png")
    Image.new("RGB", (8, 6)).save(tmp_path / "outside.png")
    (photos / "link.png").symlink_to(tmp_path / "outside.png")
    planted = [
        (row(id="same"), None), (row(file_name="gone.png"), "'file_name': 'gone.png': no such file"),
        (row(file_name="cut.jpg"), "cut.jpg: truncated or damaged"),
        (row(file_name="empty.png"), "empty.png: not a PNG, JPEG or WebP"),
        (row(file_name="page.png"), "page.png: not a PNG, JPEG or WebP"),
        (row(file_name="old.gif"), "old.gif: not a PNG, JPEG or WebP"),
        (row(file_name="huge.png"), "huge.png: 90000 pixels, more than the 80000"),
        (row(file_name="../outside.png"), "leaves the folder"), (row(file_name="link.png"), "leads out of the folder by a link"),
        (row(instruction=""), "'instruction': the instruction is empty"),
        (row(instruction=" \n"), "'instruction': the instruction is empty"),
        (row(instruction=[]), "'instruction': the instruction is empty"),
        (row(instruction=3), "'instruction': the instruction should be text, not 3"),
        ({"file_name": "a.png", "instruktion": "x"}, "no instruction; the row has file_name, instruktion"),
        ({"instruction": "x"}, "'file_name': no source image"), (row(file_name=7), "should be the name of a file, not 7"),
        (row(id="same"), "the id 'same' is taken by {file}:1"), (row(id=True), "'id': should be text or a whole number"),
        (row(text=""), "'text': should be text or a whole number"), (row(mask="wide.png"), "the mask is 8x7 but its image 8x6"),
        (row(mask="none.png"), "'mask': 'none.png': no such file"), (row(target="cut.jpg"), "cut.jpg: truncated"),
        (row(reference="empty.png"), "empty.png: not a PNG"),
        ('{"file_name": "a.png", "instruction": "x"', "not JSON: Expecting ',' delimiter"),
        ('{"file_name": "a.png", "instruction": "x", "instruction": "y"}', "not JSON: the key 'instruction' occurs twice"),
        ('{"file_name": "a.png", "instruction": "x", "score": NaN}', "not JSON: NaN"),
        ('{"file_name": "a.png", "instruction": "x", "score": 1e999}', "not JSON: 1e999 is too large"),
        ('{"file_name": "a.png", "instruction": "\\ud83d"}', "half of a surrogate pair"),
        ("[1, 2]", "should be a JSON object, not list"), ("[" * 100_000, "nested too deep"),
    ]  # fmt: skip
    file = write(photos, *(line for line, _ in planted))
    with open(file, "ab") as out:
        out.write(b'{"file_name": "a.png", "instruction": "caf\xe9"}\n')
    found = errors(check(photos, max_pixels=80_000))
    expected = [(line, what.format(file=file)) for line, (_, what) in enumerate(planted, start=1) if what is not None]
    expected.append((len(planted) + 1, "not UTF-8 at byte 42"))
    assert [line for line, _ in found] == [line for line, _ in expected]
    for (line, got), (_, wanted) in zip(found, expected, strict=True):
        assert wanted in got, line
    assert {problem.file for problem in check(photos)} == {file}


def test_harmless_irregularities_are_reported_as_notes(photos):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (6, 8)).save(photos / "turned.png", exif=exif)
    Image.new("RGBA", (8, 6)).save(photos / "clear.png")
    Image.new("L", (8, 6), 0).save(photos / "black.png")
    Image.linear_gradient("L").resize((8, 6)).save(photos / "soft.png")
    Image.new("RGB", (16, 6)).save(photos / "wide.png")
    write(
        photos,
        row(file_name="turned.png", mask="mask.png"),  # 8x6 once upright
        row(file_name="clear.png", taget="x"), row(mask="black.png"), row(mask="soft.png"), row(target="wide.png"),
    )  # fmt: skip
    path = photos / "metadata.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    problems = check(photos)
    assert errors(problems) == []
    wanted = [  # without the key 'taget', because some row has a target
        (1, "byte-order mark"), (1, "CRLF"), (1, "turned.png: rotated"), (2, "clear.png: mode RGBA, read as RGB"),
        (3, "all black"), (4, "grey levels"), (5, "the target is 16x6 but its source 8x6"),
    ]  # fmt: skip
    assert [line for line, _ in notes(problems)] == [line for line, _ in wanted]
    assert all(what in got for (_, what), (_, got) in zip(wanted, notes(problems), strict=True))
    capitals = "the key 'Mask' is read as an ordinary column, not as 'mask', and goes to meta; should it be 'mask'?"
    for key, what in (("taget", "the key 'taget' goes to meta; should it be 'target'?"), ("Mask", capitals)):
        write(photos, row(**{key: "mask.png"}))
        assert notes(check(photos)) == [(0, what)]


def test_invalid_csv_records_are_reported_with_their_first_line(photos):
    (photos / "metadata.csv").write_text('file_name,instruction\n"a.png","two\nlines"\na.png\na.png,x,y\n"a.png"b,x\n\na.png,"open')
    found = errors(check(photos))
    assert [line for line, _ in found] == [4, 5, 6, 8]
    assert [what.split(":")[0] for _, what in found] == [
        "1 cells, but the header has 2", "3 cells, but the header has 2", "not CSV", "not CSV",
    ]  # fmt: skip


class NoRows(list):
    problems = ()


def test_accept_raises_with_the_first_invalid_rows_without_usable_ones_and_with_an_unknown_on_bad_row(photos):
    file = write(photos, row(), *(row(file_name=f"gone{n}.png") for n in range(7)), row(instruction="", file_name="gone.png"))
    with pytest.raises(ValueError, match="8 of 9 rows cannot be used") as refused:
        accept_rows(read_folder(photos), on_bad_row="refuse")
    listed = [line.split(": error")[0].strip() for line in str(refused.value).splitlines()[1:6]]
    assert listed == [f"{file}:{n}" for n in range(2, 7)]
    assert "and 3 more" in str(refused.value)
    write(photos, row(file_name="gone.png"))
    for rows, on_bad_row, message in (
        (read_folder(photos), "skip", "1 of 1 rows cannot be used"), (NoRows(), "skip", "no rows"),
        (read_folder(photos), "ignore", 'must be "refuse" or "skip"'),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            accept_rows(rows, on_bad_row=on_bad_row)


def test_bad_rows_are_skipped_counted_and_logged(photos, caplog):
    file = write(photos, row(), row(file_name="gone.png"), "{", row(), row(id="x"), row(id="x"))
    with caplog.at_level(logging.WARNING):
        accepted = accept_rows(read_folder(photos), on_bad_row="skip")
        good, problems = accepted.indices, list(accepted.problems)
    assert good == (0, 3, 4)
    assert [problem.line for problem in problems] == [2, 3, 6]
    (record,) = caplog.records
    assert "skipped 3 of 6 rows" in record.getMessage()
    assert all(f"{file}:{line}: error" in record.getMessage() for line in (2, 3, 6))
    assert [task.id for task in Subset(Tasks(read_folder(photos), resize=None), good)] == ["photos/1", "photos/4", "x"]


def test_exactly_the_accepted_rows_can_be_loaded(photos):
    """No accepted row may fail later, for example at step 400 of a run; `accept` exists to prevent this."""
    (photos / "cut.jpg").write_bytes((photos / "noise.jpg").read_bytes()[:300])
    wrong = [row(file_name="cut.jpg"), row(mask="noise.jpg"), row(target="cut.jpg"), "null"]
    write(photos, row(), *wrong, row(text=3), row(mask="mask.png", target="a.png", reference="noise.jpg", text="x", id="y"))
    rows = read_folder(photos)
    tasks = Tasks(rows, resize=None)
    assert accept_rows(rows, on_bad_row="skip").indices == (0, 5, 6)
    for index in range(1, 5):
        with pytest.raises(ValueError, match=rf"metadata\.jsonl:{index + 1}: "):
            tasks[index]
    assert all(tasks[index] for index in (0, 5, 6))


def test_a_row_with_a_decoded_image_is_refused_with_the_class_to_use():
    image = Image.new("RGB", (4, 4))
    with pytest.raises(ValueError, match=r"image of the row 'a' is of type Image; give .* as retouch\.data\.images\.EncodedImage"):
        Row("rows", 1, "a", "blue", (EncodedImage("a", b""),), target=image)


class Numbers(DataSource):
    """Tasks made from numbers."""

    path_keys: ClassVar[tuple[str, ...]] = ("path",)

    path: str = "anywhere"
    """A place."""
    shared: bool = False
    """Whether held-out tasks are training tasks."""

    def contents(self):
        return TaskContents(images=True, mask=False, reference=False, target=False)

    def build(self, context):
        return DataSets(_tasks(range(4)), _tasks(range(1 if self.shared else 4, 6)))


class NonDeterministic(Numbers):
    """Builds different tasks each time."""

    made: ClassVar[list[int]] = []

    def build(self, context):
        self.made.append(1)
        return DataSets(_tasks(range(len(self.made))), _tasks(range(100, 102)))


class SharesItsSecondImages(Numbers):
    """Its held-out tasks have source images of training tasks, at another position."""

    def build(self, context):
        first, second = (Image.new("RGB", (8, 8), (255, k, 0)) for k in range(2))
        train = [replace(task, images=(*task.images, first)) for task in _tasks(range(2))]
        return DataSets(
            train, [replace(task, images=(first if k else second, *task.images)) for k, task in enumerate(_tasks((4, 5)))]
        )


class MissingTargets(Numbers):
    """Declares targets that its tasks do not have."""

    def contents(self):
        return TaskContents(target=True)


def _tasks(numbers):
    return [Task(f"n/{k}", f"make it {k}", images=(Image.new("RGB", (8, 8), (k, 0, 0)),)) for k in numbers]


def imported(name, **args):
    return {"kind": "import", "class": f"{__name__}:{name}", "args": args}


def document_of(**data):
    return {**evaluate(packaged_recipes() / "photos.jsonnet"), "data": data}


def test_a_user_defined_data_source_is_parsed_stored_and_compared_like_a_built_in_one():
    recipe = parse(document_of(**imported("Numbers", path="here")))
    assert recipe.data == Numbers(path="here")
    assert recipe.data.label == "Numbers"
    assert recipe.document()["data"] == imported("Numbers", path="here", allow_test_sets=False, shared=False)
    assert parse(recipe.document()) == recipe
    # When a run is resumed, the path of the data may differ, but no other key.
    changed = ["data.args.shared: False in the run, True in the recipe"]
    for args, found in (({"path": "there"}, []), ({"path": "here", "shared": True}, changed)):
        assert differences(recipe, parse(document_of(**imported("Numbers", **args)))) == found
    for data, message in (
        (imported("Numbers", pth="here"), r"data\.args\.pth: unknown key; did you mean data\.args\.path"),
        ({"kind": "import", "class": f"{__name__}:Task"}, r"is no data: derive the class from retouch\.data\.base\.DataSource"),
        ({"kind": "import", "class": "retouch.types:Task"}, r"types:Task is not a class of Retouch that a recipe can name"),
    ):
        with pytest.raises(ValueError, match=message):
            parse(document_of(**data))


def test_check_data_source_accepts_valid_sources_and_rejects_faulty_ones():
    check_data_source(Numbers())
    check_data_source(PlaygroundData(count=8, complexity={1: 1.0, 2: 1.0}))
    for source, message in (
        (Numbers(shared=True), "ids of training tasks"),
        (NonDeterministic(), "the tasks differ"),
        (MissingTargets(), "contents says target True"),
        (SharesItsSecondImages(), r"held-out tasks have the source images of training tasks: \['n/5'\]"),
    ):
        with pytest.raises(AssertionError, match=message):
            check_data_source(source)
