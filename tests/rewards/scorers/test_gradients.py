"""Differentiable rewards: the scores of tensors match those of images, and the gradients match finite differences."""

import numpy as np
import pytest
import torch
from PIL import Image

import tiny_towers
from retouch.objectives.reward_gradient import DIFFERENTIABLE_REWARDS
from retouch.protocols import DifferentiableReward
from retouch.rewards.scorers.clip import AestheticReward, ClipReward, HpsReward, PickScoreReward
from retouch.rewards.scorers.dual_encoder import DualEncoder, tensor_pixels
from retouch.rewards.scorers.pixels import GradeReward, ShareReward, TargetReward
from retouch.types import Sample, Task
from retouch_worlds.testing import check_reward

SIZES = [(16, 16), (20, 16), (16, 20), (9, 13), (64, 40), (100, 37)]


def picture(seed, size=(20, 16), *, smooth=True):
    """A photograph-like image, or noise."""
    side = (size[1] // 4 + 1, size[0] // 4 + 1) if smooth else (size[1], size[0])
    noise = np.random.default_rng(seed).integers(0, 256, (*side, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)


def tensors(images):
    return torch.stack([torch.from_numpy(np.asarray(image).astype(np.float32) / 255).movedim(-1, 0) for image in images])


def samples(count=4, **how):
    words = ("a cat", "two dogs", "a cat", "red")
    return [
        Sample(Task(f"t{k}", words[k], images=(picture(40 + k),), target=picture(30 + k)), picture(k, **how)) for k in range(count)
    ]


@pytest.fixture(scope="module")
def rewards(tmp_path_factory):
    """Each reward, with the column that is differentiated."""
    root = tmp_path_factory.mktemp("towers")
    for name in ("clip", "siglip"):
        tiny_towers.clip(root / name, kind=name)
    tiny_towers.head(root / "head.safetensors")
    return {
        "clip": (ClipReward(path=root / "clip"), "cosine"),
        "siglip": (ClipReward(path=root / "siglip"), "cosine"),
        "pickscore": (PickScoreReward(path=root / "clip"), "pickscore"),
        "hps": (HpsReward(path=root / "clip"), "hps"),
        "aesthetic": (AestheticReward(path=root / "clip", head=root / "head.safetensors"), "aesthetic"),
        "target": (TargetReward(), "closeness"),
        "share": (ShareReward(channel="green"), "share"),
        "grade": (GradeReward(saturation=0.5, colour=(200, 60, 40), strength=0.25), "closeness"),
    }


NAMES = ("clip", "siglip", "pickscore", "hps", "aesthetic", "target", "share", "grade")


def test_every_differentiable_reward_is_tested():
    others = {"several"}  # tests/objectives/test_reward_gradient.py
    assert set(DIFFERENTIABLE_REWARDS.paths) == set(NAMES) - {"siglip"} | others


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [(16, 16), (40, 24)])
def test_scores_of_tensors_match_the_column_of_images(rewards, name, size):
    reward, column = rewards[name]
    assert isinstance(reward, DifferentiableReward)
    given = samples(size=size)
    scores = reward.score_tensors(tensors([sample.image for sample in given]), [sample.task for sample in given])
    low, high = reward.columns[column].low, reward.columns[column].high
    torch.testing.assert_close(scores.clamp(low, high), reward(given)[column], atol=0.01 * high, rtol=0)
    assert scores.std() > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_matches_finite_differences(rewards, name):
    reward, _ = rewards[name]
    given = samples(2, size=(20, 18))
    tasks = [sample.task for sample in given]
    images = (0.1 + 0.8 * tensors([sample.image for sample in given])).requires_grad_()
    (slope,) = torch.autograd.grad(reward.score_tensors(images, tasks).sum(), images)
    length = slope.norm()
    assert length > 0
    with torch.no_grad():
        ends = [reward.score_tensors(images + step * slope / length, tasks).sum() for step in (0.02, -0.02)]
    assert ((ends[0] - ends[1]) / 0.04).item() == pytest.approx(length.item(), rel=0.05)


@pytest.mark.parametrize("name", ["clip", "siglip", "aesthetic"])
def test_no_weight_of_a_model_gets_a_gradient(rewards, name):
    reward, _ = rewards[name]
    encoder = reward.model.encoder if name == "aesthetic" else reward.model
    images = tensors([picture(0)]).requires_grad_()
    reward.score_tensors(images, [Task("t", "red")]).sum().backward()
    assert images.grad is not None
    assert all(parameter.grad is None for parameter in encoder.model.parameters())


@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_tensor_preprocessing_differs_from_the_processor_by_at_most_two_levels(rewards, name, smooth):
    encoder: DualEncoder = rewards[name][0].model
    for size in SIZES:
        image = picture(3, size, smooth=smooth)
        wanted = encoder.processor(images=[image], return_tensors="pt")["pixel_values"]
        found = tensor_pixels(encoder.processor, tensors([image]))
        levels = (found - wanted).abs() * torch.tensor(encoder.processor.image_std)[:, None, None] * 255
        assert found.shape == wanted.shape
        assert levels.max() <= 2, size


def test_an_unsupported_resampling_of_the_processor_raises(rewards):
    processor = rewards["clip"][0].model.processor
    images = tensors([picture(0)])
    kept = processor.resample
    try:
        processor.resample = Image.Resampling.NEAREST
        with pytest.raises(ValueError, match="needs bilinear or bicubic"):
            tensor_pixels(processor, images)
    finally:
        processor.resample = kept


def test_closeness_is_one_minus_the_mean_squared_difference():
    black, gray = Image.new("RGB", (4, 4)), Image.new("RGB", (8, 8), (51, 51, 51))
    reward = TargetReward()
    scores = reward([Sample(Task("t", "x", target=gray), black), Sample(Task("t", "x", target=gray), None)])
    assert scores["closeness"].tolist() == pytest.approx([1 - 0.04, 0.0])
    check_reward(reward, samples())
    with pytest.raises(ValueError, match="task 't' has no target image"):
        reward([Sample(Task("t", "x"), black)])
