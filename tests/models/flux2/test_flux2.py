"""FLUX.2-klein against diffusers' own pipeline, with tiny random models."""

import pytest
import torch
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

import tiny_flux2
import tiny_models
from retouch.models.flux2.model import Flux2Klein, Flux2Text
from retouch.models.pipeline import unpack
from retouch.types import Conditioning

TEXTS = ["a red circle on a green square, drawn by hand", "blue"]
IMAGES = [tiny_models.image(0, 72, 80), tiny_models.image(1, 64, 100)]  # the second is cut to 64 x 96


@pytest.fixture(scope="module")
def pipe():
    return tiny_flux2.pipeline()


def build(pipe, *, size=(64, 96), length=512, **options):
    return Flux2Klein(
        transformer=pipe.transformer,
        vae=pipe.vae,
        text=Flux2Text(pipe.text_encoder.model, pipe.tokenizer, max_sequence_length=length),
        scheduler_config=pipe.scheduler.config,
        size=size,
        **options,
    )


def tasks(*images, texts=TEXTS):
    return [tiny_models.task(text, text, *images) for text in texts]


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("images", [0, 1, 2])
def test_sampled_latents_match_the_pipeline(pipe, images, scale):
    model, sources = build(pipe), IMAGES[:images]
    assert len({len(model.text.template.tokenise([text], [()])["input_ids"][0]) for text in TEXTS}) == 2
    theirs = pipe(
        image=sources or None,
        prompt=list(TEXTS),
        height=64,
        width=96,
        num_inference_steps=4,
        guidance_scale=scale,
        generator=tiny_models.generators(2),
        output_type="latent",
    ).images
    conditioning = model.encode(tasks(*sources))
    negative = model.encode_negative(tasks(*sources)) if scale > 1 else None
    ours = tiny_models.euler(model, conditioning, tiny_models.generators(2), num_steps=4, negative=negative, guidance_scale=scale)
    latents = unpack(model.latents.denormalise(ours), height=8, width=12)
    # The pipeline encodes a reference image once and repeats its latents; encoding it in a batch rounds differently.
    torch.testing.assert_close(latents, theirs, atol=1e-5 if images else 0, rtol=0)
    assert model.decode(ours, conditioning)[0].size == (96, 64)


@pytest.mark.parametrize(("images", "size"), [(0, (512, 512)), (2, (72, 80))])
def test_default_output_size_is_that_of_the_first_source_or_512_px(pipe, images, size):
    model = build(pipe, size=None)
    conditioning = model.encode(tasks(*IMAGES[:images]))
    assert conditioning.shared["size"] == size
    assert conditioning.shared["sources"] == ((72, 80), (64, 96))[:images]
    assert model.initial_noise(conditioning, tiny_models.generators(2)).shape[1] == size[0] * size[1] // 8**2


@pytest.mark.parametrize("size", [(72, 80), (76, 84), pytest.param((1200, 1000), marks=pytest.mark.slow)])
def test_a_target_like_the_source_has_the_size_of_the_output(pipe, size):
    model, image = build(pipe, size=None), tiny_models.image(0, *size)
    with torch.no_grad():
        x = model.initial_noise(model.encode(tasks(image)), tiny_models.generators(1))
        assert model.encode_images([image]).shape == x.shape


@pytest.mark.parametrize("size", [(64, 96), (512, 640)])  # below and above 4300 tokens, from which num_steps has no influence
@pytest.mark.parametrize("num_steps", [1, 4, 50])
def test_sigmas_match_the_pipeline(pipe, size, num_steps):
    model = build(pipe, size=size)
    tokens = size[0] * size[1] // 8**2
    start = torch.linspace(1, 1 / num_steps, num_steps, dtype=torch.float64).tolist()
    pipe.scheduler.set_timesteps(sigmas=start, mu=compute_empirical_mu(tokens, num_steps))
    ours = model.sigmas(num_steps, Conditioning({}, shared={"size": size}))
    torch.testing.assert_close(ours, pipe.scheduler.sigmas, atol=1e-7, rtol=0)


def test_rows_with_different_source_images_are_independent(pipe):
    model = build(pipe, length=96)
    together = model.encode([tiny_models.task("a", "red", IMAGES[0]), tiny_models.task("b", "red", tiny_models.image(5, 72, 80))])
    x, sigma = model.initial_noise(together, tiny_models.generators(1)).expand(2, -1, -1), torch.tensor([0.6, 0.6])
    first, second = model.velocity(model.module, x, sigma, together)
    alone = model.velocity(model.module, x[:1], sigma[:1], model.encode([tiny_models.task("a", "red", IMAGES[0])]))
    torch.testing.assert_close(first, alone[0], atol=3e-6, rtol=0)
    assert (first - second).abs().max() > 1e-3


@pytest.mark.parametrize(("height", "width"), [(70, 81), (1100, 1001), (400, 3000)])
def test_reference_image_preprocessing_is_bitwise_equal_to_the_pipeline(pipe, height, width):
    model, image = build(pipe), tiny_models.image(3, height, width)
    processor = pipe.image_processor
    smaller = Flux2ImageProcessor._resize_to_target_area(image) if height * width > 1024 * 1024 else image
    sides = {"height": smaller.height // 8 * 8, "width": smaller.width // 8 * 8}
    theirs = processor.preprocess(smaller, **sides, resize_mode="crop")
    ours = model.latents.reference(image)
    assert torch.equal(model.latents.pixels([ours], (ours.height, ours.width)), theirs)


def test_the_transformer_of_flux2_dev_raises(pipe):
    with pytest.raises(ValueError, match=r"takes guidance as an input, as FLUX\.2-dev's does"):
        Flux2Klein(transformer=tiny_flux2.transformer(guidance_embeds=True), vae=pipe.vae, text=None, scheduler_config={})
