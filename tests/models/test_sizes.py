"""Sizes of the published models, against published figures, counts by hand, and real tiny models."""

import json
from importlib.resources import files
from pathlib import Path

import pytest

import tiny_models
from retouch.models.sizes import parameter_count, reward_model, stored_count

TINY = {
    "qwen": tiny_models.qwen_transformer,
    "sd3": tiny_models.sd3_transformer,
    "flux": tiny_models.flux_transformer,
    "z-image": tiny_models.z_image_transformer,
}


def parts(name):
    """The described parts of a published model, from the configuration in the folder of its family."""
    (file,) = Path(str(files("retouch.models"))).glob(f"*/{name}.json")
    return json.loads(file.read_text(encoding="utf-8"))["parts"]


def described(name):
    """A tiny transformer and its description in the form that ``parts`` returns."""
    module = TINY[name]()
    config = {key: value for key, value in module.config.items() if not key.startswith("_")}
    return module, {"class": type(module).__name__, "config": config}


@pytest.mark.parametrize(
    ("model", "part", "billions"),
    [
        ("qwen-image", "transformer", 20.4),
        ("qwen-image-edit-2511", "transformer", 20.4),
        ("qwen-image", "text_encoder", 8.3),
        ("qwen-image", "vae", 0.127),
        ("sd3-medium", "transformer", 2.08),
        ("sd3.5-medium", "transformer", 2.5),
        ("sd3.5-large", "transformer", 8.1),
        ("sd3.5-large", "text_encoder_3", 4.76),
        ("flux.1-dev", "transformer", 11.9),
        ("flux.1-schnell", "transformer", 11.9),
        ("flux.1-fill-dev", "transformer", 11.9),
        ("flux.1-dev", "text_encoder", 0.123),
        ("flux.1-dev", "text_encoder_2", 4.76),
        ("flux.1-dev", "vae", 0.084),
        ("z-image", "transformer", 6.15),
        ("z-image", "text_encoder", 4.02),
        ("z-image", "vae", 0.084),
        ("emu3", "writer", 8.49),
        ("emu3", "autoencoder", 0.271),
    ],
)
def test_parameter_counts_match_published_sizes(model, part, billions):
    assert stored_count(parts(model)[part]) / 1e9 == pytest.approx(billions, rel=0.02)


def test_a_class_of_another_library_raises():
    with pytest.raises(ValueError, match="the size of class 'Other' is not known"):
        parameter_count({"class": "Other", "config": {}})


def test_flux_variants_differ_by_the_expected_parameter_counts():
    """Fill reads 320 more channels per token, and the distilled model has no guidance embedding."""
    dev, fill, schnell = (parts(f"flux.1-{name}")["transformer"] for name in ("dev", "fill-dev", "schnell"))
    width = 24 * 128
    assert parameter_count(fill) - parameter_count(dev) == (384 - 64) * width
    assert parameter_count(dev) - parameter_count(schnell) == (256 + 1) * width + (width + 1) * width


@pytest.mark.parametrize("name", TINY)
def test_parameter_counts_equal_those_of_real_models(name):
    module, part = described(name)
    assert parameter_count(part) == module.num_parameters()
    assert stored_count(part) == sum(tensor.numel() for tensor in module.state_dict().values())


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("openai/clip-vit-base-patch32", 151_277_313),
        ("yuvalkirstain/PickScore_v1", 986_109_441),
        ("facebook/dinov2-base", 86_580_480),
    ],
)
def test_reward_models_have_their_known_sizes(name, count):
    assert stored_count(reward_model(name)) == count


def test_the_z_image_count_equals_counts_by_hand():
    width, text, read = 3840, 2560, 256
    feed = int(width / 3 * 8)
    block = 4 * width**2 + 3 * width * feed + 4 * width + 2 * 128  # no biases; four norms of tokens, two of heads
    modulation = (read + 1) * 4 * width
    ends = (64 + 1) * width + (width + 1) * 64 + (read + 1) * width  # input, output and modulation of the last layer
    time, words, padding = (read + 1) * 1024 + (1024 + 1) * read, text + (text + 1) * width, 2 * width
    whole = 34 * block + 32 * modulation + ends + time + words + padding
    assert parameter_count(parts("z-image")["transformer"]) == whole == 6_154_908_736
