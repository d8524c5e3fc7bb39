"""The ``grade`` reward: against grades computed by hand, at other sizes, and its gradient."""

import numpy as np
import pytest
import torch
from PIL import Image

from retouch.rewards.scorers.pixels import GradeReward
from retouch.types import Sample, Task


def photograph(width: int = 24, height: int = 16) -> Image.Image:
    ramp = np.linspace(0, 255, width * height * 3).reshape(height, width, 3)
    return Image.fromarray((ramp * [1.0, 0.6, 0.3]).astype(np.uint8))


def task(source: Image.Image | None) -> Task:
    return Task(id="one", instruction="grade it", images=() if source is None else (source,))


def closeness(reward: GradeReward, image: Image.Image | None, source: Image.Image) -> float:
    return float(reward([Sample(task(source), image)])["closeness"])


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, lambda pixels, grey: pixels),
        ({"saturation": 0}, lambda pixels, grey: grey),
        ({"saturation": 0.25}, lambda pixels, grey: grey + 0.25 * (pixels - grey)),
        ({"saturation": 3}, lambda pixels, grey: np.clip(grey + 3 * (pixels - grey), 0, 1)),
        ({"colour": [255, 0, 0], "strength": 0.5}, lambda pixels, grey: 0.5 * pixels + 0.5 * np.array([1.0, 0, 0])),
        ({"saturation": 0, "colour": [0, 0, 255], "strength": 0.25}, lambda p, grey: 0.75 * grey + 0.25 * np.array([0, 0, 1.0])),
    ],
)
def test_closeness_equals_the_distance_to_a_grade_by_hand(keys, expected):
    source, image = photograph(), Image.new("RGB", (24, 16), (90, 120, 30))
    pixels = np.asarray(source) / 255
    grey = (pixels @ [0.299, 0.587, 0.114])[..., None]
    by_hand = 1 - np.sqrt(np.mean((np.asarray(image) / 255 - expected(pixels, grey)) ** 2))
    assert closeness(GradeReward(**keys), image, source) == pytest.approx(by_hand, abs=1e-6)


def test_the_range_is_0_to_1_and_a_missing_image_scores_0():
    black, white = Image.new("RGB", (8, 8)), Image.new("RGB", (8, 8), (255, 255, 255))
    assert closeness(GradeReward(), white, black) == 0
    assert closeness(GradeReward(), None, black) == 0


def test_a_source_of_another_size_is_resized_to_the_image():
    source = photograph(48, 32)
    small = source.resize((24, 16), Image.Resampling.LANCZOS)
    assert closeness(GradeReward(), small, source) == 1


def test_a_task_without_a_source_raises():
    with pytest.raises(ValueError, match="source"):
        GradeReward()([Sample(task(None), photograph())])


def test_scores_of_tensors_equal_the_column_and_their_gradient_points_to_the_graded_source():
    reward, source = GradeReward(saturation=0), photograph()
    images = torch.rand(2, 3, 16, 24, generator=torch.Generator().manual_seed(0)).mul(255).round().div(255).requires_grad_()
    pictures = [Image.fromarray(each.mul(255).round().byte().movedim(0, -1).numpy()) for each in images.detach()]
    column = reward([Sample(task(source), each) for each in pictures])["closeness"]
    scores = reward.score_tensors(images, [task(source)] * 2)
    torch.testing.assert_close(scores, column, atol=1e-6, rtol=0)
    (gradient,) = torch.autograd.grad(scores.sum(), images)
    target = reward._graded(task(source), (24, 16)).float()
    torch.testing.assert_close(gradient.sign(), (target - images).detach().sign())
    same = target[None].clone().requires_grad_()
    (flat,) = torch.autograd.grad(reward.score_tensors(same, [task(source)]).sum(), same)
    assert torch.isfinite(flat).all()


@pytest.mark.parametrize("keys", [{"saturation": -1}, {"strength": 1.5}, {"colour": [0, 0, 256]}])
def test_keys_out_of_range_raise(keys):
    with pytest.raises(ValueError, match=next(iter(keys))):
        GradeReward(**keys)
