"""FLUX.1, FLUX.1-Fill and FLUX.1-Kontext against diffusers' own pipelines, with tiny random models."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxFillPipeline, FluxKontextPipeline, FluxPipeline
from diffusers.pipelines.flux import pipeline_flux_fill
from PIL import Image, ImageDraw

import tiny_models
from retouch.models.flux.model import Flux, FluxFill, FluxKontext
from retouch.types import Task

TEXTS = ["a red circle", "blue"]


@pytest.fixture(scope="module")
def text():
    return tiny_models.flux_text()


def build(kind, text, *, distilled=True, **options):
    channels = tiny_models.FILL_CHANNELS if kind is FluxFill else 64
    transformer = tiny_models.flux_transformer(channels=channels, distilled=distilled)
    return kind(
        transformer=transformer, vae=tiny_models.sd3_vae(), text=text, scheduler_config=tiny_models.FLUX_SCHEDULER, **options
    )


def pipeline(kind, model):
    pipe = kind(
        transformer=model.module,
        scheduler=FlowMatchEulerDiscreteScheduler(**tiny_models.FLUX_SCHEDULER),
        vae=model.latents.vae,
        text_encoder=model.text.clip,
        tokenizer=model.text.clip_tokenizer,
        text_encoder_2=model.text.t5,
        tokenizer_2=model.text.t5_tokenizer,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def masked(name, prompt, seed=0, size=(40, 24)):
    mask = Image.new("L", size)
    ImageDraw.Draw(mask).rectangle((5, 3, 21 + seed, 14), fill=255)
    return Task(id=name, instruction=prompt, images=(tiny_models.image(seed, size[1], size[0]),), mask=mask)


SETTINGS = {"num_inference_steps": 4, "max_sequence_length": 20, "output_type": "latent"}


@pytest.mark.parametrize("distilled", [True, False])
def test_sampled_latents_match_the_pipeline(text, distilled):
    model = build(Flux, text, distilled=distilled, size=(24, 40), guidance=2.0 if distilled else None)
    pipe = pipeline(FluxPipeline, model)
    theirs = pipe(TEXTS, height=24, width=40, guidance_scale=2.0, generator=tiny_models.generators(2), **SETTINGS).images
    conditioning = model.encode([tiny_models.task(prompt, prompt) for prompt in TEXTS])
    ours = tiny_models.euler(model, conditioning, tiny_models.generators(2), num_steps=4)
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=0)
    assert model.decode(ours, conditioning)[0].size == (40, 24)


def test_sampled_latents_with_true_cfg_match_the_pipeline(text):
    model = build(Flux, text, distilled=False, size=(24, 40))
    settings = SETTINGS | {"negative_prompt": ["", ""], "true_cfg_scale": 3.0}
    theirs = pipeline(FluxPipeline, model)(TEXTS, height=24, width=40, generator=tiny_models.generators(2), **settings).images
    tasks = [tiny_models.task(prompt, prompt) for prompt in TEXTS]
    conditioning, negative = model.encode(tasks), model.encode_negative(tasks)
    ours = tiny_models.euler(model, conditioning, tiny_models.generators(2), num_steps=4, negative=negative, guidance_scale=3.0)
    torch.testing.assert_close(ours, theirs, atol=5e-6, rtol=0)


def test_packed_mask_is_bitwise_equal_to_the_pipeline(text):
    model = build(FluxFill, text)
    pipe = pipeline(FluxFillPipeline, model)
    mask = torch.stack([model.latents.mask([masked("m", "x", seed).mask], (24, 40))[0] for seed in range(2)])
    theirs, _ = pipe.prepare_mask_latents(
        mask, torch.zeros(2, 3, 24, 40), 2, 16, 1, 24, 40, torch.float32, torch.device("cpu"), tiny_models.generators(1)[0]
    )
    assert torch.equal(model.latents.pack_mask(mask), theirs)
    assert set(mask.unique().tolist()) == {0.0, 1.0}


def test_packed_mask_of_512_px_has_the_expected_shape(text):
    model = build(FluxFill, text)
    mask = torch.zeros(1, 1, 512, 512)
    eight = build(FluxFill, text)
    eight.latents.latent_pixels = 8
    assert eight.latents.pack_mask(mask).shape == (1, 1024, 256)
    assert model.latents.pack_mask(mask).shape == (1, 4096, 64)


def test_fill_latents_match_the_pipeline(text, monkeypatch):
    model = build(FluxFill, text)
    # The pipeline samples the masked image's latents from their posterior; we use its mode, so that equal tasks give equal inputs.
    monkeypatch.setattr(pipeline_flux_fill, "retrieve_latents", lambda encoded, generator=None: encoded.latent_dist.mode())
    tasks = [masked(prompt, prompt, seed) for seed, prompt in enumerate(TEXTS)]
    theirs = pipeline(FluxFillPipeline, model)(
        TEXTS,
        image=[task.images[0] for task in tasks],
        mask_image=[task.mask for task in tasks],
        height=24,
        width=40,
        guidance_scale=30.0,
        generator=tiny_models.generators(2),
        **SETTINGS,
    ).images
    ours = tiny_models.euler(model, model.encode(tasks), tiny_models.generators(2), num_steps=4)
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=0)


def test_fill_conditioning_does_not_depend_on_pixels_under_the_mask(text):
    model = build(FluxFill, text)
    task = masked("one", "blue")
    changed = task.images[0].copy()
    ImageDraw.Draw(changed).rectangle((5, 3, 21, 14), fill=(1, 2, 3))
    other = Task(id="two", instruction="blue", images=(changed,), mask=task.mask)
    both = model.encode([task, other]).tensors["source"]
    assert torch.equal(both[0], both[1])


def test_kontext_latents_match_the_pipeline(text):
    model = build(FluxKontext, text, size=(24, 40))
    model.source_as_is = True
    tasks = [tiny_models.task(prompt, prompt, tiny_models.image(seed, 16, 32)) for seed, prompt in enumerate(TEXTS)]
    theirs = pipeline(FluxKontextPipeline, model)(
        [task.images[0] for task in tasks],
        TEXTS,
        height=24,
        width=40,
        max_area=24 * 40,
        guidance_scale=3.5,
        generator=tiny_models.generators(2),
        _auto_resize=False,
        **SETTINGS,
    ).images
    ours = tiny_models.euler(model, model.encode(tasks), tiny_models.generators(2), num_steps=4)
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=0)


def test_kontext_fits_sources_to_a_training_resolution(text):
    model = build(FluxKontext, text)
    assert model.fit(tiny_models.image(0, 300, 200)) == (1248, 832)
    assert model.fit(tiny_models.image(0, 64, 64)) == (1024, 1024)


def test_encoded_images_match_the_packed_latents_of_the_autoencoder(text):
    model = build(Flux, text, size=(24, 40))
    tokens = model.encode_images([tiny_models.image(0, 24, 40)])
    vae = model.latents.vae
    mode = vae.encode(model.latents.pixels([tiny_models.image(0, 24, 40)], (24, 40))).latent_dist.mode()
    expected = FluxPipeline._pack_latents((mode - vae.config.shift_factor) * vae.config.scaling_factor, 1, 16, 6, 10)
    torch.testing.assert_close(tokens, expected, atol=1e-6, rtol=0)


def test_invalid_inputs_and_settings_raise(text):
    fill, kontext = build(FluxFill, text), build(FluxKontext, text)
    whole = masked("one", "blue")
    sizes = r"task 'one' has 24 x 40, task 'two' has 24 x 24 \(height x width\); set policy\.model\.size \(in Python: size=;"
    with pytest.raises(ValueError, match="1 images and no mask"):
        fill.encode([tiny_models.task("x", "blue", whole.images[0])])
    with pytest.raises(ValueError, match=sizes):
        fill.encode([whole, masked("two", "blue", size=(24, 24))])
    with pytest.raises(ValueError, match="takes one"):
        kontext.encode([tiny_models.task("x", "blue")])
