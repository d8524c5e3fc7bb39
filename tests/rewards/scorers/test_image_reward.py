"""ImageReward with a strict test double of its published package, and HPS with transformers."""

import sys
import types

import pytest
import torch
from PIL import Image

import tiny_towers
from retouch.rewards.scorers.clip import HpsReward, ImageRewardScore
from retouch.rewards.scorers.dual_encoder import DualEncoder
from retouch.types import Sample, Task
from retouch_worlds.testing import check_reward


class Model:
    """Accepts one image as the package does; the score depends on the length of the prompt and the mean of the image."""

    def __init__(self, device):
        self.device = device
        self.asked = []
        self.answer = None

    def score(self, prompt, image):
        assert isinstance(prompt, str)
        assert not torch.is_grad_enabled()
        if not isinstance(image, Image.Image):  # the package also accepts a path and a list, which the reward never passes
            raise TypeError("This image parameter type has not been supportted yet. Please pass PIL.Image or file path str.")
        pixels = image.convert("RGB")
        self.asked.append((prompt, pixels.tobytes()))
        return len(prompt) / 10 - sum(pixels.resize((1, 1)).getpixel((0, 0))) / 300 if self.answer is None else self.answer


@pytest.fixture
def package(monkeypatch):
    """The package's one function, with its arguments' names and order."""
    made = types.ModuleType("ImageReward")
    made.loaded = []

    def load(name="ImageReward-v1.0", device="cpu", download_root=None):
        assert isinstance(name, str)
        assert isinstance(device, str)
        sys.stdout.write(f"load checkpoint from {name}\n")
        made.loaded.append((name, device, download_root, Model(device)))
        return made.loaded[-1][-1]

    made.load = load
    monkeypatch.setitem(sys.modules, "ImageReward", made)
    return made


def samples():
    return [Sample(Task(str(k), "a red barn " * k), Image.new("RGB", (9, 7), (60 * k, 30, 200 - 50 * k))) for k in (1, 2, 3)]


def test_prompts_and_rgb_pixels_are_passed_to_the_package_unchanged(package, capsys):
    reward = ImageRewardScore()
    check_reward(reward, samples())
    (name, device, cache, model) = package.loaded[0]
    assert (name, device, cache) == ("ImageReward-v1.0", "cpu", None)
    assert model.asked[:3] == [(sample.task.instruction, sample.image.tobytes()) for sample in samples()]
    alpha = Image.new("RGBA", (9, 7), (60, 30, 150, 0))
    reward([Sample(samples()[0].task, alpha)])
    assert model.asked[-1] == (samples()[0].task.instruction, alpha.convert("RGB").tobytes())
    assert capsys.readouterr().out == ""


def test_weights_and_cache_are_passed_to_the_package(package, tmp_path):
    weights = tmp_path / "ImageReward.pt"
    weights.touch()
    ImageRewardScore(weights=weights, cache=tmp_path, device="cpu").build()
    assert package.loaded[0][:3] == (str(weights), "cpu", str(tmp_path))
    with pytest.raises(ValueError, match="is not a file"):
        ImageRewardScore(weights=tmp_path / "nowhere.pt").build()


def test_nan_is_missing_and_no_image_gets_the_lowest_score(package):
    reward = ImageRewardScore().build()
    model = package.loaded[0][-1]
    assert reward([Sample(Task("t", ""), None)])["image_reward"].tolist() == [-10]
    assert model.asked == []
    model.answer = float("nan")
    assert reward(samples()[:1])["image_reward"].isnan().all()
    model.answer = 99.0
    assert reward(samples()[:1])["image_reward"].tolist() == [10]


def test_a_missing_package_raises_with_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "ImageReward", None)
    with pytest.raises(ValueError, match="pip install image-reward"):
        ImageRewardScore().build()


def test_hps_is_the_cosine(tmp_path):
    folder = tiny_towers.clip(tmp_path / "clip")
    given = [Sample(Task(str(k), "a barn " * k), sample.image) for k, sample in enumerate(samples(), start=1)]
    check_reward(HpsReward(path=folder), given)
    cosines, _ = DualEncoder(folder).cosines([sample.task.instruction for sample in given], [sample.image for sample in given])
    scores = HpsReward(path=folder)([*given, Sample(given[0].task, None)])["hps"]
    torch.testing.assert_close(scores[:3], cosines.clamp(min=0))
    assert scores[3] == 0
