"""A pipeline object counts as it is: a run trains on its noise levels, and any other change of it is taken over or refused."""

import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler, UniPCMultistepScheduler
from diffusers.models.attention_processor import JointAttnProcessor2_0
from peft import LoraConfig
from test_loaded_models import PIPELINES, PROMPTS, small, trained  # noqa: F401

import retouch
import tiny_models
import tiny_pipelines
from retouch.models.flux.model import Flux
from retouch.models.loaded import HARMLESS, TAKEN_OVER
from retouch.models.sd3.model import SD3
from small_trainer import redness

EULER = FlowMatchEulerDiscreteScheduler


def made(name, folder):
    return tiny_pipelines.sd3() if name == "sd3" else PIPELINES[name][0](folder)


def given(pipe, rows=PROMPTS, **options):
    """Make a run of the pipeline, without training."""
    retouch.Trainer(pipe, redness, rows, peft_config=retouch.Lora(rank=2), device="cpu", **{"size": 32, **options})


def scheduled(**settings):
    return lambda pipe: setattr(pipe, "scheduler", EULER.from_config(pipe.scheduler.config, **settings))


def set_shift(shift):
    return lambda pipe: pipe.scheduler.set_shift(shift)


NOISE: dict[str, Callable[[Any], None]] = {
    **{f"set_shift({shift})": set_shift(shift) for shift in (1.0, 3.0, 6.0)},
    "another shift": scheduled(shift=6.0, use_dynamic_shifting=False),
    "a shift by size": scheduled(use_dynamic_shifting=True, base_shift=0.9, max_shift=2.0),
    "a linear shift by size": scheduled(use_dynamic_shifting=True, time_shift_type="linear"),
    "Karras": scheduled(use_karras_sigmas=True),
    "exponential": scheduled(use_exponential_sigmas=True),
    "a last noise level": scheduled(shift_terminal=0.1),
    "a higher least sigma": lambda pipe: setattr(pipe.scheduler, "sigma_min", 0.3),
}


@pytest.mark.parametrize("change", NOISE)
@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_point_1_4_a_run_samples_the_images_of_the_pipeline(family, change, tmp_path):
    pipe = made(family, tmp_path)
    pipe.set_progress_bar_config(disable=True)
    NOISE[change](pipe)
    theirs = pipe(
        "a red circle", num_inference_steps=4, height=32, width=32, guidance_scale=3.5 if family == "flux" else 1.0,
        generator=tiny_models.generators(1),
    ).images  # fmt: skip
    given(pipe)  # a pipeline that has been called is no other pipeline
    model = {"sd3": SD3, "flux": Flux}[family].from_pretrained(pipe, dtype=torch.float32, device="cpu", size=(32, 32))
    conditioning = model.encode([tiny_models.task("x", "a red circle")])
    assert torch.equal(model.sigmas(4, conditioning), pipe.scheduler.sigmas)
    ours = model.decode(tiny_models.euler(model, conditioning, tiny_models.generators(1), num_steps=4), conditioning)
    assert np.abs(np.asarray(ours[0]).astype(int) - np.asarray(theirs[0])).max() <= 1


def test_point_1_4_a_folder_with_another_scheduler_is_refused_and_another_shift_is_used(tmp_path):
    pipe = tiny_pipelines.sd3()
    scheduled(shift=6.0)(pipe)
    pipe.save_pretrained(tmp_path / "shift")
    model = SD3.from_pretrained(tmp_path / "shift", dtype=torch.float32, device="cpu")
    pipe.scheduler.set_timesteps(4)
    assert torch.equal(model.sigmas(4, model.encode([tiny_models.task("x", "red")])), pipe.scheduler.sigmas)
    for number, other in enumerate([FlowMatchHeunDiscreteScheduler(), EULER(invert_sigmas=True)]):
        pipe.scheduler = other
        pipe.save_pretrained(tmp_path / str(number))
        with pytest.raises(ValueError, match=r"scheduler: a FlowMatchHeunDiscreteScheduler|invert_sigmas: True is not supported"):
            SD3.from_pretrained(tmp_path / str(number), dtype=torch.float32, device="cpu")


class OwnPipeline(type(tiny_pipelines.sd3())):
    """A pipeline with another prompt encoding."""


OwnPipeline.__name__ = "StableDiffusion3Pipeline"


def on(path, act):
    """Act on the part of the pipeline at this path."""

    def change(pipe):
        part = pipe
        for name in path.split("."):
            part = part[int(name)] if name.isdigit() else getattr(part, name)
        act(part)

    return change


def replaced(path, value):
    where, _, name = path.rpartition(".")
    return lambda pipe: on(where, lambda part: setattr(part, name, value))(pipe) if where else setattr(pipe, name, value)


def hooked(part):
    part.register_forward_hook(lambda module, inputs, output: output)


REFUSED = [
    (lambda pipe: setattr(pipe, "scheduler", FlowMatchHeunDiscreteScheduler.from_config(pipe.scheduler.config)),
     "model.scheduler: a FlowMatchHeunDiscreteScheduler takes other steps"),
    (replaced("scheduler", UniPCMultistepScheduler(use_flow_sigmas=True)), "a UniPCMultistepScheduler"),
    (replaced("scheduler", type("FlowMatchEulerDiscreteScheduler", (EULER,), {})()), "takes other steps"),
    (scheduled(stochastic_sampling=True), "model.scheduler.stochastic_sampling: True is not supported"),
    (scheduled(invert_sigmas=True), "model.scheduler.invert_sigmas: True"),
    (scheduled(num_train_timesteps=500), "model.scheduler.num_train_timesteps: 500"),
    (replaced("scheduler.set_timesteps", print), "model.scheduler.set_timesteps: changed"),
    (lambda pipe: setattr(pipe, "__class__", OwnPipeline), "is a class of your own"),
    (replaced("encode_prompt", print), "model.encode_prompt: changed"),
    (replaced("tokenizer_max_length", 20), "model.tokenizer_max_length: changed"),
    (on("image_processor", lambda part: part.register_to_config(do_normalize=False)), "do_normalize"),
    (replaced("transformer.forward", print), "model.transformer.forward: changed"),
    (replaced("vae.decode", print), "model.vae.decode: changed"),
    (lambda pipe: setattr(pipe.tokenizer, "encode", types.MethodType(print, pipe.tokenizer)), "model.tokenizer.encode: changed"),
    (on("transformer.transformer_blocks.0", hooked), r"model.transformer.transformer_blocks.0._forward_hooks"),
    (on("text_encoder", hooked), r"model.text_encoder._forward_hooks"),
    (lambda pipe: pipe.transformer.fuse_qkv_projections(), "model.transformer.transformer_blocks.0.attn"),
    (
        lambda pipe: pipe.transformer.set_attn_processor(type("Own", (JointAttnProcessor2_0,), {})()),
        "model.transformer.transformer_blocks.0.attn.processor",
    ),
    (replaced("text_encoder_3.encoder.final_layer_norm", torch.nn.Identity()), "encoder.final_layer_norm"),
    (replaced("vae.decoder.conv_norm_out.eps", 0.1), "model.vae.decoder.conv_norm_out.eps"),
    (lambda pipe: setattr(pipe, "transformer", torch.compile(pipe.transformer)), "OptimizedModule"),
    (lambda pipe: pipe.transformer.compile(), "model.transformer._compiled_call_impl"),
    (on("transformer.proj_out", lambda part: part.requires_grad_(False)), "only some weights require"),
    (lambda pipe: pipe.transformer.enable_layerwise_casting(torch.bfloat16, torch.float32),
     "or it has hooks for caching or casting"),
    (lambda pipe: pipe.text_encoder.add_adapter(LoraConfig(r=2, target_modules=["q_proj"])),
     "model.text_encoder has a LoRA already"),
    (lambda pipe: (pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"])), pipe.transformer.fuse_lora()),
     "model.transformer has a LoRA already"),
    (replaced("vae.config_of_the_future", 1), "model.vae.config_of_the_future"),
    (replaced("guidance_of_the_future", 1), "model.guidance_of_the_future"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_point_1_4_a_change_that_a_run_would_drop_is_refused_by_name(change, message):
    pipe = tiny_pipelines.sd3()
    change(pipe)
    with pytest.raises(ValueError, match=message):
        given(pipe)


USED: dict[str, Callable[[Any], Any]] = {
    "tiles": lambda pipe: pipe.vae.enable_tiling(),
    "slices": lambda pipe: pipe.vae.enable_slicing(),
    "another scale of latents": lambda pipe: pipe.vae.register_to_config(scaling_factor=0.7, shift_factor=0.2),
    "another dtype of a part": lambda pipe: pipe.text_encoder_3.to(torch.bfloat16),
    "no T5": lambda pipe: pipe.register_modules(text_encoder_3=None, tokenizer_3=None),
    "padding on the left": lambda pipe: setattr(pipe.tokenizer, "padding_side", "left"),
    "shorter prompts of CLIP": lambda pipe: (
        [setattr(part, "model_max_length", 20) for part in (pipe.tokenizer, pipe.tokenizer_2)]
        and setattr(pipe, "tokenizer_max_length", 20)
    ),
    "frozen": lambda pipe: pipe.transformer.requires_grad_(False),
    "recomputed activations": lambda pipe: pipe.transformer.enable_gradient_checkpointing(),
    "a layer's other weights": lambda pipe: pipe.transformer.proj_out.weight.data.mul_(0.5),
}


@pytest.mark.parametrize("change", USED)
def test_point_1_4_what_is_taken_over_gives_the_images_of_the_pipeline(change):
    pipe = tiny_pipelines.sd3()
    USED[change](pipe)
    given(pipe)
    theirs = pipe(
        "a red circle", num_inference_steps=3, height=32, width=32, guidance_scale=1.0, generator=tiny_models.generators(1)
    )
    model = SD3.from_pretrained(pipe, dtype=torch.float32, device="cpu", size=(32, 32))
    conditioning = model.encode([tiny_models.task("x", "a red circle")])
    ours = model.decode(tiny_models.euler(model, conditioning, tiny_models.generators(1), num_steps=3), conditioning)
    assert np.abs(np.asarray(ours[0]).astype(int) - np.asarray(theirs.images[0])).max() <= 1


@pytest.mark.parametrize("family", PIPELINES)
def test_point_1_4_every_family_refuses_what_no_table_lists(family, tmp_path, small):  # noqa: F811
    """Each attribute that the pipeline of a family has is given another value, one after the other."""
    pipe = made(family, tmp_path)
    changes = PIPELINES[family][1]
    given(pipe, **changes)
    for name, value in list(vars(pipe).items()):
        if name in pipe.components or name in TAKEN_OVER | HARMLESS or name == "_internal_dict":
            continue
        setattr(pipe, name, object())
        with pytest.raises(ValueError, match=rf"^model\.{name}: changed after"):
            given(pipe, **changes)
        setattr(pipe, name, value)


def test_point_1_4_the_page_lists_what_is_taken_over_and_what_is_harmless():
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
    table = page.partition("## A pipeline that a script has changed")[2].partition("\n## ")[0]
    taken, harmless = (re.search(rf"^\| {row} \|(.*)$", table, re.M) for row in ("taken over", "without effect"))
    assert set(re.findall(r"`(\w+)`", taken[1])) >= TAKEN_OVER
    assert set(re.findall(r"`(\w+)`", harmless[1])) == HARMLESS


def test_point_1_4_a_second_run_accepts_what_the_first_has_changed(tmp_path):
    pipe = tiny_pipelines.qwen_image()
    common = {"rollout": {"num_steps": 2, "transition": {"kind": "sde", "noise_level": 0.7}}, "size": 32}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("retouch.models.qwen_image.model.OFFICIAL_PREFIX", {})
        for name in ("one", "two"):
            trained(tmp_path / name, pipe, gradient_checkpointing=True, **common)
