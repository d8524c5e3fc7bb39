"""Building the playground's text-to-image model and its enhancer: the same bits from the same seed, in the layout that others
load."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImagePipeline

from retouch.records.files import read_json
from retouch_worlds.data import TextToImageData
from retouch_worlds.models.family import PlaygroundTextToImage
from retouch_worlds.models.language import PlaygroundEnhancer
from retouch_worlds.playground import playground_weights
from retouch_worlds.pretraining import text_to_image as building
from retouch_worlds.pretraining.text_to_image import EnhancerTraining, TextToImageTraining, build_text_to_image, described, measure
from small_builds import build_three

TINY = {
    "text_to_image": TextToImageTraining(steps=2, batch=4, warmup=1),
    "enhancer": EnhancerTraining(steps=2, batch=4, warmup=1),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two builds of one seed, and one of another."""
    folder = tmp_path_factory.mktemp("built")
    for scores in build_three(folder, partial(build_text_to_image, **TINY), measured_by=building):
        assert 0 <= scores["right words, all overall"] <= 10
    return folder


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits(built: Path) -> None:
    parts = sorted(path.relative_to(built / "one") for path in (built / "one").rglob("*.safetensors"))
    assert len(parts) == 4
    trained = [part for part in parts if "vae" not in part.parts]
    for part in parts:
        assert (built / "one" / part).read_bytes() == (built / "two" / part).read_bytes()
    for part in trained:
        assert (built / "one" / part).read_bytes() != (built / "other" / part).read_bytes()


@pytest.mark.slow
def test_the_built_json_files_contain_no_local_path(built: Path) -> None:
    for file in (built / "one").rglob("*.json"):
        assert "/weights/" not in file.read_text()
        assert str(built) not in file.read_text()


@torch.no_grad()
def test_the_diffusers_pipeline_gives_the_same_latents(built: Path) -> None:
    folder = built / "one" / "text_to_image"
    model = PlaygroundTextToImage(path=str(folder)).build(device=torch.device("cpu"))
    pipeline = QwenImagePipeline.from_pretrained(folder, local_files_only=True).to(torch.float32)
    task = described(TextToImageData(seed=0, count=1, complexity=[3], split="test").tasks(in_turn=True)[0])
    ours = model.encode([task])
    pipeline.prompt_template_encode = model.text.template.head + "{}" + model.text.template.tail
    pipeline.prompt_template_encode_start_idx = model.text.prefix
    embeds, mask = pipeline.encode_prompt(task.instruction)
    assert torch.equal(embeds, ours.tensors["embeds"])
    assert mask is None or torch.equal(mask.bool(), ours.tensors["mask"])
    x = model.initial_noise(ours, [torch.Generator().manual_seed(0)])
    sigmas = model.sigmas(4, ours)
    for k in range(4):
        x = x + (sigmas[k + 1] - sigmas[k]) * model.velocity(model.module, x, sigmas[k][None], ours)
    drawn = pipeline(
        prompt_embeds=embeds,
        prompt_embeds_mask=ours.tensors["mask"].long(),
        height=24,
        width=24,
        num_inference_steps=4,
        true_cfg_scale=1.0,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
    ).images
    torch.testing.assert_close(drawn, x, atol=1e-4, rtol=1e-4)


def test_a_folder_without_a_text_to_image_model_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="playground build --text-to-image"):
        PlaygroundTextToImage(path=str(tmp_path)).build(device=torch.device("cpu"))


@pytest.mark.slow
def test_the_packaged_weights_have_the_scores_in_build_json() -> None:
    """The enhancer, from which its recipe starts, names a single thing correctly, and of several things mostly the first."""
    text_to_image, enhancer = (
        read_json(playground_weights(name) / "build.json")["held_out"] for name in ("text_to_image", "enhancer")
    )
    assert text_to_image == enhancer
    cpu = torch.device("cpu")
    model: Any = PlaygroundTextToImage().build(device=cpu)
    writer: Any = PlaygroundEnhancer().build(device=cpu, gradient_checkpointing=False)
    found = measure(model, writer)
    assert found.keys() == text_to_image.keys()
    assert max(abs(found[name] - text_to_image[name]) for name in text_to_image) <= 0.1


def test_the_packaged_weights_have_at_most_8_mb() -> None:
    files = [file for name in ("text_to_image", "enhancer") for file in playground_weights(name).rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 8_000_000
