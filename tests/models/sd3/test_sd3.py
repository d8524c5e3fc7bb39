"""Stable Diffusion 3 against diffusers' own pipeline, with tiny random models."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

import tiny_models
from retouch.models.sd3 import SD3Model
from retouch.models.sd3.model import SD3

SCHEDULER = {"shift": 3.0, "num_train_timesteps": 1000}
TEXTS = ["a red circle", "blue"]


@pytest.fixture(scope="module")
def parts():
    return {
        "transformer": tiny_models.sd3_transformer(),
        "vae": tiny_models.sd3_vae(),
        "text_encoders": (tiny_models.clip(16, 1), tiny_models.clip(24, 2), tiny_models.t5(48, 3)),
        "tokenizers": [tiny_models.clip_tokenizer(), tiny_models.clip_tokenizer(), tiny_models.t5_tokenizer()],
    }


def build(parts, *, leave_out=(), **options):
    keep = [k not in leave_out for k in range(3)]
    parts = {
        **parts,
        "text_encoders": tuple(each if kept else None for each, kept in zip(parts["text_encoders"], keep, strict=True)),
        "tokenizers": [each if kept else None for each, kept in zip(parts["tokenizers"], keep, strict=True)],
    }
    return SD3(**parts, scheduler_config=SCHEDULER, **{"max_sequence_length": 20, **options})


def pipeline(model):
    encoders, tokenizers = (*model.text.clips, model.text.t5), model.text.tokenizers
    pipe = StableDiffusion3Pipeline(
        transformer=model.module,
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=model.latents.vae,
        text_encoder=encoders[0],
        tokenizer=tokenizers[0],
        text_encoder_2=encoders[1],
        tokenizer_2=tokenizers[1],
        text_encoder_3=encoders[2],
        tokenizer_3=tokenizers[2],
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def tasks(texts=TEXTS):
    return [tiny_models.task(text, text) for text in texts]


@pytest.mark.parametrize("leave_out", [(), (2,)])
@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
def test_sampled_latents_match_the_pipeline(parts, guidance_scale, leave_out):
    model = build(parts, leave_out=leave_out, size=(24, 40))
    theirs = pipeline(model)(
        TEXTS,
        guidance_scale=guidance_scale,
        height=24,
        width=40,
        num_inference_steps=5,
        max_sequence_length=20,
        generator=tiny_models.generators(2),
        output_type="latent",
    ).images
    negative = model.encode_negative(tasks()) if guidance_scale > 1 else None
    conditioning = model.encode(tasks())
    ours = tiny_models.euler(
        model, conditioning, tiny_models.generators(2), num_steps=5, negative=negative, guidance_scale=guidance_scale
    )
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("left_out", [0, 1])
def test_omitted_clip_encoder_gives_zero_embeddings(parts, left_out):
    full, less = build(parts).encode(tasks()).tensors, build(parts, leave_out=(left_out,)).encode(tasks()).tensors
    gone = slice(0, 16) if left_out == 0 else slice(16, 40)
    assert full["embeds"][:, :77, gone].abs().max() > 0
    assert not less["embeds"][:, :77, gone].any()
    assert not less["pooled"][:, gone].any()
    for name in full:
        expected = full[name].clone()
        (expected[:, :77, gone] if name == "embeds" else expected[:, gone]).zero_()
        torch.testing.assert_close(less[name], expected, atol=0, rtol=0)


def test_t5_alone_gives_zero_clip_embeddings(parts):
    tensors = build(parts, leave_out=(0, 1)).encode(tasks()).tensors
    assert tensors["embeds"].shape == (2, 97, 48)
    assert not tensors["embeds"][:, :77].any()
    assert tensors["pooled"].shape == (2, 40)


def test_schedule_is_shifted_by_three(parts):
    model = build(parts)
    sigmas = model.sigmas(8, model.encode(tasks()))
    plain = torch.linspace(1000, FlowMatchEulerDiscreteScheduler(**SCHEDULER).sigma_min * 1000, 8) / 1000
    torch.testing.assert_close(sigmas, torch.cat([3 * plain / (1 + 2 * plain), torch.zeros(1)]))


def test_embed_prompts_propagates_gradients_to_the_text_encoders(parts):
    model = build(parts)
    assert not model.encode(tasks()).tensors["embeds"].requires_grad
    conditioning = model.conditioning(model.embed_prompts(TEXTS, ()), size=model.size)
    x = model.initial_noise(conditioning, tiny_models.generators(2))
    model.velocity(model.module, x, torch.tensor([0.5, 0.2]), conditioning).square().mean().backward()
    for encoder in model.text.encoders:
        assert any(weight.grad is not None and weight.grad.any() for weight in encoder.parameters())
        encoder.zero_grad()
    model.module.zero_grad()


def test_a_pipeline_without_t5_is_loaded_without_an_option(parts, tmp_path):
    expected = build(parts, leave_out=(2,), max_sequence_length=256)
    pipe = pipeline(expected)
    pipe.save_pretrained(tmp_path)
    for model in (
        SD3Model(path="loaded", dtype="float32").load(pipe, device=torch.device("cpu")),
        SD3Model(path=str(tmp_path), dtype="float32").build(device=torch.device("cpu")),
    ):
        for name, tensor in model.encode(tasks()).tensors.items():
            torch.testing.assert_close(tensor, expected.encode(tasks()).tensors[name], atol=1e-6, rtol=0)


def test_missing_or_mismatched_text_encoders_raise(parts):
    with pytest.raises(ValueError, match="at least one"):
        build(parts, leave_out=(0, 1, 2))
    with pytest.raises(ValueError, match="tokenizers"):
        build({**parts, "text_encoders": (None, *parts["text_encoders"][1:])})
    with pytest.raises(ValueError, match="pooled"):
        build({**parts, "text_encoders": (tiny_models.clip(24, 1), *parts["text_encoders"][1:])})
