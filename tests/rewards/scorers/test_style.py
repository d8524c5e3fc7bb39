"""Similarity to a style reference, and the distance of two sets of images, with tiny random encoders."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Dinov2Model

import tiny_towers
from retouch.core.measures import frechet_distance
from retouch.rewards.scorers.dino import StyleReward, distance_of_sets, normalised_pixels
from retouch.rewards.scorers.dual_encoder import DualEncoder
from retouch.types import Sample, Task
from retouch_worlds.testing import check_reward


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("towers")
    tiny_towers.clip(root / "clip")
    tiny_towers.dino(root / "dino")
    return root


def picture(seed, size=(20, 16)):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def samples(count=3):
    return [Sample(Task(f"t{k}", "a cat", reference=picture(90 + k)), picture(k)) for k in range(count)]


def dino_states(folder, images):
    """The state of the first token of each image, computed with transformers alone."""
    model = Dinov2Model.from_pretrained(folder / "dino").eval()
    with torch.no_grad():
        return model(pixel_values=normalised_pixels(images, 224)).last_hidden_state[:, 0]


@pytest.mark.parametrize("kind", ["dino", "clip"])
def test_style_is_the_cosine_with_the_reference(folder, kind):
    reward = StyleReward(path=folder / kind)
    check_reward(reward, samples())
    scores = reward(samples())["style"]
    images = [[sample.image for sample in samples()], [sample.task.reference for sample in samples()]]
    if kind == "dino":
        made, wanted = (dino_states(folder, each) for each in images)
    else:
        made, wanted = (DualEncoder(folder / "clip").images(each) for each in images)
    torch.testing.assert_close(scores, torch.cosine_similarity(made, wanted).clamp(0, 1), atol=1e-5, rtol=0)
    assert scores.std() > 0


def test_where_mask_compares_only_the_masked_part(folder):
    style = picture(5, (8, 6))
    image = picture(1)
    image.paste(style, (4, 5))
    mask = Image.new("L", image.size, 0)
    mask.paste(255, (4, 5, 12, 11))
    task = Task("t", "a cat", reference=style, mask=mask)
    assert StyleReward(path=folder / "dino", where="mask")([Sample(task, image)])["style"].item() == pytest.approx(1, abs=1e-5)
    assert StyleReward(path=folder / "dino")([Sample(task, image)])["style"].item() < 0.999
    with pytest.raises(ValueError, match="has no mask"):
        StyleReward(path=folder / "dino", where="mask")(samples(1))


def test_no_image_scores_0_and_a_task_without_a_reference_raises(folder):
    reward = StyleReward(path=folder / "dino")
    assert reward([Sample(samples(1)[0].task, None)])["style"].tolist() == [0.0]
    with pytest.raises(ValueError, match="has no reference"):
        reward([Sample(Task("t", "a cat"), picture(0))])


def test_distance_of_sets_is_the_frechet_distance_of_dinov2_features(folder):
    one, other = [picture(k) for k in range(4)], [picture(10 + k) for k in range(5)]
    found = distance_of_sets(one, other, path=str(folder / "dino"))
    assert found == pytest.approx(frechet_distance(dino_states(folder, one), dino_states(folder, other)), rel=1e-3)
    assert distance_of_sets(one, one, path=str(folder / "dino")) == pytest.approx(0, abs=1e-6)
    with pytest.raises(ValueError, match="DINOv2"):
        distance_of_sets(one, other, path=str(folder / "clip"))
