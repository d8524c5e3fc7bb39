"""Rewards that use CLIP, SigLIP and DINOv2, with tiny random models of the same classes."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CLIPModel, SiglipModel

import tiny_towers
from retouch.protocols import Reward
from retouch.rewards.scorers.clip import AestheticReward, ClipReward, PickScoreReward
from retouch.rewards.scorers.dino import DinoReward
from retouch.rewards.scorers.dual_encoder import DualEncoder
from retouch.rewards.weights import weights_folder
from retouch.types import Sample, Task
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
