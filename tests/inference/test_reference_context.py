"""The reference image as context: the canvas against hand-made images, and sampling with an inpainting model and its IP-Adapter."""

import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageChops

import retouch
import tiny_encoders
import tiny_flux_runs
import tiny_models
from image_levels import ROUNDING, encode, max_level_difference
from retouch.cli import main
from retouch.inference import sampling
from retouch.inference.sampling import reference_canvas, sample_list, sample_target, sample_tasks, sized_by_source
from retouch.policies.denoising import DenoisingPolicy
from retouch.recipe.recipe import parse
from retouch.run.session import run
from retouch.types import Task
from retouch_models.flux.model import FluxFill, FluxText

RED, BLUE, GREEN = (255, 0, 0), (0, 0, 255), (0, 255, 0)


def task_of(source, reference):
    """A blue image with a green left column, whose right half is masked, and a red reference. Sizes are (width, height) in px."""
    image = Image.new("RGB", source, BLUE)
    image.paste(GREEN, (0, 0, 1, source[1]))
    mask = Image.new("L", source)
    mask.paste(255, (source[0] // 2, 0, *source))
    return Task("photos/1", "x", images=(image,), mask=mask, reference=Image.new("RGB", reference, RED))


def test_canvas_has_the_scaled_reference_above_the_source_and_a_mask_of_zeros_there():
    task = task_of((32, 16), (8, 4))
    canvas = reference_canvas(task)
    # 32 px wide; the reference of 8 x 4 px becomes 32 x 16 px
    picture = np.empty((32, 32, 3), np.uint8)
    picture[:16] = RED
    picture[16:] = BLUE
    picture[16:, 0] = GREEN
    mask = np.zeros((32, 32), np.uint8)
    mask[16:, 16:] = 255
    (image,) = canvas.task.images
    assert canvas.top == 16
    assert image.mode == "RGB"
    assert np.array_equal(image, picture)
    assert canvas.task.mask.mode == "L"
    assert np.array_equal(canvas.task.mask, mask)
    assert (canvas.task.id, canvas.task.instruction, canvas.task.reference) == ("photos/1", "x", task.reference)
    assert np.array_equal(image.crop((0, canvas.top, image.width, image.height)), task.images[0])


@pytest.mark.parametrize(
    ("width", "reference", "top"),
    [
        (512, (568, 326), 288),  # 512 * 326 / 568 = 293.9; 288 and 304 are the neighbours
        (64, (64, 24), 16),  # the smaller one of 16 and 32
        (64, (64, 25), 32), (64, (64, 40), 32), (64, (64, 41), 48),
        (64, (640, 10), 16),  # 1 px; the context is never empty
        (64, (10, 40), 256),
        (16, (47, 100), 32),  # 34.04
    ],
)  # fmt: skip
def test_height_of_the_context_is_the_nearest_multiple_of_16(width, reference, top):
    canvas = reference_canvas(task_of((width, 32), reference))
    assert canvas.top == top
    assert canvas.task.images[0].size == (width, top + 32)
    assert canvas.task.mask.size == (width, top + 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reference": None}, "context: task 'photos/1' has no reference image; give one"),
        ({"mask": None}, "context: task 'photos/1' has 1 images and no mask; give one source image and a mask"),
        ({"images": ()}, "context: task 'photos/1' has 0 images and a mask"),
        ({"mask": Image.new("L", (16, 32))}, "the mask is 16x32 but its image 32x16"),
        ({"reference": Image.new("RGB", (10, 41))}, "the reference image of task 'photos/1' is 10x41; crop it to at most 4 times"),
    ],
)
def test_a_task_without_the_images_of_a_canvas_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        reference_canvas(replace(task_of((32, 16), (8, 4)), **changes))


# Sampling with tiny models of the real classes


@pytest.fixture(scope="module")
def short_prompts():
    """Pad T5's input to 30 tokens instead of 512; the tiny model would spend all its time on them."""
    original = FluxText.__init__

    def shorter(self, *parts, max_sequence_length=30, **named):
        original(self, *parts, max_sequence_length=max_sequence_length, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FluxText, "__init__", shorter)
        yield


@pytest.fixture(scope="module")
def world(tmp_path_factory, short_prompts):
    """Weights, triplets, and a run of two steps of an IP-Adapter; its model has a fixed size of 32 x 48 px."""
    root = tmp_path_factory.mktemp("world")
    tiny_models.save_flux(root / "fill", fills=True)
    tiny_encoders.write(root)
    data = tiny_flux_runs.make_triplets(root / "triplets", {3: "red", 11: "blue-ish", 17: "green"})
    assert run(parse(recipe_of(root, data)), fresh=False) == 0
    return root


def recipe_of(root, data):
    model = {"kind": "flux-fill", "path": str(root / "fill"), "size": [32, 48]}
    made = tiny_flux_runs.small(model, data, root / "runs")
    made["policy"]["train"] = {"kind": "ip-adapter", "encoder": str(root / "siglip"), "tokens": 2, "projection": "mlp"}
    return made


def files(world):
    given = {name: world / "triplets" / f"test3_{file}.png" for name, file in (("image", "source"), ("mask", "mask"))}
    return {**given, "reference": world / "triplets" / "test11_ref.png", "instruction": "blue", "seed": 0}


def test_command_samples_the_canvas_and_writes_the_part_below_the_reference(world, tmp_path, monkeypatch):
    seen: list[Task] = []
    decoded: list[Image.Image] = []
    sample, decode = DenoisingPolicy.sample, FluxFill.decode

    def sampling_of(self, batch):
        seen.extend(batch.tasks)
        return sample(self, batch)

    def decoding(self, x, conditioning):
        decoded.extend(decode(self, x, conditioning))
        return decoded[-len(x) :]

    monkeypatch.setattr(DenoisingPolicy, "sample", sampling_of)
    monkeypatch.setattr(FluxFill, "decode", decoding)
    given = files(world)
    words = [word for name in ("image", "mask", "reference", "instruction") for word in (f"--{name}", str(given[name]))]
    words += ["--out", str(tmp_path / "out.png"), "--context", "reference"]
    assert main(["sample", str(world / "runs" / "small"), *words]) == 0
    (task,), (canvas,) = seen, decoded
    # the reference is 23 x 15 px: 48 * 15 / 23 = 31.3, so the context has 32 px
    assert canvas.size == task.images[0].size == (48, 64)
    with Image.open(tmp_path / "out.png") as made, Image.open(given["image"]) as source:
        assert made.size == (48, 32)
        assert np.array_equal(made, canvas.crop((0, 32, 48, 64)))
        assert np.array_equal(task.images[0].crop((0, 32, 48, 64)), source)


def test_python_and_lists_make_the_image_of_the_command(world, tmp_path):
    given, target = files(world), str(world / "runs" / "small")
    one = sample_target(target, **given, context="reference", out=tmp_path / "one.png")
    assert one.task.images[0].size == one.image.size == (48, 32)
    policy = retouch.load_run(world / "runs" / "small").policy
    named = {"images": given["image"], "masks": given["mask"], "references": given["reference"]}
    (own,) = policy.sample("blue", **named, context="reference")
    assert np.array_equal(own, one.image)  # both batches have one row
    plain, again = (policy.sample("blue", **named, seed=0)[0] for _ in range(2))  # the size of the model is restored
    assert plain.size == (48, 32)
    assert np.array_equal(plain, again)
    assert ImageChops.difference(plain, own).getbbox() is not None
    line = {"instruction": "blue", "image": "test3_source.png", "mask": "test3_mask.png", "reference": "test11_ref.png"}
    listed = world / "triplets" / "list.jsonl"
    listed.write_text(json.dumps(line) + "\n" + json.dumps({**line, "reference": "test3_mask.png"}) + "\n")
    made = sample_list(target, instructions=listed, context="reference", out=tmp_path / "many", seed=0)
    (pixels,) = encode([one.image])
    assert max_level_difference([pixels], encode([made[0].image])) <= ROUNDING  # this batch has two rows
    assert max_level_difference([pixels], encode([made[1].image])) > ROUNDING  # the image of another reference
    assert made[1].image.size == (48, 32)


def test_missing_images_are_refused_before_the_model_is_loaded(world, tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "open_policy", lambda *given: pytest.fail("the policy was opened"))
    run_folder, listed = str(world / "runs" / "small"), world / "triplets" / "without.jsonl"
    for without, message in (
        ("mask", "this model fills the masked part of an image; give a mask with --mask"),
        ("reference", "the IP-Adapter of this policy reads a reference image; give one with --reference"),
    ):
        with pytest.raises(ValueError, match=message):
            sample_target(run_folder, **{**files(world), without: None}, context="reference", out=tmp_path / "a.png")
    listed.write_text('{"instruction": "blue", "image": "test3_source.png", "mask": "test3_mask.png"}\n')
    with pytest.raises(ValueError, match=r"context: task 'without/1' has no reference image"):
        sample_list(run_folder, instructions=listed, context="reference", out=tmp_path / "many", seed=0)


def test_a_model_that_fills_no_mask_and_an_unknown_context_are_refused(tmp_path, capsys):
    Image.new("RGB", (16, 16), "red").save(tmp_path / "a.png")
    words = ["--image", str(tmp_path / "a.png"), "--reference", str(tmp_path / "a.png"), "--context", "reference"]
    words += ["--instruction", "x", "--out", str(tmp_path / "out.png")]
    assert main(["sample", "qwen-image-edit/ip-adapter-grpo-playground", *words]) == 2
    assert "context: this policy fills no masked part of an image; use an inpainting model" in capsys.readouterr().err
    with pytest.raises(ValueError, match="context: object fills no masked part of an image"), sized_by_source(object()):
        pass
    with pytest.raises(ValueError, match="context: 'left' is not known; use 'reference' or None"):
        list(sample_tasks(None, [], 0, context="left"))
