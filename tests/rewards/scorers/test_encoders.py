"""Rewards that use CLIP, SigLIP, DINOv2 or ImageReward's package: scores of images and of tensors, with tiny random models."""

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
from pictures import picture
from retouch.objectives.reward_gradient import DIFFERENTIABLE_REWARDS
from retouch.protocols import DifferentiableReward
from retouch.rewards.pixels import GradeReward, ShareReward, TargetReward
from retouch.types import Sample, Task
from retouch_rewards.clip import AestheticReward, ClipReward, HpsReward, ImageRewardScore, PickScoreReward
from retouch_rewards.dino import DinoReward, StyleReward, distance_of_sets
from retouch_rewards.measures import frechet_distance
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


def samples(count=4, draw=picture, **how):
    words = ("a cat", "two dogs", "a cat", "red")
    return [
        Sample(Task(f"t{k}", words[k], (draw(50 + k),), reference=draw(90 + k), target=draw(30 + k)), draw(k, **how))
        for k in range(count)
    ]


def dino_states(folder, images):
    """The state of the first token of each image, computed with transformers alone."""
    model = Dinov2Model.from_pretrained(folder / "dino").eval()
    with torch.no_grad():
        return model(pixel_values=normalised_pixels(images, 224)).last_hidden_state[:, 0]


def tensors(images):
    return torch.stack([torch.from_numpy(np.asarray(image).astype(np.float32) / 255).movedim(-1, 0) for image in images])


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


def test_clip_score_similarity_pickscore_and_hps_are_computed_from_the_cosine(folder):
    scores = ClipReward(path=folder / "clip")(samples())
    cosine = scores["cosine"]
    assert cosine.std() > 1e-3
    assert torch.equal(scores["clip_score"], 2.5 * cosine.clamp(min=0))
    assert torch.equal(scores["similarity"], cosine.clamp(min=0))
    scale = CLIPModel.from_pretrained(folder / "clip").logit_scale.exp().detach()
    torch.testing.assert_close(PickScoreReward(path=folder / "clip")(samples())["pickscore"], (scale * cosine).clamp(min=0))
    torch.testing.assert_close(HpsReward(path=folder / "clip")(samples())["hps"], cosine.clamp(min=0))


def test_truncated_text_is_reported_and_its_end_is_ignored(folder):
    image = picture(1)
    fits, long, longer = "a" * 18, "a" * 19, "a" * 18 + "xyz"
    scores = ClipReward(path=folder / "clip")([Sample(Task(text, text), image) for text in (fits, long, longer)])
    assert scores["truncated"].tolist() == [0, 1, 1]
    assert scores["cosine"][1] == scores["cosine"][2]


def test_no_image_gets_the_lowest_scores(folder):
    given = [samples(1)[0], Sample(samples(1)[0].task, None)]
    scores = ClipReward(path=folder / "clip")(given)
    lowest = {"cosine": -1, "clip_score": 0, "similarity": 0}
    assert {name: column[1].item() for name, column in scores.items() if name != "truncated"} == lowest
    assert scores["truncated"].isnan().tolist() == [False, True]  # a diagnostic does not apply
    for reward, column in (
        (PickScoreReward(path=folder / "clip"), "pickscore"),
        (HpsReward(path=folder / "clip"), "hps"),
        (DinoReward(path=folder / "dino", size=28), "preservation"),
        (StyleReward(path=folder / "dino"), "style"),
    ):
        assert reward(given)[column][1] == 0
        assert reward(given[1:])[column].tolist() == [0]


def test_aesthetic_score_equals_the_layers_of_the_head_on_clip_embeddings(folder):
    tensors = load_file(folder / "head.safetensors")
    layers = torch.nn.Sequential(
        torch.nn.Linear(12, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1)
    )
    layers.load_state_dict({name.removeprefix("layers."): tensor for name, tensor in tensors.items()})
    vectors = DualEncoder(folder / "clip").images([sample.image for sample in samples()])
    with torch.no_grad():
        expected = layers.eval()(vectors)[:, 0].clamp(0, 10)
    reward = AestheticReward(head=folder / "head.safetensors", path=folder / "clip")
    torch.testing.assert_close(reward(samples())["aesthetic"], expected)
    assert expected.std() > 0


def test_preservation_weighs_only_features_outside_the_mask(folder):
    """Each feature sees the whole image, so a change under the mask also affects features outside it, but has no weight itself."""
    reward = DinoReward(path=folder / "dino", size=28)
    source = picture(9, (28, 28))
    edited = source.copy()
    edited.paste(picture(10, (14, 28)), (0, 0))
    left = Image.new("L", (28, 28), 0)
    left.paste(255, (0, 0, 14, 28))
    right = Image.eval(left, lambda value: 255 - value)

    def kept(mask, image=edited):
        return reward([Sample(Task("t", "", images=(source,), mask=mask), image)])["preservation"].item()

    assert kept(left) > kept(None) > kept(right)
    assert kept(None) == pytest.approx((kept(left) + kept(right)) / 2, abs=1e-6)
    assert kept(Image.new("L", (28, 28), 255)) == 1
    assert kept(None, source) == pytest.approx(1, abs=1e-6)
    assert kept(None, picture(10, (28, 28))) < 0.95


def test_absent_or_unsuitable_weights_and_tasks_raise_with_the_reason(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def copy(name, *without):
        shutil.copytree(folder / "clip", tmp_path / name, ignore=shutil.ignore_patterns(*without))
        return tmp_path / name

    pickled, scaled = copy("pickled"), copy("scaled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    changed = {**load_file(scaled / "model.safetensors"), "logit_scale": torch.tensor(5.0)}
    save_file(changed, scaled / "model.safetensors", {"format": "pt"})
    save_file({"weight": torch.zeros(1)}, tmp_path / "other")
    (tmp_path / "pickle").write_bytes(b"\x80\x04")
    clip, dino = folder / "clip", folder / "dino"
    wide, two = tiny_towers.head(tmp_path / "wide", sizes=(13, 4, 1)), tiny_towers.head(tmp_path / "two", sizes=(12, 4, 2))
    for reward, says in (
        (ClipReward(path="no-such-owner/no-such-model"), "hf download no-such-owner/no-such-model"),
        (ClipReward(path="not an id at all!"), "not on this machine"),
        (ClipReward(path=pickled), "pickle"),
        (ClipReward(path=dino), "clip or siglip"),
        (ClipReward(path=copy("words", "tokenizer*")), r"has no tokenizer \(tokenizer.json\); put the files"),
        (ClipReward(path=copy("seen", "prep*")), r"has no image processor \(preprocessor_config.json\); put the files"),
        (DinoReward(path=dino, size=30), "DINOv2"),
        (PickScoreReward(path=scaled), "another model"),
        (AestheticReward(head=wide, path=clip), "set path to the CLIP"),
        (AestheticReward(head=two, path=clip), "to give one number"),
        (AestheticReward(head=tmp_path / "other", path=clip), "layers"),
        (AestheticReward(head=tmp_path / "pickle", path=clip), "not a safetensors"),
        (AestheticReward(head=tmp_path / "nowhere", path=clip), "not a safetensors"),
        (ImageRewardScore(weights=tmp_path / "nowhere.pt"), "is not a file"),
    ):
        with pytest.raises(ValueError, match=says):
            reward.build()
    for reward, says in (
        (DinoReward(path=dino, size=28), "no source"),
        (StyleReward(path=dino), "has no reference"),
        (TargetReward(), "task 't' has no target image"),
    ):
        with pytest.raises(ValueError, match=says):
            reward([Sample(Task("t", "a cat"), picture(0))])
    with pytest.raises(ValueError, match="has no mask"):
        StyleReward(path=dino, where="mask")(samples(1))
    with pytest.raises(ValueError, match="DINOv2"):
        distance_of_sets([picture(0)], [picture(1)], path=str(clip))
    processor = ClipReward(path=clip).build().model.processor
    monkeypatch.setattr(processor, "resample", Image.Resampling.NEAREST)
    with pytest.raises(ValueError, match="needs bilinear or bicubic"):
        tensor_pixels(processor, tensors([picture(0)]))
    monkeypatch.setitem(sys.modules, "ImageReward", None)
    with pytest.raises(ValueError, match="pip install image-reward"):
        ImageRewardScore().build()


def test_pickscore_from_its_repository_alone_is_refused_with_both_downloads(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda path, **options: str(tmp_path / "cached"))
    shutil.copytree(folder / "clip", tmp_path / "cached", ignore=shutil.ignore_patterns("tokenizer*", "preprocessor*"))
    with pytest.raises(ValueError, match=r"no tokenizer .* and no image processor") as error:
        PickScoreReward().build()
    said = str(error.value)
    assert "hf download yuvalkirstain/PickScore_v1 config.json model.safetensors --local-dir weights/pickscore && " in said
    assert "hf download laion/CLIP-ViT-H-14-laion2B-s32B-b79K preprocessor_config.json tokenizer.json " in said
    assert said.endswith("give this folder as path: weights/pickscore")


@pytest.mark.parametrize("kind", ["dino", "clip"])
def test_style_is_the_cosine_with_the_reference(folder, kind):
    reward = StyleReward(path=folder / kind)
    check_reward(reward, samples())
    scores = reward(samples())["style"]
    images = [[sample.image for sample in samples()], [sample.task.reference for sample in samples()]]
    embed = DualEncoder(folder / "clip").images if kind == "clip" else lambda each: dino_states(folder, each)
    torch.testing.assert_close(scores, torch.cosine_similarity(*map(embed, images)).clamp(0, 1), atol=1e-5, rtol=0)
    assert scores.std() > 0


def test_where_mask_compares_only_the_masked_part(folder):
    style, image = picture(5, (8, 6)), picture(1)
    image.paste(style, (4, 5))
    mask = Image.new("L", image.size, 0)
    mask.paste(255, (4, 5, 12, 11))
    given = [Sample(Task("t", "a cat", reference=style, mask=mask), image)]
    assert StyleReward(path=folder / "dino", where="mask")(given)["style"].item() == pytest.approx(1, abs=1e-5)
    assert StyleReward(path=folder / "dino")(given)["style"].item() < 0.999


def test_distance_of_sets_is_the_frechet_distance_of_dinov2_features(folder):
    one, other = [picture(k) for k in range(4)], [picture(10 + k) for k in range(5)]
    found = distance_of_sets(one, other, path=str(folder / "dino"))
    assert found == pytest.approx(frechet_distance(dino_states(folder, one), dino_states(folder, other)), rel=1e-3)
    assert distance_of_sets(one, one, path=str(folder / "dino")) == pytest.approx(0, abs=1e-6)


class Model:
    """Accepts one image as the package does; the score depends on the length of the prompt and the mean of the image."""

    def __init__(self):
        self.asked = []
        self.answer = None

    def score(self, prompt, image):
        assert isinstance(prompt, str)
        assert isinstance(image, Image.Image)  # the package also accepts a path and a list, which the reward never passes
        assert not torch.is_grad_enabled()
        pixels = image.convert("RGB")
        self.asked.append((prompt, pixels.tobytes()))
        return len(prompt) / 10 - sum(pixels.resize((1, 1)).getpixel((0, 0))) / 300 if self.answer is None else self.answer


@pytest.fixture
def package(monkeypatch):
    """The package's one function, with its arguments' names and order."""
    made = types.ModuleType("ImageReward")
    made.loaded = []

    def load(name="ImageReward-v1.0", device="cpu", download_root=None):
        sys.stdout.write(f"load checkpoint from {name}\n")
        made.loaded.append((name, device, download_root, Model()))
        return made.loaded[-1][-1]

    made.load = load
    monkeypatch.setitem(sys.modules, "ImageReward", made)
    return made


def barns():
    return [Sample(Task(str(k), "a red barn " * k), Image.new("RGB", (9, 7), (60 * k, 30, 200 - 50 * k))) for k in (1, 2, 3)]


def test_imagereward_passes_prompts_rgb_pixels_weights_and_cache_to_the_package(package, tmp_path, capsys):
    reward = ImageRewardScore()
    check_reward(reward, barns())
    (name, device, cache, model) = package.loaded[0]
    assert (name, device, cache) == ("ImageReward-v1.0", "cpu", None)
    assert model.asked[:3] == [(sample.task.instruction, sample.image.tobytes()) for sample in barns()]
    alpha = Image.new("RGBA", (9, 7), (60, 30, 150, 0))
    reward([Sample(barns()[0].task, alpha)])
    assert model.asked[-1] == (barns()[0].task.instruction, alpha.convert("RGB").tobytes())
    assert capsys.readouterr().out == ""
    count = len(model.asked)
    assert reward([Sample(Task("t", ""), None)])["image_reward"].tolist() == [-10]
    assert len(model.asked) == count
    model.answer = float("nan")
    assert reward(barns()[:1])["image_reward"].isnan().all()
    model.answer = 99.0
    assert reward(barns()[:1])["image_reward"].tolist() == [10]
    weights = tmp_path / "ImageReward.pt"
    weights.touch()
    ImageRewardScore(weights=weights, cache=tmp_path, device="cpu").build()
    assert package.loaded[-1][:3] == (str(weights), "cpu", str(tmp_path))


def smooth_picture(seed, size=(20, 16), *, smooth=True):
    """A photograph-like image, or noise."""
    side = (size[1] // 4 + 1, size[0] // 4 + 1) if smooth else (size[1], size[0])
    noise = np.random.default_rng(seed).integers(0, 256, (*side, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)


NAMES = ("clip", "siglip", "pickscore", "hps", "aesthetic", "target", "share", "grade")


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


@pytest.mark.parametrize("name", NAMES)
def test_scores_of_tensors_match_the_column_of_images_and_finite_differences(rewards, name):
    reward, column = rewards[name]
    assert set(DIFFERENTIABLE_REWARDS.paths) == set(NAMES) - {"siglip"} | {"several"}  # the last: tests/objectives
    assert isinstance(reward, DifferentiableReward)
    check_reward(reward, samples())
    low, high = reward.columns[column].low, reward.columns[column].high
    for size in ((16, 16), (40, 24)):
        given = samples(draw=smooth_picture, size=size)
        scores = reward.score_tensors(tensors([sample.image for sample in given]), [sample.task for sample in given])
        torch.testing.assert_close(scores.clamp(low, high), reward(given)[column], atol=0.01 * high, rtol=0)
        assert scores.std() > 1e-4
    given = samples(2, smooth_picture, size=(20, 18))
    tasks = [sample.task for sample in given]
    images = (0.1 + 0.8 * tensors([sample.image for sample in given])).requires_grad_()
    total = reward.score_tensors(images, tasks).sum()
    (slope,) = torch.autograd.grad(total, images, retain_graph=True)
    length = slope.norm()
    assert length > 0
    with torch.no_grad():
        ends = [reward.score_tensors(images + step * slope / length, tasks).sum() for step in (0.02, -0.02)]
    assert ((ends[0] - ends[1]) / 0.04).item() == pytest.approx(length.item(), rel=0.05)
    total.backward()
    if name in ("clip", "siglip", "aesthetic"):
        encoder = reward.model.encoder if name == "aesthetic" else reward.model
        assert all(parameter.grad is None for parameter in encoder.model.parameters())


@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_tensor_preprocessing_differs_from_the_processor_by_at_most_two_levels(rewards, name, smooth):
    encoder: DualEncoder = rewards[name][0].model
    for size in ((16, 16), (20, 16), (16, 20), (9, 13), (64, 40), (100, 37)):
        image = smooth_picture(3, size, smooth=smooth)
        wanted = encoder.processor(images=[image], return_tensors="pt")["pixel_values"]
        found = tensor_pixels(encoder.processor, tensors([image]))
        levels = (found - wanted).abs() * torch.tensor(encoder.processor.image_std)[:, None, None] * 255
        assert found.shape == wanted.shape
        assert levels.max() <= 2, size


def test_closeness_is_one_minus_the_mean_squared_difference():
    black, gray = Image.new("RGB", (4, 4)), Image.new("RGB", (8, 8), (51, 51, 51))
    scores = TargetReward()([Sample(Task("t", "x", target=gray), black), Sample(Task("t", "x", target=gray), None)])
    assert scores["closeness"].tolist() == pytest.approx([1 - 0.04, 0.0])
