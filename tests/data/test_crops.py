"""Random crops of training images; and what the crop to the model's size removes, which is reported before a run starts."""

import json

import datasets
import numpy as np
import pytest
from PIL import Image

from retouch.data.base import DataContext
from retouch.data.images import Exact
from retouch.data.sources.folder import FolderData
from retouch.data.sources.hub import TableData
from retouch.data.sources.stream import IterableData
from retouch.data.tasks import SMALLEST, Crop, load_task, random_crop

SIDE = 40


def gradient(tmp_path, rows=4):
    """A folder of images, and masks and targets equal to them, whose pixels tell their place: red is x, green is y."""
    folder = tmp_path / "own"
    folder.mkdir()
    y, x = np.mgrid[0:SIDE, 0:SIDE]
    lines = []
    for row in range(rows):
        pixels = np.stack([x * 6, y * 6, np.full_like(x, 10 * row)], axis=-1).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{row}.png")
        Image.fromarray(pixels).save(folder / f"{row}_target.png")
        Image.fromarray(pixels).save(folder / f"{row}_ref.png")
        Image.fromarray((x * 6).astype(np.uint8)).save(folder / f"{row}_mask.png")
        files = {name: f"{row}_{name}.png" for name in ("target", "mask")} | {"reference": f"{row}_ref.png"}
        lines.append({"file_name": f"{row}.png", "instruction": "warmer", "id": f"row{row}", **files})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_training_images_are_cropped_with_their_masks_and_targets_and_held_out_images_are_not(tmp_path):
    sets = FolderData(path=str(gradient(tmp_path)), held_out=1, crops=5).build(DataContext())
    assert (len(sets.train), len(sets.heldout)) == (15, 1)
    assert len({task.id for task in sets.train}) == 15
    assert sets.heldout[0].images[0].size == (SIDE, SIDE)
    for index, task in enumerate(sets.train):
        image, target, mask, reference = (np.asarray(each) for each in (task.images[0], task.target, task.mask, task.reference))
        assert (image == target).all()
        assert (image[..., 0] == mask).all()
        assert reference.shape == (SIDE, SIDE, 3)
        height, width, _ = image.shape
        assert abs(height - width) <= 1
        assert width >= SMALLEST * SIDE - 1
        assert ("#crop" in task.id) == (index >= 3)
        if index < 3:  # the first tasks are the rows as they are
            assert width == SIDE
        x, y = image[0, 0, 0] // 6, image[0, 0, 1] // 6
        assert image[-1, -1, 0] // 6 == x + width - 1
        assert image[-1, -1, 1] // 6 == y + height - 1
    assert len({task.images[0].size for task in sets.train}) > 3


def test_crops_are_the_same_in_each_process_and_resized_after_cropping(tmp_path):
    data = FolderData(path=str(gradient(tmp_path)), held_out=1, crops=3, size=(16, 16))
    first, again = data.build(DataContext(seed=1)), data.build(DataContext(seed=1))
    assert [task.images[0].tobytes() for task in first.train] == [task.images[0].tobytes() for task in again.train]
    assert {task.images[0].size for task in first.train} == {(16, 16)}
    other = data.build(DataContext(seed=2)).train
    assert [task.images[0].tobytes() for task in first.train] != [task.images[0].tobytes() for task in other]
    assert random_crop(1, "row0", 1) == random_crop(1, "row0", 1) != random_crop(1, "row0", 2)


@pytest.mark.parametrize("size", [(1, 1), (3, 50), (101, 7)])
def test_a_crop_lies_in_its_image_and_has_a_pixel(size):
    image = Image.new("RGB", size, (1, 2, 3))
    for number in range(50):
        made = random_crop(0, "row", number).of(image)
        assert 1 <= made.width <= size[0]
        assert 1 <= made.height <= size[1]
        assert made.getcolors() == [(made.width * made.height, (1, 2, 3))]  # no black border
    assert Crop(left=0.0, top=0.0, size=1.0).of(image).size == size


WIDE, SQUARE = (192, 48), (48, 48)


def mask(box, size=WIDE):
    made = Image.new("L", size)
    made.paste(255, box)
    return made


# The part of the photograph that the mask shows, the size of the model, (height, width), and whether the crop keeps any of it.
REGIONS = {
    "at the left": (mask((0, 10, 30, 40)), SQUARE, False),
    "at both ends, with a bounding box around the middle": (mask((190, 10, 192, 40)), SQUARE, False),
    "one pixel beyond the crop": (mask((71, 10, 72, 40)), SQUARE, False),
    "at the first pixel of the crop": (mask((72, 10, 73, 40)), SQUARE, True),
    "at the left of a size of the same shape": (mask((0, 10, 30, 40)), (24, 96), True),
    "at the top of an upright photograph": (mask((10, 0, 40, 30), (48, 192)), SQUARE, False),
    "nowhere: nothing should change": (Image.new("L", WIDE), SQUARE, True),
}
REGIONS["at both ends, with a bounding box around the middle"][0].paste(255, (0, 0, 2, 9))


def rows(shape, count=4):
    return [{"prompt": f"edit {n}", "image": Image.new("RGB", shape.size, (n, 9, 9)), "mask": shape} for n in range(count)]


@pytest.mark.parametrize("case", REGIONS)
def test_point_1_7_a_row_whose_mask_the_crop_removes_is_refused_at_the_start(case, tmp_path):
    shape, size, kept = REGIONS[case]
    stream = datasets.Dataset.from_list(rows(shape)).to_iterable_dataset()
    for number, row in enumerate(rows(shape)):
        row["image"].save(tmp_path / f"{number}.png")
    shape.save(tmp_path / "m.png")
    lines = [{"file_name": f"{n}.png", "instruction": f"edit {n}", "mask": "m.png"} for n in range(4)]
    (tmp_path / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder = FolderData(path=str(tmp_path), held_out=1)
    for data in (TableData.of(rows(shape), held_out=1), folder, folder, IterableData.of(stream, held_out=1, ahead=0)):
        if kept:
            sets = data.build(DataContext(size=size))
            assert sets.heldout[0].mask.getextrema()[1] == shape.getextrema()[1]
        else:  # the second time from the stored check
            with pytest.raises(ValueError, match=r"the crop of \d+x\d+ to the middle.* removes the whole mask"):
                data.build(DataContext(size=size))


def test_point_1_7_a_row_that_is_not_checked_at_the_start_is_refused_when_it_is_drawn():
    row = TableData.of(rows(REGIONS["at the left"][0])).rows(seed=0)[1]
    with pytest.raises(ValueError, match=r"train_dataset:2: the crop of .* removes the whole mask"):
        load_task(row, resize=Exact(48, 48))


def test_point_1_7_no_random_crop_removes_the_whole_mask(tmp_path):
    Image.new("RGB", (48, 48), "red").save(tmp_path / "0.png")
    mask((0, 0, 6, 6), (48, 48)).save(tmp_path / "m.png")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "0.png", "instruction": "x", "mask": "m.png"}\n')
    sets = FolderData(path=str(tmp_path), held_out=0, crops=40).build(DataContext(size=(48, 48), eval_split="train"))
    assert [task.mask.getextrema() for task in sets.train] == [(0, 255)] * 40


def test_point_1_7_crops_of_more_than_half_and_of_what_the_target_changes_are_notes(caplog):
    edited = Image.new("RGB", WIDE, "white")
    edited.paste("blue", (0, 0, 20, 48))
    for target, what in ((edited, "removes the whole region that the target changes"), (None, "keeps 25% of the image")):
        pairs = [{"prompt": f"{n}", "image": Image.new("RGB", WIDE, (255 - n,) * 3), "target": target} for n in range(4)]
        data = TableData.of(pairs if target else rows(mask((0, 0, *WIDE))), held_out=0)
        sets = data.build(DataContext(size=SQUARE, eval_split="train"))
        assert len(sets.problems) == 4
        assert all(what in str(problem) for problem in sets.problems)
        assert "4 of 4 rows are cropped to less than half, or lose what they change" in caplog.text
