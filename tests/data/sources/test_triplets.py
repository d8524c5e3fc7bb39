"""Triplets and Complex-Edit: how an item is read, every defect with its line, and no accidental training on Complex-Edit."""

import datasets
import pytest
from PIL import Image, ImageDraw

from pictures import encoded
from retouch.data.checks import accept_rows
from retouch.data.kinds import check, read_path
from retouch.data.tasks import Tasks
from retouch.recipe.recipe import parse, problems
from retouch.run.build import build_sets
from retouch_bench.complex_edit import levels, read_complex_edit
from retouch_models.triplets import TripletRows

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
        ("Azir", "The text is 'Azir'."), ("rock-n-roll", "The text is 'rock-n-roll'."), ("Straße", "The text is 'Straße'."),
    ]  # fmt: skip
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
    (folder / "self_bench.txt").write_text("3-Azir\n")
    with pytest.raises(ValueError, match="needs at least 2 items with a reference, and 1 have one"):
        TripletRows(folder, reference="other")


def listed(content):
    return lambda root: (root / "self_bench.txt").write_bytes(content)


def lost(name):
    return lambda root: (root / name).unlink()


def masked(image):
    return lambda root: image.save(root / "test3_mask.png")


@pytest.mark.parametrize(
    ("breaking", "line", "said"),
    [
        (lost("test11_ref.png"), 2, "test11_ref.png': no such file"), (lost("test11_source.png"), 2, "test11_source.png': no such"),
        (lost("test11_mask.png"), 2, "test11_mask.png': no such file"), (masked(Image.new("L", SIZE)), 1, "all black"),
        (masked(Image.linear_gradient("L").resize(SIZE)), 1, "grey levels"),
        (masked(Image.new("L", (9, 9), 255)), 1, "the mask is 9x9 but its image 48x32"),
        (lambda root: (root / "test3_source.png").write_bytes(b"no picture"), 1, "test3_source.png"),
        (listed(b"3-Azir\n11-a\n3-b\n"), 3, "the number 3 is taken by line 1"),
        (listed(b"3-Azir\n11-a\nAzir\n"), 3, "<number>-<text>"), (listed(b"3-Azir\n11-a\n17- \n"), 3, "<number>-<text>"),
        (listed(b"3-Azir\n11-\xff\n"), 2, "not UTF-8"),
    ],
)  # fmt: skip
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


PICTURES = 12


def step(picture, number):
    return {"name": "Change Colour", "instruction": f"edit {number} of picture {picture}"}


def edit(picture):
    """A cell of the column `edit`: the chain of edits, and 8 compound instructions, each with one edit more than the one before."""
    chain = [step(picture, number) for number in range(1, 9)]
    return {
        "sequence": chain, "original_sequence": chain[::-1], "reasoning": "why these",
        "compound": [
            {"reasoning": "how", "compound_instruction": f"picture {picture}: edits 1 to {number}"} for number in range(1, 9)
        ],
    }  # fmt: skip


def png(number):
    return encoded(Image.new("RGB", (24, 16), (20 * number, 90, 200)))


def save(published, split, numbers, edits):
    columns = {"image": [{"bytes": png(k), "path": None} for k in numbers], "edit": edits}
    features = datasets.Dataset.from_dict({"edit": edits}).features | {"image": datasets.Image()}
    made = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    made.to_parquet(published / "data" / f"{split}-00000-of-00001.parquet")


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A published with a parquet file for each split, as on the Hub; the two files have different instructions."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    shown = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    (tmp_path / "set" / "data").mkdir(parents=True)
    for split, first in (("test_real", 0), ("test_syn", PICTURES)):
        save(tmp_path / "set", split, range(PICTURES), [edit(first + k) for k in range(PICTURES)])
    (tmp_path / "set" / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n"
        + "".join(f"  - split: {split}\n    path: data/{split}-*\n" for split in ("test_real", "test_syn"))
        + "---\n"
    )
    yield tmp_path / "set"
    if not shown:
        datasets.enable_progress_bars()


def test_levels_are_parsed_from_numbers_ranges_and_lists_and_others_raise():
    valid = {"8": (8,), "1-8": tuple(range(1, 9)), "1,3,5": (1, 3, 5), " 5, 1 - 2,2": (1, 2, 5)}
    assert {text: levels(text) for text in valid} == valid
    for text in ("", "9", "0-3", "3-1", "1-", "one", "1;2", "1.5", "-1"):
        with pytest.raises(ValueError, match="1 to 8"):
            levels(text)


def test_each_task_is_one_image_at_one_complexity_level(published):
    rows = read_complex_edit(published, complexity="1,8")
    assert len(rows) == 2 * PICTURES
    assert check(rows) == []
    single, whole = Tasks(rows, resize=None)[4:6]
    assert (single.instruction, whole.instruction) == ("picture 2: edits 1 to 1", "picture 2: edits 1 to 8")
    assert [task.images[0].getpixel((0, 0)) for task in (single, whole)] == [(40, 90, 200)] * 2
    assert (single.tags, whole.tags) == ({"complexity": "1"}, {"complexity": "8"})
    assert single.meta == {"operations": ["edit 1 of picture 2"]}
    assert whole.meta == {"operations": [f"edit {number} of picture 2" for number in range(1, 9)]}
    assert single.id != whole.id


def test_an_incomplete_chain_of_edits_is_reported_with_its_row(published):
    short = edit(0)
    short["compound"][7]["compound_instruction"] = " "
    short["sequence"].pop()
    save(published, "test_real", [0], [short])
    found = [str(problem) for problem in check(read_complex_edit(published, complexity="7-8", split="test_real"))]
    assert len(found) == 2
    assert "test_real]:1: error: 'edit.compound.7.compound_instruction': no instruction of complexity 8" in found[0]
    assert "not the 8 atomic edits" in found[1]


RECIPE = {
    "name": "try", "steps": 1, "tasks_per_step": 1, "group_size": 2, "learning_rate": 1e-4,
    "policy": {"kind": "denoising", "model": {"kind": "playground"}, "train": {"kind": "full"}},
    "rollout": {"num_steps": 3, "transition": {"kind": "cps", "noise_level": 0.7}},
    "reward": {"kind": "share", "combine": {"share": 1}},
    "objective": {"kind": "policy_gradient", "clip_low": 1e-4, "clip_high": 1e-4},
}  # fmt: skip


def recipe(**data):
    return parse(RECIPE | {"data": {"kind": "complex-edit", "complexity": "1-8", "held_out": 0.4} | data})


def test_training_on_complex_edit_needs_permission_which_is_recorded(published):
    for data, message in (
        ({"path": str(published)}, r"data\.allow_test_sets"),
        ({}, r"UCSC-VLAA/GPT-Image-Edit-1.5M has similar complex instructions .* data.allow_test_sets"),
    ):
        refused = recipe(**data)
        with pytest.raises(ValueError, match=message):
            build_sets(refused, refused.data, size=None)
    allowed = recipe(path=str(published), allow_test_sets=True)
    assert problems(allowed) == []
    sets = build_sets(allowed, allowed.data, size=None)
    assert sets.test_sets
    assert allowed.document()["data"]["allow_test_sets"] is True
    assert len(sets.train) + len(sets.heldout) > len(sets.heldout) > 0
    pictures = [{tuple(task.images[0].getpixel((0, 0))) for task in side} for side in (sets.train, sets.heldout)]
    assert not pictures[0] & pictures[1]
