"""Sizes of the published models, against published figures, counts by hand, and real tiny models."""

import json
from importlib.resources import files
from pathlib import Path

import pytest

import tiny_models
from retouch.models.base import packaged_config
from retouch.models.flux2 import Flux2KleinModel
from retouch.models.parts import parameter_count, stored_count
from retouch.models.qwen_image_2 import QwenImage2Model

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
    assert stored_count(packaged_config("judges", name) or packaged_config("writers", name)) == count


@pytest.mark.parametrize(
    ("path", "transformer", "text_encoder"),
    [("FLUX.2-klein-base-4B", 3_875_544_576, 4.02e9), ("FLUX.2-klein-9B", 9_078_581_248, 7.57e9)],
)
def test_parameter_counts_of_flux2_match_the_published_models(path, transformer, text_encoder):
    parts = Flux2KleinModel(path=path).published()
    assert parts is not None
    assert parameter_count(parts["transformer"]) == transformer
    assert parameter_count(parts["text_encoder"]) == pytest.approx(text_encoder, rel=0.002)
    assert parameter_count(parts["vae"]) == 84_046_115
    assert stored_count(parts["vae"]) == 84_046_115 + 2 * 128 + 1, "the running statistics are part of the weights"
    assert Flux2KleinModel(path="somebody/else").published() is None


def test_parameter_counts_of_qwen_image_2_equal_counts_by_hand():
    """Transformer: computed by hand. Text encoder (Qwen3-VL-8B): the known count without the head of 0.62 billion."""
    parts = QwenImage2Model(path="Qwen/Qwen-Image-2.1").published()
    assert parts is not None
    width, text, latents = 4096, 4096, 64
    block = 4 * width**2 + 3 * 3 * width**2 + 2 * 128  # no biases; norms of queries and keys have weights, and no others
    ends = 2 * latents * width + (text + width) * width + text  # tokens in and out, and the text with its norm
    time = (256 + width) * width + (4 + 1) * width**2  # its embedding, and the modulation of all blocks and of the last norm
    assert parameter_count(parts["transformer"]) == 32 * block + ends + time == 7_115_124_736
    assert parameter_count(parts["text_encoder"]) == pytest.approx(8.77e9 - 151_936 * width, rel=0.002)
    assert parameter_count(parts["vae"]) == 337_740_404
