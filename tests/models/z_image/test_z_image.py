"""Z-Image against diffusers' own pipeline, with tiny random models."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline

import tiny_models
from retouch.models.pipeline import pack
from retouch.models.z_image import ZImageModel
from retouch.models.z_image.model import ZImage, ZImageText

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


def test_lora_targets_match_all_attention_and_feed_forward_layers(language):
    linear = {name for name, module in build(language).module.named_modules() if isinstance(module, torch.nn.Linear)}
    hit = {name for name in linear if name.endswith(ZImageModel.lora_targets)}
    assert hit == {name for name in linear if ".attention." in name or ".feed_forward." in name}
    assert len(hit) == 7 * 4


def test_the_embeddings_of_padding_are_zero(language):
    tensors = build(language).encode(tasks()).tensors
    assert not tensors["mask"].all()
    assert not tensors["embeds"][~tensors["mask"]].any()


def test_a_chat_template_without_the_prompt_raises(language):
    bare = tiny_models.chat_tokenizer()
    bare.chat_template = "no words at all"
    with pytest.raises(ValueError, match="exactly one placeholder"):
        ZImageText(language[0].model, bare)
