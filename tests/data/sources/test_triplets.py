"""Triplets: how an item is read, and every defect of an item, reported with its line."""

import pytest
from PIL import Image, ImageDraw

from retouch.data.checks import accept_rows
from retouch.data.kinds import check, read_path
from retouch.data.sources.triplets import TripletRows
from retouch.data.tasks import Tasks

SIZE = (48, 32)
BOX = (8, 8, 30, 20)


def make(root, number, *, size=SIZE):
    mask = Image.new("L", size)
    ImageDraw.Draw(mask).rectangle(BOX, fill=255)
    source = Image.new("RGB", size, (number, 100, 50))
    source.save(root / f"test{number}_source.png")
    mask.save(root / f"test{number}_mask.png")
    source.crop(BOX).save(root / f"test{number}_ref.png")


@pytest.fixture
def folder(tmp_path):
    for number in (3, 11, 17):
        make(tmp_path, number)
    (tmp_path / "self_bench.txt").write_text("3-Azir\n11-rock-n-roll\n17-  Straße \n", encoding="utf-8")
    return tmp_path


def test_an_item_is_read_as_an_inpainting_task_with_its_text(folder):
    tasks = Tasks(TripletRows(folder, reference="own"), resize=None)
    assert [(task.text, task.instruction) for task in tasks] == [
        ("Azir", "The text is 'Azir'."),
        ("rock-n-roll", "The text is 'rock-n-roll'."),
        ("Straße", "The text is 'Straße'."),
    ]
    task = tasks[1]
    assert task.images[0].tobytes() == task.target.tobytes()
    assert (task.mask.size, task.reference.size) == (SIZE, (BOX[2] - BOX[0], BOX[3] - BOX[1]))
    assert task.mask.getpixel((10, 10)) == 255
    assert task.mask.getpixel((0, 0)) == 0
    assert task.reference.getpixel((0, 0)) == (11, 100, 50)


def test_reference_other_draws_the_reference_of_another_item_by_the_seed(folder):
    whose = {}
    for seed in range(12):
        tasks = Tasks(TripletRows(folder, reference="other", seed=seed), resize=None)
        whose[seed] = tuple(task.reference.getpixel((0, 0))[0] for task in tasks)
        assert all(style != number for style, number in zip(whose[seed], (3, 11, 17), strict=True))
        assert sorted(whose[seed]) == [3, 11, 17]  # each crop once, so that items on both sides of a split share no image
    assert len(set(whose.values())) == 2  # the two ways for three items
    again = Tasks(TripletRows(folder, reference="other", seed=5), resize=None)
    assert tuple(task.reference.getpixel((0, 0))[0] for task in again) == whose[5]


def test_reference_other_with_a_single_item_raises(folder):
    (folder / "self_bench.txt").write_text("3-Azir\n")
    with pytest.raises(ValueError, match="needs at least 2 items with a reference, and 1 have one"):
        TripletRows(folder, reference="other")


@pytest.mark.parametrize(
    ("breaking", "line", "said"),
    [
        (lambda root: (root / "test11_ref.png").unlink(), 2, "test11_ref.png': no such file"),
        (lambda root: (root / "test11_source.png").unlink(), 2, "test11_source.png': no such file"),
        (lambda root: (root / "test11_mask.png").unlink(), 2, "test11_mask.png': no such file"),
        (lambda root: Image.new("L", SIZE).save(root / "test17_mask.png"), 3, "all black"),
        (lambda root: Image.linear_gradient("L").resize(SIZE).save(root / "test17_mask.png"), 3, "grey levels"),
        (lambda root: Image.new("L", (9, 9), 255).save(root / "test3_mask.png"), 1, "the mask is 9x9 but its image 48x32"),
        (lambda root: (root / "test3_source.png").write_bytes(b"no picture"), 1, "test3_source.png"),
        (lambda root: (root / "test3_mask.png").write_bytes(b"no picture"), 1, "test3_mask.png"),
        (lambda root: (root / "self_bench.txt").write_text("3-Azir\n11-a\n3-b\n"), 3, "the number 3 is taken by line 1"),
        (lambda root: (root / "self_bench.txt").write_text("3-Azir\n11-a\nAzir\n"), 3, "<number>-<text>"),
        (lambda root: (root / "self_bench.txt").write_text("3-Azir\n11-a\n17- \n"), 3, "<number>-<text>"),
        (lambda root: (root / "self_bench.txt").write_bytes(b"3-Azir\n11-\xff\n"), 2, "not UTF-8"),
    ],
)
def test_an_invalid_item_is_reported_with_its_line(folder, breaking, line, said):
    breaking(folder)
    errors = [problem for problem in check(folder) if problem.severity == "error"]
    assert {problem.line for problem in errors} == {line}
    assert said in errors[0].what
    good = accept_rows(TripletRows(folder, reference="own"), on_bad_row="skip").indices
    assert line - 1 not in good
    with pytest.raises(ValueError, match=f"self_bench.txt:{line}"):
        accept_rows(TripletRows(folder, reference="own"), on_bad_row="refuse")


def test_a_byte_order_mark_and_crlf_are_reported_as_notes(folder):
    (folder / "self_bench.txt").write_bytes(b"\xef\xbb\xbf3-Azir\r\n11-b\r\n")
    rows = read_path(folder)
    assert [rows[k].text for k in range(2)] == ["Azir", "b"]
    assert [problem.severity for problem in rows.problems] == ["note", "note"]
