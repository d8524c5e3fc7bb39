"""Qwen-Image-Edit and Edit-Plus against diffusers' own pipelines, with tiny random models."""

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as edit_module
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus_module
from hypothesis import given
from hypothesis import strategies as st
from PIL.Image import new

import tiny_models
from retouch.models.pipeline import fit
from retouch.models.qwen_image.model import QwenImageEdit, QwenImageEditPlus
from retouch.types import Conditioning

PLUS_TEMPLATE = tiny_models.TEXT_TEMPLATE


def build(cls, parts, **options):
    options = {"template": tiny_models.TEMPLATE, "condition_area": "as_is", "source_area": "as_is", **options}
    return cls(**parts, image_processor=tiny_models.qwen_image_processor(), scheduler_config=tiny_models.SCHEDULER, **options)


def pipeline(cls, parts, template):
    parts = {**parts, "text_encoder": tiny_models.pass_token_types(parts["text_encoder"])}
    pipe = cls(
        **parts,
        scheduler=FlowMatchEulerDiscreteScheduler(**tiny_models.SCHEDULER),
        processor=tiny_models.ImageProcessorOnly(image_processor=tiny_models.qwen_image_processor(), tokenizer=parts["tokenizer"]),
    )
    pipe.prompt_template_encode = template
    pipe.prompt_template_encode_start_idx = len(
        parts["tokenizer"](template.partition("<|vision_start|>")[0].partition("{}")[0]).input_ids
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def model(parts):
    return build(QwenImageEdit, parts)


@given(st.integers(16, 600), st.integers(16, 600))
def test_fitted_sizes_match_the_pipelines(width, height):
    image = new("L", (width, height))
    for area in (1024 * 1024, 384 * 384):
        assert fit(image, area) == plus_module.calculate_dimensions(area, width / height)[::-1]
        assert fit(image, area) == edit_module.calculate_dimensions(area, width / height)[1::-1]


def test_embed_gives_the_text_encoder_gradients_and_encode_does_not(model, parts):
    encoder = parts["text_encoder"]
    tasks = [tiny_models.task("a", "red", tiny_models.image(0))]
    encoder.train()
    assert not model.encode(tasks).tensors["embeds"].requires_grad
    assert encoder.training
    conditioning = model.embed(model.prepare(tasks))
    x = model.initial_noise(conditioning, tiny_models.generators(1))
    model.velocity(model.module, x, torch.tensor([0.5]), conditioning).square().mean().backward()
    gradient = encoder.model.visual.patch_embed.proj.weight.grad
    assert gradient.abs().max() > 0
    encoder.eval()
    encoder.zero_grad()
    model.module.zero_grad()


def test_images_of_different_sizes_in_one_batch_raise(model):
    tasks = [tiny_models.task("a", "red", tiny_models.image(0)), tiny_models.task("b", "red", tiny_models.image(0, 24, 32))]
    with pytest.raises(ValueError, match=r"task 'a' has 24 x 24, task 'b' has 24 x 32 .*; set policy\.model\.size"):
        model.encode(tasks)
    with pytest.raises(ValueError, match=r"row 0 has 24 x 24, row 1 has 24 x 32 .*; set policy\.model\.size"):
        model.encode_images([task.images[0] for task in tasks])
    with pytest.raises(ValueError, match=r"rows of different sizes in one batch: .*; set policy\.model\.size \(in Python: size=\)"):
        Conditioning.concat([model.encode([task]) for task in tasks])


def test_edit_plus_prompt_numbers_the_source_images(parts):
    model = build(QwenImageEditPlus, parts, template=PLUS_TEMPLATE)
    prepared = model.prepare([tiny_models.task("a", "both", tiny_models.image(0, 24, 32), tiny_models.image(1))])
    text = parts["tokenizer"].decode(prepared.tokens["input_ids"][0])
    assert "Picture 1: <|vision_start|>" in text
    assert "Picture 2: <|vision_start|>" in text
    assert prepared.shared == {"grids": ((1, 3, 3), (1, 3, 4), (1, 3, 3)), "size": (24, 24)}
    assert prepared.source.shape == (1, 21, 64)


def test_sigmas_decrease_from_1_to_0_and_a_single_step_raises(model):
    conditioning = model.encode([tiny_models.task("a", "red", tiny_models.image(0))])
    sigmas = model.sigmas(10, conditioning)
    assert sigmas[0] == 1
    assert sigmas[-1] == 0
    assert math.isclose(sigmas[-2], 0.02, rel_tol=1e-5)
    assert (sigmas.diff() < 0).all()
    with pytest.raises(ValueError, match="2 steps"):
        model.sigmas(1, conditioning)
