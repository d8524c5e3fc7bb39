"""LPIPS with random weights of AlexNet's shapes: compared with the definition, layer by layer, and the effect of a mask."""

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from pictures import picture
from retouch.types import Sample, Task
from retouch_rewards.dino import LpipsReward
from retouch_worlds.testing import check_reward

SIZE = (64, 64)


@pytest.fixture(scope="module")
def network():
    """AlexNet's features as torchvision lays them out, and a weight per channel of each layer."""
    torch.manual_seed(3)
    first = [nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Conv2d(64, 192, 5, padding=2), nn.ReLU()]
    sizes = ((192, 384), (384, 256), (256, 256))
    rest = [layer for size in sizes for layer in (nn.Conv2d(*size, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*first, nn.MaxPool2d(3, 2), *rest), [torch.rand(width) for width in (64, 192, 384, 256, 256)]


@pytest.fixture(scope="module")
def weights(network, tmp_path_factory):
    path = tmp_path_factory.mktemp("lpips") / "alex.safetensors"
    layers, linear = network
    tensors = {f"features.{name}": tensor.contiguous() for name, tensor in layers.state_dict().items()}
    save_file(tensors | {f"lin{k}.model.1.weight": row.view(1, -1, 1, 1) for k, row in enumerate(linear)}, path)
    return path


def test_the_distance_matches_the_published_definition(weights, network):
    a, b = picture(1, SIZE), picture(2, SIZE)
    layers, linear = network

    def maps(image):
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1).float()[None] / 255 * 2 - 1
        x = (x - torch.tensor([-0.030, -0.088, -0.188]).view(1, 3, 1, 1)) / torch.tensor([0.458, 0.448, 0.450]).view(1, 3, 1, 1)
        found = []
        for place, layer in enumerate(layers):
            x = layer(x)
            if place in (1, 4, 7, 9, 11):  # relu1 to relu5
                found.append(nn.functional.normalize(x, dim=1))
        return found

    with torch.no_grad():
        expected = sum(
            ((left - right).square() * row.view(1, -1, 1, 1)).sum(dim=1).mean()
            for left, right, row in zip(maps(a), maps(b), linear, strict=True)
        )
    assert LpipsReward(weights=weights, size=64).distance(a, b) == pytest.approx(float(expected), rel=1e-4)
    assert expected > 0


def test_changes_under_the_mask_weigh_less(weights):
    source = picture(5, (128, 128))
    edited = source.copy()
    edited.paste(picture(6, SIZE), (0, 0))
    corner = Image.new("L", (128, 128), 0)
    corner.paste(255, (0, 0, 64, 64))
    reward = LpipsReward(weights=weights, size=128)
    outside, inside = (reward.distance(source, edited, mask) for mask in (corner, Image.eval(corner, lambda value: 255 - value)))
    assert outside < reward.distance(source, edited) < inside
    assert reward.distance(source, edited, Image.new("L", (128, 128), 255)) == 0
    reward = LpipsReward(weights=weights, size=64)
    check_reward(reward, [Sample(Task(str(k), "", images=(picture(10 + k, SIZE),)), picture(k, SIZE)) for k in range(3)])
    same = Sample(Task("t", "", images=(picture(1, SIZE),)), picture(1, SIZE))
    assert reward([same, Sample(same.task, None)])["preservation"].tolist() == [1, 0]


def test_invalid_weights_size_or_samples_raise(weights, tmp_path):
    save_file({"features.0.weight": torch.zeros(2)}, tmp_path / "other")
    for keys, says in (
        ({"weights": tmp_path / "other"}, "lacks"),
        ({"weights": tmp_path / "nowhere"}, "not a safetensors"),
        ({"weights": weights, "size": 32}, "greater than or equal to 64"),
        ({"weights": weights}, "no source"),
    ):
        with pytest.raises(ValueError, match=says):
            LpipsReward(**keys).build()([Sample(Task("t", ""), picture(1, SIZE))])
