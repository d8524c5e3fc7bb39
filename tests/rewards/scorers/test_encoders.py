"""Rewards that use CLIP, SigLIP, DINOv2 or ImageReward's package: scores of images and of tensors, with tiny random models."""

import json
import shutil
import sys
import types

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CLIPModel, Dinov2Model, SiglipModel

import tiny_towers
from retouch.core.measures import frechet_distance
from retouch.objectives.reward_gradient import DIFFERENTIABLE_REWARDS
from retouch.protocols import DifferentiableReward, Reward
from retouch.rewards.pixels import GradeReward, ShareReward, TargetReward
from retouch.rewards.weights import weights_folder
from retouch.types import Sample, Task
from retouch_rewards.clip import AestheticReward, ClipReward, HpsReward, ImageRewardScore, PickScoreReward
from retouch_rewards.dino import DinoReward, StyleReward, distance_of_sets
from retouch_rewards.networks import DualEncoder, normalised_pixels, tensor_pixels
from retouch_worlds.testing import check_reward


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("towers")
    for name in ("clip", "siglip"):
        tiny_towers.clip(root / name, kind=name)
    tiny_towers.dino(root / "dino")
    tiny_towers.head(root / "head.safetensors")
    return root


def picture(seed, size=(20, 16)):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def samples(count=4):
    words = ("a cat", "two dogs", "a cat", "red")
    return [Sample(Task(f"t{k}", words[k], images=(picture(50 + k),)), picture(k)) for k in range(count)]


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_clip_reward_passes_the_contract_checks(folder, kind):
    reward = ClipReward(path=folder / kind)
    assert isinstance(reward, Reward)
    check_reward(reward, samples())


def test_the_cosine_matches_the_logits_of_transformers(folder):
    """transformers' forward gives logits = scale x cosine (CLIP), scale x cosine + bias (SigLIP)."""
    for kind, model_class in (("clip", CLIPModel), ("siglip", SiglipModel)):
        towers = DualEncoder(folder / kind)
        model = model_class.from_pretrained(folder / kind).eval()
        given = samples(2)
        cosines, truncated = towers.cosines([sample.task.instruction for sample in given], [sample.image for sample in given])
        assert not truncated.any()
        for cosine, sample in zip(cosines, given, strict=True):
            padding = "max_length" if kind == "siglip" else False
            tokens = towers.tokenizer(sample.task.instruction, padding=padding, max_length=20, return_tensors="pt")
            pixels = towers.processor(images=[sample.image], return_tensors="pt")["pixel_values"]
            with torch.no_grad():
                logit = model(input_ids=tokens["input_ids"], pixel_values=pixels).logits_per_image
            bias = model.logit_bias.item() if kind == "siglip" else 0.0
            assert cosine.item() == pytest.approx((logit.item() - bias) / model.logit_scale.exp().item(), abs=1e-5)


def test_clip_score_and_similarity_are_computed_from_the_cosine(folder):
    scores = ClipReward(path=folder / "clip")(samples())
    cosine = scores["cosine"]
    assert cosine.std() > 1e-3
    assert torch.equal(scores["clip_score"], 2.5 * cosine.clamp(min=0))
    assert torch.equal(scores["similarity"], cosine.clamp(min=0))


def test_truncated_text_is_reported_and_its_end_is_ignored(folder):
    image = picture(1)
    fits, long, longer = "a" * 18, "a" * 19, "a" * 18 + "xyz"
    scores = ClipReward(path=folder / "clip")([Sample(Task(text, text), image) for text in (fits, long, longer)])
    assert scores["truncated"].tolist() == [0, 1, 1]
    assert scores["cosine"][1] == scores["cosine"][2]


def test_no_image_gets_the_lowest_scores(folder):
    given = [samples(1)[0], Sample(Task("t", "a cat"), None)]
    scores = ClipReward(path=folder / "clip")(given)
    assert {name: column[1].item() for name, column in scores.items() if name != "truncated"} == {
        "cosine": -1,
        "clip_score": 0,
        "similarity": 0,
    }
    assert scores["truncated"].isnan().tolist() == [False, True]  # a diagnostic does not apply
    assert PickScoreReward(path=folder / "clip")(given)["pickscore"][1] == 0
    assert PickScoreReward(path=folder / "clip")(given[1:])["pickscore"].tolist() == [0]


def test_pickscore_is_the_scaled_cosine(folder):
    reward = PickScoreReward(path=folder / "clip")
    check_reward(reward, samples())
    cosine = ClipReward(path=folder / "clip")(samples())["cosine"]
    scale = CLIPModel.from_pretrained(folder / "clip").logit_scale.exp()
    torch.testing.assert_close(reward(samples())["pickscore"], (scale * cosine).clamp(min=0).detach())


def test_aesthetic_score_equals_the_layers_of_the_head_on_clip_embeddings(folder):
    reward = AestheticReward(head=folder / "head.safetensors", path=folder / "clip")
    check_reward(reward, samples())
    layers = torch.nn.Sequential(
        torch.nn.Linear(12, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1)
    )
    layers.load_state_dict(
        {name.removeprefix("layers."): tensor for name, tensor in load_file(folder / "head.safetensors").items()}
    )
    vectors = DualEncoder(folder / "clip").images([sample.image for sample in samples()])
    with torch.no_grad():
        expected = layers.eval()(vectors)[:, 0].clamp(0, 10)
    torch.testing.assert_close(reward(samples())["aesthetic"], expected)
    assert expected.std() > 0


def test_invalid_aesthetic_heads_raise(folder, tmp_path):
    with pytest.raises(ValueError, match="set path to the CLIP"):
        AestheticReward(head=tiny_towers.head(tmp_path / "wide", sizes=(13, 4, 1)), path=folder / "clip").build()
    with pytest.raises(ValueError, match="to give one number"):
        AestheticReward(head=tiny_towers.head(tmp_path / "two", sizes=(12, 4, 2)), path=folder / "clip").build()
    save_file({"weight": torch.zeros(1)}, tmp_path / "other")
    with pytest.raises(ValueError, match="layers"):
        AestheticReward(head=tmp_path / "other", path=folder / "clip").build()
    (tmp_path / "pickle").write_bytes(b"\x80\x04")
    for missing in ("pickle", "nowhere"):
        with pytest.raises(ValueError, match="not a safetensors"):
            AestheticReward(head=tmp_path / missing, path=folder / "clip").build()


def test_preservation_passes_the_contract_checks_and_is_1_for_the_same_image(folder):
    reward = DinoReward(path=folder / "dino", size=28)
    check_reward(reward, samples())
    source = picture(9, (28, 28))
    same, other, none = reward([Sample(Task("t", "", images=(source,)), image) for image in (source, picture(10, (28, 28)), None)])[
        "preservation"
    ]
    assert same.item() == pytest.approx(1, abs=1e-6)
    assert other < 0.95
    assert none == 0


def test_preservation_weighs_only_features_outside_the_mask(folder):
    """Each feature sees the whole image, so a change under the mask also affects features outside it, but has no weight itself."""
    reward = DinoReward(path=folder / "dino", size=28)
    source = picture(9, (28, 28))
    edited = source.copy()
    edited.paste(picture(10, (14, 28)), (0, 0))
    left = Image.new("L", (28, 28), 0)
    left.paste(255, (0, 0, 14, 28))
    right = Image.eval(left, lambda value: 255 - value)
    whole = Image.new("L", (28, 28), 255)

    def kept(mask):
        return reward([Sample(Task("t", "", images=(source,), mask=mask), edited)])["preservation"].item()

    assert kept(left) > kept(None) > kept(right)
    assert kept(None) == pytest.approx((kept(left) + kept(right)) / 2, abs=1e-6)
    assert kept(whole) == 1


def test_absent_or_unsuitable_weights_raise_with_the_reason(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="hf download no-such-owner/no-such-model"):
        ClipReward(path="no-such-owner/no-such-model").build()
    with pytest.raises(ValueError, match="not on this machine"):
        weights_folder("not an id at all!")
    pickled = tmp_path / "pickled"
    shutil.copytree(folder / "clip", pickled)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pickle"):
        ClipReward(path=pickled).build()
    with pytest.raises(ValueError, match="clip or siglip"):
        ClipReward(path=folder / "dino").build()
    with pytest.raises(ValueError, match="DINOv2"):
        DinoReward(path=folder / "dino", size=30).build()
    with pytest.raises(ValueError, match="no source"):
        DinoReward(path=folder / "dino", size=28)([Sample(Task("t", ""), picture(1))])
    scaled = tmp_path / "scaled"
    shutil.copytree(folder / "clip", scaled)
    save_file(
        {**load_file(scaled / "model.safetensors"), "logit_scale": torch.tensor(5.0)},
        scaled / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(ValueError, match="another model"):
        PickScoreReward(path=scaled).build()
    assert json.loads((folder / "clip" / "config.json").read_text())["model_type"] == "clip"


@pytest.mark.parametrize(
    ("removed", "says"),
    [
        (["tokenizer.json", "tokenizer_config.json"], r"has no tokenizer \(tokenizer.json\); put the files"),
        (["preprocessor_config.json"], r"has no image processor \(preprocessor_config.json\); put the files"),
    ],
)
def test_an_encoder_without_a_tokenizer_or_an_image_processor_is_refused(folder, tmp_path, removed, says):
    incomplete = tmp_path / "incomplete"
    shutil.copytree(folder / "clip", incomplete)
    for name in removed:
        (incomplete / name).unlink()
    with pytest.raises(ValueError, match=says):
        ClipReward(path=incomplete).build()


def test_pickscore_from_its_repository_alone_is_refused_with_both_downloads(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda path, **options: str(tmp_path / "cached"))
    shutil.copytree(folder / "clip", tmp_path / "cached", ignore=shutil.ignore_patterns("tokenizer*", "preprocessor*"))
    with pytest.raises(ValueError, match=r"no tokenizer .* and no image processor") as error:
        PickScoreReward().build()
    assert "hf download yuvalkirstain/PickScore_v1 config.json model.safetensors --local-dir weights/pickscore && " in str(
        error.value
    )
    assert "hf download laion/CLIP-ViT-H-14-laion2B-s32B-b79K preprocessor_config.json tokenizer.json " in str(error.value)
    assert str(error.value).endswith("give this folder as path: weights/pickscore")


def styled(count=3):
    return [Sample(Task(f"t{k}", "a cat", reference=picture(90 + k)), picture(k)) for k in range(count)]


def dino_states(folder, images):
    """The state of the first token of each image, computed with transformers alone."""
    model = Dinov2Model.from_pretrained(folder / "dino").eval()
    with torch.no_grad():
        return model(pixel_values=normalised_pixels(images, 224)).last_hidden_state[:, 0]


@pytest.mark.parametrize("kind", ["dino", "clip"])
def test_style_is_the_cosine_with_the_reference(folder, kind):
    reward = StyleReward(path=folder / kind)
    check_reward(reward, styled())
    scores = reward(styled())["style"]
    images = [[sample.image for sample in styled()], [sample.task.reference for sample in styled()]]
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
        StyleReward(path=folder / "dino", where="mask")(styled(1))


def test_no_image_scores_0_and_a_task_without_a_reference_raises(folder):
    reward = StyleReward(path=folder / "dino")
    assert reward([Sample(styled(1)[0].task, None)])["style"].tolist() == [0.0]
    with pytest.raises(ValueError, match="has no reference"):
        reward([Sample(Task("t", "a cat"), picture(0))])


def test_distance_of_sets_is_the_frechet_distance_of_dinov2_features(folder):
    one, other = [picture(k) for k in range(4)], [picture(10 + k) for k in range(5)]
    found = distance_of_sets(one, other, path=str(folder / "dino"))
    assert found == pytest.approx(frechet_distance(dino_states(folder, one), dino_states(folder, other)), rel=1e-3)
    assert distance_of_sets(one, one, path=str(folder / "dino")) == pytest.approx(0, abs=1e-6)
    with pytest.raises(ValueError, match="DINOv2"):
        distance_of_sets(one, other, path=str(folder / "clip"))


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


def barns():
    return [Sample(Task(str(k), "a red barn " * k), Image.new("RGB", (9, 7), (60 * k, 30, 200 - 50 * k))) for k in (1, 2, 3)]


def test_prompts_and_rgb_pixels_are_passed_to_the_package_unchanged(package, capsys):
    reward = ImageRewardScore()
    check_reward(reward, barns())
    (name, device, cache, model) = package.loaded[0]
    assert (name, device, cache) == ("ImageReward-v1.0", "cpu", None)
    assert model.asked[:3] == [(sample.task.instruction, sample.image.tobytes()) for sample in barns()]
    alpha = Image.new("RGBA", (9, 7), (60, 30, 150, 0))
    reward([Sample(barns()[0].task, alpha)])
    assert model.asked[-1] == (barns()[0].task.instruction, alpha.convert("RGB").tobytes())
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
    assert reward(barns()[:1])["image_reward"].isnan().all()
    model.answer = 99.0
    assert reward(barns()[:1])["image_reward"].tolist() == [10]


def test_a_missing_package_raises_with_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "ImageReward", None)
    with pytest.raises(ValueError, match="pip install image-reward"):
        ImageRewardScore().build()


def test_hps_is_the_cosine(tmp_path):
    folder = tiny_towers.clip(tmp_path / "clip")
    given = [Sample(Task(str(k), "a barn " * k), sample.image) for k, sample in enumerate(barns(), start=1)]
    check_reward(HpsReward(path=folder), given)
    cosines, _ = DualEncoder(folder).cosines([sample.task.instruction for sample in given], [sample.image for sample in given])
    scores = HpsReward(path=folder)([*given, Sample(given[0].task, None)])["hps"]
    torch.testing.assert_close(scores[:3], cosines.clamp(min=0))
    assert scores[3] == 0


SIZES = [(16, 16), (20, 16), (16, 20), (9, 13), (64, 40), (100, 37)]


def smooth_picture(seed, size=(20, 16), *, smooth=True):
    """A photograph-like image, or noise."""
    side = (size[1] // 4 + 1, size[0] // 4 + 1) if smooth else (size[1], size[0])
    noise = np.random.default_rng(seed).integers(0, 256, (*side, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)


def tensors(images):
    return torch.stack([torch.from_numpy(np.asarray(image).astype(np.float32) / 255).movedim(-1, 0) for image in images])


def smooth_samples(count=4, **how):
    words = ("a cat", "two dogs", "a cat", "red")
    return [
        Sample(Task(f"t{k}", words[k], images=(smooth_picture(40 + k),), target=smooth_picture(30 + k)), smooth_picture(k, **how))
        for k in range(count)
    ]


@pytest.fixture(scope="module")
def rewards(folder):
    """Each reward, with the column that is differentiated."""
    return {
        "clip": (ClipReward(path=folder / "clip"), "cosine"),
        "siglip": (ClipReward(path=folder / "siglip"), "cosine"),
        "pickscore": (PickScoreReward(path=folder / "clip"), "pickscore"),
        "hps": (HpsReward(path=folder / "clip"), "hps"),
        "aesthetic": (AestheticReward(path=folder / "clip", head=folder / "head.safetensors"), "aesthetic"),
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
    given = smooth_samples(size=size)
    scores = reward.score_tensors(tensors([sample.image for sample in given]), [sample.task for sample in given])
    low, high = reward.columns[column].low, reward.columns[column].high
    torch.testing.assert_close(scores.clamp(low, high), reward(given)[column], atol=0.01 * high, rtol=0)
    assert scores.std() > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_matches_finite_differences(rewards, name):
    reward, _ = rewards[name]
    given = smooth_samples(2, size=(20, 18))
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
    images = tensors([smooth_picture(0)]).requires_grad_()
    reward.score_tensors(images, [Task("t", "red")]).sum().backward()
    assert images.grad is not None
    assert all(parameter.grad is None for parameter in encoder.model.parameters())


@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_tensor_preprocessing_differs_from_the_processor_by_at_most_two_levels(rewards, name, smooth):
    encoder: DualEncoder = rewards[name][0].model
    for size in SIZES:
        image = smooth_picture(3, size, smooth=smooth)
        wanted = encoder.processor(images=[image], return_tensors="pt")["pixel_values"]
        found = tensor_pixels(encoder.processor, tensors([image]))
        levels = (found - wanted).abs() * torch.tensor(encoder.processor.image_std)[:, None, None] * 255
        assert found.shape == wanted.shape
        assert levels.max() <= 2, size


def test_an_unsupported_resampling_of_the_processor_raises(rewards, monkeypatch):
    processor = rewards["clip"][0].model.processor
    monkeypatch.setattr(processor, "resample", Image.Resampling.NEAREST)
    with pytest.raises(ValueError, match="needs bilinear or bicubic"):
        tensor_pixels(processor, tensors([picture(0)]))


def test_closeness_is_one_minus_the_mean_squared_difference():
    black, gray = Image.new("RGB", (4, 4)), Image.new("RGB", (8, 8), (51, 51, 51))
    reward = TargetReward()
    scores = reward([Sample(Task("t", "x", target=gray), black), Sample(Task("t", "x", target=gray), None)])
    assert scores["closeness"].tolist() == pytest.approx([1 - 0.04, 0.0])
    check_reward(reward, smooth_samples())
    with pytest.raises(ValueError, match="task 't' has no target image"):
        reward([Sample(Task("t", "x"), black)])
