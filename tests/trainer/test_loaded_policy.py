"""``LoadedPolicy.sample``: its source images are those of ``retouch sample`` for the same files."""

import numpy as np
import pytest
from PIL import ExifTags, Image

from retouch.data.images import load_image
from retouch.inference import sampling
from retouch.trainer.loaded_run import LoadedPolicy
from retouch.types import Task


@pytest.fixture
def received(monkeypatch):
    """The tasks that reach the policy."""
    tasks: list[Task] = []

    def sample_tasks(parts, given, seed, *, context):
        tasks.extend(given)
        return []

    monkeypatch.setattr(sampling, "sample_tasks", sample_tasks)
    return tasks


def saved(path, mode):
    colours = np.random.default_rng(0).integers(0, 255, (6, 4, 4), dtype=np.uint8)
    if mode == "I;16":
        image = Image.fromarray(colours[..., 0].astype(np.uint16) * 200)
    elif mode == "rotated":
        image = Image.fromarray(colours[..., :3])
        exif = image.getexif()
        exif[ExifTags.Base.Orientation] = 6
        image.save(path, exif=exif)
        return path
    else:
        image = Image.fromarray(colours, "RGBA").convert(mode)
    image.save(path)
    return path


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "I;16", "rotated"])
def test_an_opened_image_and_its_path_become_the_same_source_as_in_the_command(mode, tmp_path, received):
    path = saved(tmp_path / "a.png", mode)
    LoadedPolicy(None).sample(["blue"] * 4, images=[Image.open(path), path, str(path), path.read_bytes()])
    expected = load_image(path)
    for task in received:
        (image,) = task.images
        assert image.mode == "RGB"
        assert np.array_equal(image, expected)


def test_a_single_prompt_takes_a_single_image_or_path(tmp_path, received):
    path = saved(tmp_path / "a.png", "RGB")
    for images in (Image.open(path), path, str(path)):
        LoadedPolicy(None).sample("blue", images=images)
    assert [(task.instruction, len(task.images)) for task in received] == [("blue", 1)] * 3


def test_masks_and_references_become_those_of_the_tasks(tmp_path, received):
    path = saved(tmp_path / "a.png", "RGB")
    mask = Image.new("L", (4, 6), 255)
    LoadedPolicy(None).sample(["blue", "red"], images=[path, path], masks=[mask, None], references=[None, path])
    assert [(task.mask is None, task.reference is None) for task in received] == [(False, True), (True, False)]
    assert received[0].mask is not None
    assert received[0].mask.mode == "L"
    assert np.array_equal(received[0].mask, mask)
    assert np.array_equal(received[1].reference, load_image(path))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"masks": [Image.new("L", (3, 6))]},
            r"masks\[0\]: its size is \(3, 6\), but that of its image \(4, 6\); they must be equal",
        ),
        ({"masks": [Image.new("RGBA", (4, 6))]}, r"masks\[0\]: an image of the table: a mask with transparent parts"),
        ({"masks": []}, r"masks: 0 for 1 prompts"),
        ({"references": ["no.png"]}, r"references\[0\]: no\.png: no such file"),
    ],
)
def test_wrong_masks_and_references_raise_with_their_place(given, message, tmp_path, received):
    path = saved(tmp_path / "a.png", "RGB")
    with pytest.raises(ValueError, match=message):
        LoadedPolicy(None).sample(["blue"], images=[path], **given)
    assert received == []


@pytest.mark.parametrize(
    ("prompts", "images", "message"),
    [
        ([], None, "prompts: the list is empty; give at least one prompt"),
        ([], [], "prompts: the list is empty; give at least one prompt"),
        (["a", "b"], [None, 3], r"images\[1\]: should be a PIL image, a path or the bytes of a file, not int"),
        (["a", "b"], [None, "no.png"], r"images\[1\]: no\.png: no such file"),
        (["a"], Image.new("F", (4, 4)), r"images\[0\]: an image of mode F, whose range is not known"),
    ],
)
def test_wrong_prompts_and_images_raise_with_their_place(prompts, images, message):
    with pytest.raises(ValueError, match=message):
        LoadedPolicy(None).sample(prompts, images=images)
