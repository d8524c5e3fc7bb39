"""Random crops of training images."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from retouch.data.base import DataContext
from retouch.data.crops import SMALLEST, Crop, random_crop
from retouch.data.sources.folder import FolderData

SIDE = 40


def gradient(tmp_path: Path, rows: int = 4) -> Path:
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


def test_training_images_are_cropped_with_their_masks_and_targets_and_held_out_images_are_not(tmp_path: Path) -> None:
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


def test_crops_are_the_same_in_each_process_and_resized_after_cropping(tmp_path: Path) -> None:
    data = FolderData(path=str(gradient(tmp_path)), held_out=1, crops=3, size=(16, 16))
    first, again = data.build(DataContext(seed=1)), data.build(DataContext(seed=1))
    assert [task.images[0].tobytes() for task in first.train] == [task.images[0].tobytes() for task in again.train]
    assert {task.images[0].size for task in first.train} == {(16, 16)}
    other = data.build(DataContext(seed=2)).train
    assert [task.images[0].tobytes() for task in first.train] != [task.images[0].tobytes() for task in other]
    assert random_crop(1, "row0", 1) == random_crop(1, "row0", 1) != random_crop(1, "row0", 2)


@pytest.mark.parametrize("size", [(1, 1), (3, 50), (101, 7)])
def test_a_crop_lies_in_its_image_and_has_a_pixel(size: tuple[int, int]) -> None:
    image = Image.new("RGB", size, (1, 2, 3))
    for number in range(50):
        made = random_crop(0, "row", number).of(image)
        assert 1 <= made.width <= size[0]
        assert 1 <= made.height <= size[1]
        assert made.getcolors() == [(made.width * made.height, (1, 2, 3))]  # no black border
    assert Crop(left=0.0, top=0.0, size=1.0).of(image).size == size


def test_one_version_is_the_default_and_not_written_into_the_recipe(tmp_path: Path) -> None:
    data = FolderData(path=str(gradient(tmp_path)), held_out=1)
    assert "crops" not in data.model_dump()
    assert len(data.build(DataContext()).train) == 3
