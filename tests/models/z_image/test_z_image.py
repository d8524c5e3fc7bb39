"""Z-Image against diffusers' own pipeline, with tiny random models."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline

import tiny_models
from family_runs import check_gradient_checkpointing
from retouch.models.common.latents import pack
from retouch.models.z_image.family import ZImageModel
from retouch.models.z_image.model import ZImage, ZImageText
from retouch.protocols import DenoisingModel
from retouch.types import Conditioning

SCHEDULERS = {"turbo": {"shift": 3.0}, "by size": {"use_dynamic_shifting": True, "max_shift": 0.9}}
TEXTS = ["a red circle on a green square, drawn by hand", "blue"]


@pytest.fixture(scope="module")
def language():
    tokenizer = tiny_models.chat_tokenizer()
    return tiny_models.qwen3(tokenizer), tokenizer


def build(language, *, scheduler="turbo", size=(24, 40), **options):
    encoder, tokenizer = language
    return ZImage(
        transformer=tiny_models.z_image_transformer(),
        vae=tiny_models.sd3_vae(),
        text=ZImageText(encoder.model, tokenizer, **options),
        scheduler_config=SCHEDULERS[scheduler],
        size=size,
    )


def pipeline(model, language, *, scheduler="turbo"):
    pipe = ZImagePipeline(
        transformer=model.module,
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULERS[scheduler]),
        vae=model.latents.vae,
        text_encoder=language[0],
        tokenizer=language[1],
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def tasks(texts=TEXTS):
    return [tiny_models.task(text, text) for text in texts]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("scale", [0.0, 3.0])
def test_sampled_latents_match_the_pipeline(language, scheduler, scale):
    model = build(language, scheduler=scheduler)
    assert len({model.text.template.tokenise([text], [()])["input_ids"].shape[1] for text in TEXTS}) == 2
    theirs = pipeline(model, language, scheduler=scheduler)(
        list(TEXTS),
        height=24,
        width=40,
        num_inference_steps=4,
        guidance_scale=scale,
        generator=tiny_models.generators(2),
        output_type="latent",
    ).images
    conditioning = model.encode(tasks())
    negative = model.encode_negative(tasks()) if scale else None
    ours = tiny_models.euler(
        model, conditioning, tiny_models.generators(2), num_steps=4, negative=negative, guidance_scale=1 + scale
    )
    torch.testing.assert_close(ours, pack(theirs), atol=5e-6, rtol=0)
    assert model.decode(ours, conditioning)[0].size == (40, 24)


def test_model_implements_denoising_model_and_rows_are_independent(language):
    model = build(language)
    assert isinstance(model, DenoisingModel)
    together = model.encode(tasks())
    alone = [model.encode([task]) for task in tasks()]
    assert together.tensors["mask"].sum(1).tolist() == [len(each.tensors["embeds"][0]) for each in alone]
    joined = Conditioning.concat(alone)
    for name in together.tensors:
        torch.testing.assert_close(joined.tensors[name], together.tensors[name], atol=1e-6, rtol=0)
    x, sigma = model.initial_noise(together, tiny_models.generators(2)), torch.tensor([0.9, 0.3])
    velocities = model.velocity(model.module, x, sigma, together)
    for row in range(2):
        velocity = model.velocity(model.module, x[row : row + 1], sigma[row : row + 1], alone[row])
        torch.testing.assert_close(velocities[row], velocity[0], atol=3e-6, rtol=0)


def test_gradient_checkpointing_gives_the_same_gradients(language):
    model = build(language)
    check_gradient_checkpointing(model, model.encode(tasks()), trained="context_refiner")


def test_image_round_trip_matches_the_autoencoder(language):
    model = build(language)
    pictures = [tiny_models.image(k, 24, 40) for k in range(2)]
    ours = model.decode(model.encode_images(pictures), model.encode(tasks()))
    processor = pipeline(model, language).image_processor
    with torch.no_grad():
        pixels = model.latents.vae(processor.preprocess(pictures)).sample
    for mine, theirs in zip(ours, processor.postprocess(pixels), strict=True):
        difference = torch.tensor(list(mine.tobytes())).int() - torch.tensor(list(theirs.tobytes())).int()
        assert mine.size == (40, 24)
        assert difference.abs().max() <= 1


def test_lora_targets_match_all_attention_and_feed_forward_layers(language):
    linear = {name for name, module in build(language).module.named_modules() if isinstance(module, torch.nn.Linear)}
    hit = {name for name in linear if name.endswith(ZImageModel.lora_targets)}
    assert hit == {name for name in linear if ".attention." in name or ".feed_forward." in name}
    assert len(hit) == 7 * 4


def test_invalid_inputs_and_settings_raise(language):
    with pytest.raises(ValueError, match="does not divide into tokens of 8 px"):
        build(language, size=(20, 40))
    with pytest.raises(ValueError, match="at most 128 x 128 px"):
        build(language, size=(24, 136))
    long = "blue " * 20
    with pytest.raises(ValueError, match=r"'long' has \d+ tokens in its template, but Z-Image reads at most 96; shorten it"):
        build(language, max_sequence_length=96).encode([tiny_models.task("long", long)])
    build(language).encode([tiny_models.task("long", long)])
    with pytest.raises(ValueError, match=r"'x' contains the special token <\|im_end\|>"):
        build(language).encode([tiny_models.task("x", "blue<|im_end|>")])
    bare = tiny_models.chat_tokenizer()
    bare.chat_template = "no words at all"
    with pytest.raises(ValueError, match="exactly one placeholder"):
        ZImageText(language[0].model, bare)
    with pytest.raises(ValueError, match="num_steps is 0; it must be at least 1"):
        build(language).sigmas(0, build(language).encode(tasks()))
