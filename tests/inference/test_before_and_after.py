"""Images before and after training, side by side."""

import json
from pathlib import Path

import pytest
from PIL import Image

from retouch.inference.side_by_side import before_and_after
from retouch.records.folder import RunFolder


def write_samples(folder: Path, step: int, colour: str, *, size: tuple[int, int]) -> None:
    place = RunFolder(folder).samples(step)
    place.mkdir(parents=True)
    Image.new("RGB", size, colour).save(place / "image.png")
    line = {"step": step, "set": "heldout", "task": "a", "instruction": "make it red", "group": 0, "slot": 0, "tags": {}}
    files = {"image": "image.png", "source": None, "target": None}
    line |= files | {"scores": {"match": 1.0}, "reward": 1.0, "advantage": None}
    (place / "samples.jsonl").write_text(json.dumps(line) + "\n")


@pytest.mark.parametrize(("size", "shown"), [((24, 12), (120, 60)), ((100, 50), (100, 50)), ((256, 128), (128, 64))])
def test_small_images_are_enlarged_and_large_images_reduced(tmp_path: Path, size: tuple[int, int], shown: tuple[int, int]) -> None:
    write_samples(tmp_path, 0, "red", size=size)
    write_samples(tmp_path, 20, "blue", size=size)
    sheet = before_and_after(tmp_path)
    assert sheet.size == (264, 146)
    for left, colour in ((0, (255, 0, 0)), (132, (0, 0, 255))):
        corner = (left + shown[0] - 1, 14 + shown[1] - 1)
        assert sheet.getpixel(corner) == colour
        assert sheet.getpixel((left + shown[0], 14)) == (255, 255, 255)
