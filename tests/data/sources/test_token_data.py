"""Image tokens on disk: feature files are read as they were written, errors name the file, and lists are mixed."""

import json
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL.Image import new

from retouch.data.base import DataContext
from retouch.data.checks import accept_rows
from retouch.data.kinds import check, read_path
from retouch.data.rows import LONGEST_THOUGHT, thought_of
from retouch.data.tasks import MappedTasks, Tasks
from retouch_models.features import Feature, read_feature
from retouch_models.image_tokens import TokenData, TokenRows, mixed, with_decoded_images

GRID = (2, 3)


def feature(number=0, **changes):
    codes = torch.arange(6).reshape(GRID) + number
    given = {"id": f"edit/{number}", "instruction": "make it red", "source": codes, "target": codes + 1, **changes}
    return Feature(**given)


def earl(number=0, **changes):
    """The contents of a feature file in the format of EARL."""
    grid = np.arange(6).reshape(GRID) + number
    made = {"edit_id": number, "original_image": grid, "edited_image": grid + 1, "instruction": "make it red"}
    return {**made, "CoT": {"plan": "Find the cup.", "edit": "Paint it."}, **changes}


def save(root, features, *, prefix="/nowhere"):
    """A data set: ``feature/`` and its list."""
    (root / "feature").mkdir(parents=True)
    (root / "list").mkdir()
    names = []
    for number, each in enumerate(features):
        name = f"{number}.pth" if isinstance(each, dict) else f"{number}.safetensors"
        if isinstance(each, dict):
            torch.save(each, root / "feature" / name)
        else:
            (root / "feature" / name).write_bytes(each.to_bytes())
        names.append(name)
    file = root / "list" / "tokenized_datalist.json"
    file.write_text(json.dumps({"prefix": prefix, "path_list": names}))
    return file


def test_feature_files_are_read_as_they_were_written_and_pth_files_only_if_they_are_trusted(tmp_path):
    made = feature(thought="First the cup.", task={"tags": {"kind": "colour"}, "meta": {"x": [1]}})
    (tmp_path / "a.safetensors").write_bytes(made.to_bytes())
    found = read_feature(tmp_path / "a.safetensors", trusted=False)
    assert (found.id, found.instruction, found.thought, found.task) == (made.id, made.instruction, made.thought, made.task)
    assert torch.equal(found.source, made.source)
    assert torch.equal(found.target, made.target)
    torch.save(earl(7), tmp_path / "7.pth")
    with pytest.raises(ValueError, match=r"7\.pth.*data\.trusted: true"):
        read_feature(tmp_path / "7.pth", trusted=False)
    found = read_feature(tmp_path / "7.pth", trusted=True)
    assert (found.id, found.thought) == ("7", "Find the cup.\nPaint it.")
    assert found.source.tolist() == earl(7)["original_image"].tolist()
    assert found.target.tolist() == earl(7)["edited_image"].tolist()


class MaliciousPickle:
    def __reduce__(self):
        return print, ("run",)


def test_pth_files_with_arbitrary_objects_raise_and_run_no_code(tmp_path, capsys):
    torch.save(earl(CoT=MaliciousPickle()), tmp_path / "7.pth")
    with pytest.raises(ValueError, match=r"7\.pth: contains more than numbers"):
        read_feature(tmp_path / "7.pth", trusted=True)
    torch.save(earl(original_image=np.array([[MaliciousPickle()]], dtype=object)), tmp_path / "8.pth")
    with pytest.raises(ValueError, match=r"8\.pth: contains more"):
        read_feature(tmp_path / "8.pth", trusted=True)
    (tmp_path / "9.pth").write_bytes(b"no file of torch's")
    with pytest.raises(ValueError, match=r"9\.pth"):
        read_feature(tmp_path / "9.pth", trusted=True)
    assert "run" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"original_image": None}, "has no original_image"),
        ({"edited_image": np.zeros((3, 3), dtype=int)}, "edited_image is 3x3 codes, and original_image 2x3"),
        ({"original_image": np.zeros(GRID)}, "not a grid of whole numbers"), ({"original_image": np.full(GRID, -1)}, "the code -1"),
        ({"original_image": np.zeros(6, dtype=int)}, r"the shape \(6,\)"), ({"instruction": " "}, "its instruction is not a text"),
        ({"task": {"text": 5}}, "a text or a tag of its task is not a text"),
        ({"task": {"tags": {"level": 5}}}, "a text or a tag of its task is not a text"),
    ],
)  # fmt: skip
def test_invalid_fields_of_a_feature_file_raise_with_the_file_name(tmp_path, changes, said):
    torch.save(earl(**changes), tmp_path / "7.pth")
    with pytest.raises(ValueError, match=rf"7\.pth.*{said}"):
        read_feature(tmp_path / "7.pth", trusted=True)


def sums_as_pixels(codes):
    return [new("RGB", (1, 1), (int(grid.sum()), 0, 0)) for grid in codes]


def test_token_lists_are_read_as_rows_and_tasks(tmp_path):
    here, there = save(tmp_path / "omniedit", [feature(k) for k in range(3)]), save(tmp_path / "a" / "omniedit", [earl(9)])
    rows = TokenRows([here.parents[1], there], trusted=True)
    assert rows.parts == [range(3), range(3, 4)]
    accepted = accept_rows(rows, on_bad_row="refuse")
    good, found = accepted.indices, list(accepted.problems)
    assert good == (0, 1, 2, 3)
    assert not found
    assert [rows[k].id for k in good] == ["omniedit/edit/0", "omniedit/edit/1", "omniedit/edit/2", "omniedit#2/9"]
    tasks = MappedTasks(Tasks(rows, resize=None), partial(with_decoded_images, decode=sums_as_pixels))
    task = tasks[1:][0]
    assert task.meta["source_codes"] == feature(1).source.tolist()
    assert (task.images[0].getpixel((0, 0))[0], task.target.getpixel((0, 0))[0]) == (15 + 6, 15 + 12)
    assert tasks[3].meta["thought"] == "Find the cup.\nPaint it."


def test_in_the_published_layout_ids_name_data_set_and_split_and_tags_the_data_set(tmp_path):
    """``earl-datasets/omniedit/train/list/...``: ids contain data set and split, and tags the data set."""
    for name in ("omniedit", "vismin"):
        for split in ("train", "validation"):
            save(tmp_path / "earl-datasets" / name / split, [feature(0)])
    lists = [tmp_path / "earl-datasets" / name / split for name in ("omniedit", "vismin") for split in ("train", "validation")]
    rows = TokenRows(lists, trusted=False)
    names = ["omniedit/train", "omniedit/validation", "vismin/train", "vismin/validation"]
    assert [rows[k].id for k in range(4)] == [f"{name}/edit/0" for name in names]
    assert [rows[k].tags for k in range(4)] == [{"data_set": name.partition("/")[0]} for name in names]
    assert [dict(row.tags) for row in TokenRows(lists[:2], trusted=False)] == [{}, {}]


def test_thought_keys_select_and_order_the_parts_of_a_thought_and_long_ones_are_truncated(tmp_path):
    save(tmp_path / "d", [earl(1)])
    rows = TokenRows([tmp_path / "d"], trusted=True, thought_keys=("edit", "plan"))
    assert rows[0].meta["thought"] == "edit: Paint it.\nplan: Find the cup."
    with pytest.raises(ValueError, match=r"0\.pth.*has no 'why', which thought_keys names"):
        accept_rows(TokenRows([tmp_path / "d"], trusted=True, thought_keys=("why",)), on_bad_row="refuse")
    assert thought_of("x" * 5000) == "x" * LONGEST_THOUGHT == "x" * 1750
    assert thought_of({}) is thought_of(None) is thought_of(" ") is None


def test_a_data_set_can_be_moved_and_its_list_can_be_outside_of_it(tmp_path):
    file = save(tmp_path / "one", [feature()], prefix=str(tmp_path / "gone"))
    (tmp_path / "one").rename(tmp_path / "two")
    assert len(read_path(tmp_path / "two")) == 1
    assert check(tmp_path / "two") == []
    # A list in another folder gives the folder of its files as prefix.
    other = tmp_path / "lists" / "a" / "list.json"
    other.parent.mkdir(parents=True)
    told = json.loads((tmp_path / "two" / file.relative_to(tmp_path / "one")).read_text())
    other.write_text(json.dumps(told | {"prefix": str(tmp_path / "two" / "feature")}))
    assert TokenRows([other], trusted=False)[0].id == "a/edit/0"


def test_unusable_files_and_codes_raise_with_the_file_name_before_training(tmp_path):
    file = save(tmp_path / "d", [feature(k) for k in range(4)])
    (tmp_path / "d" / "feature" / "1.safetensors").unlink()
    (tmp_path / "d" / "feature" / "2.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match=r"2 of 4 rows cannot be used:\n.*1\.safetensors.*no such file\n.*2\.safetensors: damaged"):
        accept_rows(TokenRows([file], trusted=False), on_bad_row="refuse")
    rows = TokenRows([file], trusted=False)
    good = accept_rows(rows, on_bad_row="skip").indices
    assert good == (0, 3)
    rows.require(good, grid=GRID, codes=10)
    with pytest.raises(ValueError, match=r"(?s)1 of 2 .*3\.safetensors: the code 9, and the autoencoder has 9"):
        rows.require(good, grid=GRID, codes=9)
    with pytest.raises(ValueError, match=r"2 of 2 .*\n  .*/feature/0\.safetensors: 2x3 codes, and the model's images have 3x3"):
        rows.require(good, grid=(3, 3), codes=10)


def test_require_also_checks_rows_that_worker_processes_read(tmp_path, monkeypatch):
    monkeypatch.setattr("retouch.data.checks.PARALLEL_FROM", 4)
    monkeypatch.setattr("retouch.data.checks.available_cpus", lambda: 2)
    rows = TokenRows([save(tmp_path / "d", [feature(k) for k in range(4)])], trusted=False)
    good = accept_rows(rows, on_bad_row="refuse").indices
    assert [rows.known(k) for k in good] == [True] * 4
    with pytest.raises(ValueError, match=r"(?s)1 of 4 .*3\.safetensors: the code 9, and the autoencoder has 9"):
        rows.require(good, grid=GRID, codes=9)


def test_an_invalid_token_list_and_file_names_that_leave_the_data_set_raise(tmp_path):
    with pytest.raises(ValueError, match="no list of image tokens"):
        TokenRows([tmp_path], trusted=False)
    for told in ("[]", '{"path_list": []}', '{"path_list": [3]}', "no JSON"):
        (tmp_path / "list.json").write_text(told)
        with pytest.raises(ValueError, match=r"list\.json"):
            TokenRows([tmp_path / "list.json"], trusted=False)
    file = save(tmp_path / "d", [feature()])
    file.write_text(json.dumps({"prefix": "", "path_list": ["0.safetensors", "../../x.safetensors"]}))
    with pytest.raises(ValueError, match=r"1 of 2 rows.*\n.*leaves the folder"):
        accept_rows(TokenRows([file], trusted=False), on_bad_row="refuse")


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    tenths=st.lists(st.integers(1, 45), min_size=4, max_size=4),
    seed=st.integers(0, 3),
)
def test_mixing_coefficients_give_full_copies_plus_a_random_fraction_of_each_list(sizes, tenths, seed):
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    parts = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    coefficients = [each / 10 for each in tenths[: len(parts)]]
    counts = Counter(mixed(parts, coefficients, seed=seed))
    for part, tenth in zip(parts, tenths, strict=False):
        found = [counts[row] for row in part]
        assert sum(found) == len(part) * tenth // 10
        assert not found or (min(found) >= tenth // 10 and max(found) <= tenth // 10 + 1)
    assert mixed(parts, coefficients, seed=seed) == mixed(parts, coefficients, seed=seed)
    even = Counter(mixed(parts, [], seed=seed))
    assert {sum(even[row] for row in part) for part in parts if part} <= {max(sizes)}


def test_mixing_depends_on_the_seed_and_a_wrong_number_of_coefficients_raises():
    part = [range(100)]
    assert mixed(part, [0.3], seed=0) != mixed(part, [0.3], seed=1)
    assert len(mixed(part, [1.55], seed=0)) == 155
    with pytest.raises(ValueError, match="2 coefficients for 1 lists"):
        mixed(part, [1, 2], seed=0)


def test_evaluation_on_other_token_data_uses_all_rows_and_no_coefficients(tmp_path):
    save(tmp_path / "other", [feature(k) for k in range(3)])
    section = TokenData(lists=("a", "b"), coefficients=(2, 0.5), validation_lists=("c",), validation_coefficients=(1,), limit=1)
    keys = {**section.model_dump(), **section.keys_for_all(str(tmp_path / "other"))}
    other = TokenData.model_validate_json(json.dumps(keys))
    assert list(other.problems("data", eval_split="test")) == []
    assert sorted(task.id for task in other.build(DataContext(trains=False)).heldout) == [f"other/edit/{k}" for k in range(3)]
