"""Qwen-Image-Edit and Edit-Plus against diffusers' own pipelines, with tiny random models."""

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageEditPipeline, QwenImageEditPlusPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as edit_module
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus_module
from hypothesis import given
from hypothesis import strategies as st
from PIL.Image import new

import tiny_models
from retouch.models.pipeline import fit, pack, unpack
from retouch.models.qwen_image.model import QwenImageEdit, QwenImageEditPlus
from retouch.types import Conditioning

PLUS_TEMPLATE = tiny_models.TEXT_TEMPLATE
AREA = 64 * 64


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


@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
@pytest.mark.parametrize("texts", [["make it red"], ["make it red", "blue"]])
def test_edit_latents_match_the_pipeline(parts, monkeypatch, guidance_scale, texts):
    real = edit_module.calculate_dimensions
    monkeypatch.setattr(edit_module, "calculate_dimensions", lambda area, ratio: real(AREA, ratio))
    # The pipeline resizes the text encoder's input if it gets one image, but not if it gets a list.
    images = [tiny_models.image(0, 40, 56)] if len(texts) == 1 else [tiny_models.image(0, 64, 64), tiny_models.image(1, 64, 64)]
    pipe = pipeline(QwenImageEditPipeline, parts, tiny_models.TEMPLATE)
    theirs = pipe(
        images if len(images) > 1 else images[0],
        texts,
        negative_prompt=[" "] * len(texts) if guidance_scale > 1 else None,
        true_cfg_scale=guidance_scale,
        num_inference_steps=4,
        generator=tiny_models.generators(len(texts)),
        output_type="latent",
    ).images

    model = build(QwenImageEdit, parts, condition_area=AREA, source_area=AREA)
    tasks = [tiny_models.task(text, text, image) for text, image in zip(texts, images, strict=True)]
    negative = model.encode_negative(tasks) if guidance_scale > 1 else None
    ours = tiny_models.euler(
        model,
        model.encode(tasks),
        tiny_models.generators(len(texts)),
        num_steps=4,
        negative=negative,
        guidance_scale=guidance_scale,
    )
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=0)


@pytest.mark.parametrize("zero_cond_t", [False, True])
@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
def test_edit_plus_latents_match_the_pipeline(parts, monkeypatch, guidance_scale, zero_cond_t):
    monkeypatch.setattr(plus_module, "CONDITION_IMAGE_SIZE", 32 * 32)
    monkeypatch.setattr(plus_module, "VAE_IMAGE_SIZE", AREA)
    parts = {**parts, "transformer": tiny_models.qwen_transformer(zero_cond_t=zero_cond_t)}
    images = [tiny_models.image(0, 40, 56), tiny_models.image(1, 64, 32)]
    theirs = pipeline(QwenImageEditPlusPipeline, parts, PLUS_TEMPLATE)(
        images,
        "put one on the other",
        negative_prompt=" " if guidance_scale > 1 else None,
        true_cfg_scale=guidance_scale,
        height=32,
        width=48,
        num_inference_steps=4,
        generator=tiny_models.generators(1),
        output_type="latent",
    ).images

    model = build(QwenImageEditPlus, parts, template=PLUS_TEMPLATE, condition_area=32 * 32, source_area=AREA, size=(32, 48))
    tasks = [tiny_models.task("a", "put one on the other", *images)]
    negative = model.encode_negative(tasks) if guidance_scale > 1 else None
    ours = tiny_models.euler(
        model, model.encode(tasks), tiny_models.generators(1), num_steps=4, negative=negative, guidance_scale=guidance_scale
    )
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=0)


@given(st.integers(16, 600), st.integers(16, 600))
def test_fitted_sizes_match_the_pipelines(width, height):
    image = new("L", (width, height))
    for area in (1024 * 1024, 384 * 384):
        assert fit(image, area) == plus_module.calculate_dimensions(area, width / height)[::-1]
        assert fit(image, area) == edit_module.calculate_dimensions(area, width / height)[1::-1]


def test_fit_gives_a_narrow_image_a_shorter_side_of_32_px():
    for image, size in ((new("L", (400, 20)), (32, 128)), (new("L", (20, 400)), (128, 32))):
        assert fit(image, 32 * 32) == size


def test_packing_matches_the_pipeline():
    latents = torch.randn(2, 16, 4, 6, generator=torch.Generator().manual_seed(0))
    packed = QwenImageEditPipeline._pack_latents(latents, 2, 16, 4, 6)
    assert torch.equal(pack(latents), packed)
    assert torch.equal(unpack(packed, height=2, width=3), latents)


def test_left_padding_gives_the_same_embeddings(model):
    prepared = model.prepare([tiny_models.task(str(k), "x" * (3 + 9 * k), tiny_models.image(k)) for k in range(2)])
    ids, mask = prepared.tokens["input_ids"], prepared.tokens["attention_mask"]
    order = torch.argsort(mask, dim=1, stable=True)
    left = {**prepared.tokens, "input_ids": ids.gather(1, order), "attention_mask": mask.gather(1, order)}
    assert left["attention_mask"][0, 0] == 0
    with torch.no_grad():
        for ours, theirs in zip(model.text.embed(left), model.text.embed(prepared.tokens), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_repeated_rows_keep_embeddings_and_masks_together(model):
    tasks = [
        tiny_models.task("a", "a long instruction", tiny_models.image(0)),
        tiny_models.task("b", "b", tiny_models.image(1)),
    ]
    conditioning = model.encode(tasks)
    repeated = conditioning.take(torch.tensor([0, 0, 1, 1]))
    joined = Conditioning.concat([model.encode([tasks[k]]) for k in (0, 0, 1, 1)])
    for name, tensor in repeated.tensors.items():
        torch.testing.assert_close(tensor, joined.tensors[name], atol=1e-6, rtol=0)
    assert repeated.tensors["mask"].sum(1).tolist() == [37, 37, 20, 20]


def test_masked_padding_and_an_all_true_mask_do_not_change_the_velocity(model):
    conditioning = model.encode([tiny_models.task("a", "red", tiny_models.image(0))])
    x, sigma = model.initial_noise(conditioning, tiny_models.generators(1)), torch.tensor([0.7])
    embeds, mask = conditioning.tensors["embeds"], conditioning.tensors["mask"]
    wider = Conditioning(
        {
            **conditioning.tensors,
            "embeds": torch.cat([embeds, torch.zeros(1, 5, embeds.shape[2])], 1),
            "mask": torch.cat([mask, torch.zeros(1, 5, dtype=torch.bool)], 1),
        },
        conditioning.padded,
        conditioning.shared,
    )
    ours = model.velocity(model.module, x, sigma, conditioning)
    assert torch.equal(ours, model.velocity(model.module, x, sigma, wider))
    source = conditioning.tensors["source"]
    explicit = model.module(
        hidden_states=torch.cat([x, source], 1),
        timestep=sigma,
        encoder_hidden_states=embeds,
        encoder_hidden_states_mask=mask,
        img_shapes=[list(conditioning.shared["grids"])],
    ).sample[:, : x.shape[1]]
    torch.testing.assert_close(ours, explicit, atol=1e-6, rtol=0)


def test_source_latents_equal_the_encoded_source_image(model):
    photo = tiny_models.image(5)
    source = model.encode([tiny_models.task("a", "red", photo)]).tensors["source"]
    assert torch.equal(source, model.encode_images([photo]))


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


def test_image_tokens_have_row_and_column_positions(model, parts):
    """Image tokens have positions of rows and columns; as text they would have others."""
    prepared = model.prepare([tiny_models.task("a", "red", tiny_models.image(0, 48, 48))])
    with torch.no_grad():
        embeds, _ = model.text.embed(prepared.tokens)
        flat = parts["text_encoder"].model(**prepared.tokens).last_hidden_state[:, model.text.prefix :]
        types = (prepared.tokens["input_ids"] == parts["text_encoder"].config.image_token_id).int()
        full = parts["text_encoder"](**prepared.tokens, mm_token_type_ids=types, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(embeds, full[:, model.text.prefix :], atol=1e-6, rtol=0)
    assert (embeds - flat).abs().max() > 1e-3


def test_images_of_different_sizes_in_one_batch_raise(model):
    tasks = [tiny_models.task("a", "red", tiny_models.image(0)), tiny_models.task("b", "red", tiny_models.image(0, 24, 32))]
    with pytest.raises(ValueError, match=r"task 'a' has 24 x 24, task 'b' has 24 x 32 .*; set policy\.model\.size"):
        model.encode(tasks)
    with pytest.raises(ValueError, match=r"row 0 has 24 x 24, row 1 has 24 x 32 .*; set policy\.model\.size"):
        model.encode_images([task.images[0] for task in tasks])
    with pytest.raises(ValueError, match=r"rows of different sizes in one batch: .*; set policy\.model\.size \(in Python: size=\)"):
        Conditioning.concat([model.encode([task]) for task in tasks])


@pytest.mark.parametrize("number", [0, 2])
def test_edit_without_exactly_one_source_raises(model, number):
    with pytest.raises(ValueError, match=f"{number} source images"):
        model.encode([tiny_models.task("a", "red", *[tiny_models.image(0)] * number)])


def test_edit_plus_prompt_numbers_the_source_images(parts):
    model = build(QwenImageEditPlus, parts, template=PLUS_TEMPLATE)
    prepared = model.prepare([tiny_models.task("a", "both", tiny_models.image(0, 24, 32), tiny_models.image(1))])
    text = parts["tokenizer"].decode(prepared.tokens["input_ids"][0])
    assert "Picture 1: <|vision_start|>" in text
    assert "Picture 2: <|vision_start|>" in text
    assert prepared.shared == {"grids": ((1, 3, 3), (1, 3, 4), (1, 3, 3)), "size": (24, 24)}
    assert prepared.source.shape == (1, 21, 64)


def test_latent_of_the_wrong_size_raises(model):
    conditioning = model.encode([tiny_models.task("a", "red", tiny_models.image(0))])
    with pytest.raises(ValueError, match="3 x 3"):
        model.velocity(model.module, torch.zeros(1, 4, 64), torch.ones(1), conditioning)


def test_sigmas_decrease_from_1_to_0_and_a_single_step_raises(model):
    conditioning = model.encode([tiny_models.task("a", "red", tiny_models.image(0))])
    sigmas = model.sigmas(10, conditioning)
    assert sigmas[0] == 1
    assert sigmas[-1] == 0
    assert math.isclose(sigmas[-2], 0.02, rel_tol=1e-5)
    assert (sigmas.diff() < 0).all()
    with pytest.raises(ValueError, match="2 steps"):
        model.sigmas(1, conditioning)
