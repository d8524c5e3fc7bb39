"""FID: the network against the stored outputs of pytorch-fid's, block by block, and the distance of small sets."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import tiny_inception
from retouch_bench.inception import InceptionFeatures, fid, inception_shapes, load_inception
from retouch_rewards.measures import frechet_distance

# Made with pytorch-fid 0.3.0 and torchvision 0.29.1: the weights and the input of tiny_inception, loaded into InceptionV3, whose
# names and shapes they have; tiny_inception.summary of the outputs of its blocks.
GOLDEN = json.loads((Path(__file__).parents[2] / "support" / "golden" / "fid_inception.json").read_text())


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("inception") / "inception.safetensors"
    save_file(tiny_inception.weights(), path)
    return path


@pytest.fixture(scope="module")
def network(file):
    return InceptionFeatures(load_inception(file), device="cpu")


def images(seed, count):
    values = np.random.default_rng(seed).integers(0, 256, (count, 30, 40, 3), dtype=np.uint8)
    return [Image.fromarray(each) for each in values]


def test_every_block_equals_that_of_pytorch_fid(network):
    with torch.no_grad():
        maps = network.maps(tiny_inception.pixels())
    assert list(maps) == list(GOLDEN["blocks"])
    for name, expected in GOLDEN["blocks"].items():
        assert tiny_inception.summary(maps[name]) == pytest.approx(expected, abs=2e-4, rel=2e-3), name
    features = maps["Mixed_7c"].mean(dim=(2, 3))[0]
    assert features.shape == (2048,)
    assert features[::64].tolist() == pytest.approx(GOLDEN["features"], abs=2e-4, rel=2e-3)


def test_network_has_as_many_weights_as_that_of_keras():
    kernels = [shape for name, shape in inception_shapes().items() if name.endswith("conv.weight")]
    assert len(kernels) == 94
    # InceptionV3 of Keras has 21 802 784 numbers without its classifier; three per channel belong to the batch norms.
    assert sum(int(np.prod(shape)) for shape in kernels) == 21_802_784 - 3 * sum(shape[0] for shape in kernels)


@pytest.mark.slow
def test_fid_is_the_frechet_distance_of_the_features(file, network):
    one, other = images(0, 3), [Image.new("RGB", (20, 30), colour) for colour in ("red", "white")]
    vectors = [torch.stack([network(image) for image in each]) for each in (one, other)]
    found = fid(one, other, weights=file)
    assert found == pytest.approx(frechet_distance(vectors[0], vectors[1]), rel=1e-6)
    assert found > 1e-3
    grey = Image.new("L", (5, 7), 51)
    assert torch.equal(network(grey), network(grey.convert("RGB")))


def test_files_of_other_networks_are_refused(file, tmp_path):
    two = images(0, 2)
    with pytest.raises(ValueError, match="1 and 2 images: FID needs at least two of each"):  # before the weights are read
        fid(images(0, 1), two, weights=tmp_path / "no.safetensors")
    with pytest.raises(ValueError, match=r"no\.safetensors is not a safetensors file; FID needs one with the tensors of pt_incep"):
        fid(two, two, weights=tmp_path / "no.safetensors")
    tensors = tiny_inception.weights()
    for name, value in (("fc.weight", torch.zeros(1000, 2048)), ("Mixed_6b.branch7x7_2.conv.weight", torch.zeros(128, 128, 7, 1))):
        other = tmp_path / "other.safetensors"
        save_file({**tensors, name: value}, other)
        with pytest.raises(ValueError, match=rf"1 are missing or have another shape, such as '{name}'"):
            fid(two, two, weights=other)
