"""Qwen-Image-2.1 against diffusers' own pipeline, with tiny random models."""

from dataclasses import replace

import pytest
import torch
from PIL.Image import Image, new

import tiny_models
import tiny_policies as tiny
import tiny_qwen_image_2
from retouch.models.qwen_image_2.model import QwenImage2, QwenImage2Text
from retouch.policies.denoising import DenoisingPolicy
from retouch.policies.weights import WeightCopies

TEXTS = ["a red circle on a green square, drawn by hand", "blue"]
IMAGES = [tiny_models.image(0, 72, 80), tiny_models.image(1, 40, 120)]
AREA = 64 * 64


@pytest.fixture(scope="module")
def pipe():
    return tiny_qwen_image_2.pipeline()


def build(pipe, *, size=(64, 96), **options):
    processor = pipe.processor
    return QwenImage2(
        transformer=pipe.transformer,
        vae=pipe.vae,
        text=QwenImage2Text(pipe.text_encoder.model, processor.tokenizer, processor.image_processor),
        scheduler_config=pipe.scheduler.config,
        size=size,
        source_area=AREA,
        **options,
    )


def tasks(*images, texts=TEXTS):
    return [tiny_models.task(text, text, *images) for text in texts]


def theirs(pipe, texts, images=(), *, scale=1.0, num_steps=4, **options):
    """The pipeline's latents. The pipeline replaces an empty negative prompt by " "."""
    return pipe(
        image=list(images) or None,
        prompt=list(texts),
        negative_prompt=[""] * len(texts) if scale > 1 else None,
        true_cfg_scale=scale,
        num_inference_steps=num_steps,
        output_type="latent",
        output_resolution=64,
        **{"generator": tiny_models.generators(len(texts)), "height": 64, "width": 96, "use_kv_cache": False, **options},
    ).images


def ours(model, texts, images=(), *, scale=1.0, num_steps=4):
    conditioning = model.encode(tasks(*images, texts=texts))
    negative = model.encode_negative(tasks(*images, texts=texts)) if scale > 1 else None
    generators = tiny_models.generators(len(texts))
    return tiny_models.euler(model, conditioning, generators, num_steps=num_steps, negative=negative, guidance_scale=scale)


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("images", [0, 1, 2])
@pytest.mark.parametrize("text", [*TEXTS, ""])
def test_sampled_latents_are_bitwise_equal_to_the_pipeline(pipe, text, images, scale):
    sources = IMAGES[:images]
    assert torch.equal(ours(build(pipe), [text], sources, scale=scale), theirs(pipe, [text], sources, scale=scale))


@pytest.mark.parametrize("images", [0, 2])
def test_sampled_latents_match_the_pipeline_with_kv_cache(pipe, images):
    sources = IMAGES[:images]
    cached = theirs(pipe, TEXTS[:1], sources, use_kv_cache=True)
    torch.testing.assert_close(ours(build(pipe), TEXTS[:1], sources), cached, atol=1e-5, rtol=0)


def test_batched_rows_match_the_pipeline_run_on_single_prompts(pipe):
    """In the pipeline's own batch only the longest prompt matches: padding moves the image positions of the others."""
    batch, generators = theirs(pipe, TEXTS), tiny_models.generators(2)
    alone = torch.cat([theirs(pipe, [text], generator=[each]) for text, each in zip(TEXTS, generators, strict=True)])
    mine = ours(build(pipe), TEXTS)
    torch.testing.assert_close(mine[0], batch[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(mine, alone, atol=1e-5, rtol=0)
    assert (batch[1] - alone[1]).abs().max() > 1e-3


def test_sample_sigmas_are_loaded_with_the_weights(tmp_path):
    folder = tiny_qwen_image_2.save(tmp_path, sample_sigmas=[1.0, 0.5])
    assert QwenImage2.from_pretrained(folder, dtype=torch.bfloat16, device="cpu").sample_sigmas == [1.0, 0.5]


def test_sample_sigmas_of_the_weights_are_used_if_num_steps_matches():
    given = [1.0, 0.8, 0.5]
    distilled = tiny_qwen_image_2.pipeline(sample_sigmas=given, scheduler={"use_dynamic_shifting": False, "shift": 1.0})
    model = build(distilled, sample_sigmas=given)
    conditioning = model.encode(tasks())
    assert model.sigmas(3, conditioning).tolist() == pytest.approx([*given, 0.0])
    assert model.sigmas(4, conditioning).tolist() == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])
    assert torch.equal(ours(model, TEXTS[:1], num_steps=3), theirs(distilled, TEXTS[:1], num_steps=40))


@pytest.mark.parametrize(("images", "size"), [(0, (1024, 1024)), (2, (32, 96))])
def test_default_output_size_matches_the_pipeline(pipe, images, size):
    model, sources = build(pipe, size=None), IMAGES[:images]
    conditioning = model.encode(tasks(*sources))
    assert conditioning.shared["size"] == size
    assert model.initial_noise(conditioning, tiny_models.generators(2)).shape[1] == size[0] * size[1] // 16**2
    if sources:
        assert torch.equal(ours(model, TEXTS[:1], sources), theirs(pipe, TEXTS[:1], sources, height=None, width=None))


def test_a_target_like_the_source_is_demonstrated_and_one_of_another_shape_raises(pipe):
    policy = DenoisingPolicy(
        build(pipe, size=None), sampling=tiny.sampling(), eval_steps=2, microbatch=2, copies=WeightCopies(pipe.transformer)
    )

    def demonstrate(*sources, target):
        example = [replace(task, target=target) for task in tasks(*sources, texts=TEXTS[:1])]
        return policy.demonstrate(tiny.batch(1, 1, tasks=lambda count: example))

    assert demonstrate(*IMAGES, target=IMAGES[1]).outputs.shape[1] == 32 * 96 // 16**2
    with pytest.raises(ValueError, match=r"the target of task .* \(120 x 40 px\) becomes \(12, 8\)"):
        demonstrate(IMAGES[0], target=IMAGES[1])
    with pytest.raises(ValueError, match=r"the output of the task is \(4096, 8\); set policy\.model\.size"):
        demonstrate(target=IMAGES[1])


def test_prompt_embeddings_match_the_pipeline(pipe):
    model = build(pipe)
    for sources in ((), IMAGES[:1], IMAGES):
        shown = [image.resize((64, 64)) for image in sources]  # four slots each
        embeds, mask, slots = pipe._get_qwen_prompt_embeds(list(TEXTS), [image.convert("RGBA") for image in shown] or None)
        mine = model.text.embed(TEXTS, [shown] * 2)
        torch.testing.assert_close(mine["embeds"], embeds, atol=1e-5, rtol=0)
        assert torch.equal(mine["mask"], mask.bool())
        assert torch.equal(mine["slots"], slots)
        assert slots.sum(1).tolist() == [4 * len(sources)] * 2


def test_encoded_and_decoded_images_match_the_autoencoder(pipe):
    model = build(pipe)
    images = [tiny_models.image(k, 64, 96) for k in range(2)]
    encoded = model.encode_images(images)
    pixels = pipe.image_processor.preprocess([image.convert("RGBA") for image in images]).unsqueeze(2)
    with torch.no_grad():
        latents = pipe._encode_vae_image(pixels, generator=None)
        decoded = pipe.vae(pixels).sample[:, :, 0]
    torch.testing.assert_close(encoded, latents.flatten(2).transpose(1, 2), atol=1e-6, rtol=0)
    mine = model.decode(encoded, model.encode(tasks()))
    for image, other in zip(mine, pipe.image_processor.postprocess(decoded), strict=True):
        assert other.mode == "RGBA"
        difference = torch.tensor(list(image.tobytes())).int() - torch.tensor(list(white(other).tobytes())).int()
        assert (image.mode, image.size) == ("RGB", (96, 64))
        assert difference.abs().max() <= 1


def white(image: Image) -> Image:
    ground = new("RGBA", image.size, "white")
    ground.alpha_composite(image)
    return ground.convert("RGB")
