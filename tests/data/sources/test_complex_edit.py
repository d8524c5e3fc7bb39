"""Complex-Edit, read from parquet files with its schema: levels, splits by image, and no accidental training on it."""

import io

import datasets
import pytest
from PIL import Image

from retouch.data.kinds import check
from retouch.data.sources.complex_edit import levels, read_complex_edit
from retouch.data.tasks import Tasks
from retouch.recipe.recipe import parse, problems
from retouch.run.build import build_sets

PICTURES = 12


def step(picture, number):
    return {"name": "Change Colour", "instruction": f"edit {number} of picture {picture}"}


def edit(picture):
    """A cell of the column `edit`: the chain of edits, and 8 compound instructions, each with one edit more than the one before."""
    chain = [step(picture, number) for number in range(1, 9)]
    return {
        "sequence": chain,
        "original_sequence": chain[::-1],
        "reasoning": "why these",
        "compound": [
            {"reasoning": "how", "compound_instruction": f"picture {picture}: edits 1 to {number}"} for number in range(1, 9)
        ],
    }


def png(number):
    out = io.BytesIO()
    Image.new("RGB", (24, 16), (20 * number, 90, 200)).save(out, "PNG")
    return out.getvalue()


def save(folder, split, numbers, edits):
    columns = {"image": [{"bytes": png(k), "path": None} for k in numbers], "edit": edits}
    features = datasets.Dataset.from_dict({"edit": edits}).features | {"image": datasets.Image()}
    made = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    made.to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a parquet file for each split, as on the Hub; the two files have different instructions."""
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


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("8", (8,)),
        ("1-8", tuple(range(1, 9))),
        ("1,3,5", (1, 3, 5)),
        (" 5, 1 - 2,2", (1, 2, 5)),
    ],
)
def test_levels_are_parsed_from_numbers_ranges_and_lists(text, meant):
    assert levels(text) == meant


@pytest.mark.parametrize("text", ["", "9", "0-3", "3-1", "1-", "one", "1;2", "1.5", "-1"])
def test_invalid_levels_raise(text):
    with pytest.raises(ValueError, match="1 to 8"):
        levels(text)


def test_each_task_is_one_image_at_one_complexity_level(folder):
    rows = read_complex_edit(folder, complexity="1,8")
    assert len(rows) == 2 * PICTURES
    assert check(rows) == []
    single, whole = Tasks(rows, resize=None)[4:6]
    assert (single.instruction, whole.instruction) == ("picture 2: edits 1 to 1", "picture 2: edits 1 to 8")
    assert [task.images[0].getpixel((0, 0)) for task in (single, whole)] == [(40, 90, 200)] * 2
    assert (single.tags, whole.tags) == ({"complexity": "1"}, {"complexity": "8"})
    assert single.meta == {"operations": ["edit 1 of picture 2"]}
    assert whole.meta == {"operations": [f"edit {number} of picture 2" for number in range(1, 9)]}
    assert single.id != whole.id


def test_an_incomplete_chain_of_edits_is_reported_with_its_row(folder):
    short = edit(0)
    short["compound"][7]["compound_instruction"] = " "
    short["sequence"].pop()
    save(folder, "test_real", [0], [short])
    found = [str(problem) for problem in check(read_complex_edit(folder, complexity="7-8", split="test_real"))]
    assert len(found) == 2
    assert "test_real]:1: error: 'edit.compound.7.compound_instruction': no instruction of complexity 8" in found[0]
    assert "not the 8 atomic edits" in found[1]


RECIPE = {
    "name": "try",
    "steps": 1,
    "tasks_per_step": 1,
    "group_size": 2,
    "learning_rate": 1e-4,
    "policy": {"kind": "denoising", "model": {"kind": "playground"}, "train": {"kind": "full"}},
    "rollout": {"num_steps": 3, "transition": {"kind": "cps", "noise_level": 0.7}},
    "reward": {"kind": "share", "combine": {"share": 1}},
    "objective": {"kind": "policy_gradient", "clip_low": 1e-4, "clip_high": 1e-4},
}


def recipe(**data):
    return parse(RECIPE | {"data": {"kind": "complex-edit", "complexity": "1-8", "held_out": 0.4} | data})


def test_training_on_complex_edit_without_permission_raises_and_suggests_another_set(folder):
    refused = recipe(path=str(folder))
    with pytest.raises(ValueError, match=r"data\.allow_test_sets"):
        build_sets(refused, refused.data, size=None)
    published = recipe()
    with pytest.raises(ValueError, match=r"UCSC-VLAA/GPT-Image-Edit-1.5M has similar complex instructions .* data.allow_test_sets"):
        build_sets(published, published.data, size=None)


def test_allow_test_sets_permits_training_on_complex_edit_and_is_recorded(folder):
    allowed = recipe(path=str(folder), allow_test_sets=True)
    assert problems(allowed) == []
    sets = build_sets(allowed, allowed.data, size=None)
    assert sets.test_sets
    assert allowed.document()["data"]["allow_test_sets"] is True
    assert len(sets.train) + len(sets.heldout) > len(sets.heldout) > 0
    pictures = [{tuple(task.images[0].getpixel((0, 0))) for task in side} for side in (sets.train, sets.heldout)]
    assert not pictures[0] & pictures[1]
