"""A diffusers pipeline without a family of its own trains by its own ``__call__``: the same chains, exact ratios, known limits."""

import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler
from diffusers.utils.torch_utils import randn_tensor
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file

import retouch
from retouch.config.section import live_objects
from retouch.models.any_pipeline import DiffusersPipeline
from retouch.models.any_pipeline.model import AnyPipeline, denoiser_name
from retouch.models.base import COMFYUI_FILE, ImageModel
from retouch.models.lora import attention_layers, write_lora
from retouch.models.offloading import build_offloaded
from retouch.models.train import Lora
from retouch.policies.rollout import SDETransition
from retouch.types import Conditioning, Task
from retouch_models.sd3.model import SD3
from small_trainer import redness
from warm_python import run_python

sys.path.insert(0, str(Path(__file__).parents[3] / "measurements" / "pipelines"))
import every_pipeline as tiny

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")
SDXL = "StableDiffusionXLPipeline"
ROLLOUT = {"num_steps": 4, "transition": {"kind": "sde", "noise_level": 0.7}}
PROMPTS = [{"prompt": text} for text in ("a red circle", "blue", "green")]


def built(name: str, **call: Any) -> AnyPipeline:
    pipe, usual = tiny.PIPELINES[name]()
    return AnyPipeline(pipe, call={**usual, **call})


def tasks(name: str = "", *prompts: str) -> list[Task]:
    images = (tiny.photo(64),) if name in tiny.SOURCES else ()
    return [Task(prompt, prompt, images) for prompt in prompts or ("red cube", "a blue cat on a mat")]


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def chain(model: AnyPipeline, conditioning: Conditioning, steps: int, seeds: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """The sigmas, the states and the velocities of a deterministic chain."""
    sigmas = model.sigmas(steps, conditioning)
    states, velocities = [model.initial_noise(conditioning, generators(*seeds))], []
    with torch.no_grad():
        for k in range(steps):
            velocities.append(model.velocity(model.module, states[-1], sigmas[k].expand(len(seeds)), conditioning))
            states.append(states[-1] + (sigmas[k + 1] - sigmas[k]) * velocities[-1])
    return sigmas, states, velocities


def trained(out: Any, model: Any, rows: Any = PROMPTS, **changes: Any) -> Any:
    """A trainer that has made its steps on the CPU."""
    common: dict[str, Any] = {"learning_rate": 1e-2, "tasks_per_step": 2, "group_size": 2, "steps": 1, "device": "cpu"}
    common |= {"peft_config": retouch.Lora(rank=2), "trackers": (), "samples": {"every": 0}, "progress": False}
    made = retouch.Trainer(model, redness, rows, output_dir=out, run_name="run", **{**common, **changes})
    made.train()
    return made


@pytest.mark.parametrize("kind", [DDIMScheduler, EulerDiscreteScheduler])
@pytest.mark.parametrize("name", [SDXL, f"{SDXL}:v"])
def test_a_chain_of_sdxl_is_that_of_ddim_and_of_euler(name, kind):
    pipe, call = tiny.PIPELINES[name]()
    pipe.scheduler = kind.from_config(pipe.scheduler.config, clip_sample=False, set_alpha_to_one=True)
    model = AnyPipeline(pipe, call=call)
    conditioning = model.encode(tasks()).take(torch.tensor([0, 0]))
    _, states, _ = chain(model, conditioning, 8, (0, 1))
    given = {"prompt": "red cube", "num_images_per_prompt": 2, "num_inference_steps": 8, "output_type": "latent", **call}
    theirs = pipe(**given, generator=generators(0, 1)).images
    torch.testing.assert_close(states[-1], theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


def test_log_probabilities_of_sdxl_equal_a_closed_form():
    """mu and log p of Flow-GRPO's step, from epsilon by hand: x = sample / (a + s), sigma = s / (a + s), v = e - x0."""
    model = built(SDXL, guidance_scale=1.0)
    conditioning = model.encode(tasks())
    sigmas, states, _ = chain(model, conditioning, 4, (0, 1))
    x, sigma, after = states[1], float(sigmas[1]), float(sigmas[2])
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    velocity = model.velocity(model.module, x, sigmas[1].expand(2), conditioning)
    step = SDETransition(noise_level=0.7).step(
        x, velocity, sigmas[1].expand(2), sigmas[2].expand(2), sigma_max=sigmas[1], reduction="mean", noise=noise
    )

    scheduler = model.scheduler
    scheduler.set_timesteps(4)
    time = scheduler.timesteps[1]
    a, s = scheduler.alphas_cumprod[time].sqrt(), (1 - scheduler.alphas_cumprod[time]).sqrt()
    sample = x * (a + s)
    pipe = model.pipe
    embeds, _, pooled, _ = pipe.encode_prompt([task.instruction for task in tasks()], do_classifier_free_guidance=False)
    ids = torch.tensor([[32.0, 32.0, 0.0, 0.0, 32.0, 32.0]] * 2)
    with torch.no_grad():
        epsilon = model.module(sample, time, embeds, added_cond_kwargs={"text_embeds": pooled, "time_ids": ids}).sample
    v = epsilon - (sample - s * epsilon) / a
    std = 0.7 * (sigma / (1 - sigma)) ** 0.5
    mean = x * (1 + std**2 / (2 * sigma) * (after - sigma)) + v * (1 + std**2 * (1 - sigma) / (2 * sigma)) * (after - sigma)
    deviation = std * (sigma - after) ** 0.5
    assert sigma == pytest.approx(float(s / (a + s)), abs=1e-6)
    torch.testing.assert_close(velocity, v, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(step.next, mean + deviation * noise, rtol=1e-4, atol=1e-4)
    expected = (-(noise**2) / 2 - np.log(deviation) - np.log(2 * np.pi) / 2).flatten(1).mean(1)
    torch.testing.assert_close(step.log_prob, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [SDXL, "Kandinsky5I2IPipeline", "AuraFlowPipeline", "DreamLitePipeline:edit"])
def test_a_velocity_depends_on_its_own_row_only(name):
    """Rows of two tasks in any order, at levels of their own. AuraFlow takes one level in a pass, DreamLite one row."""
    model = built(name)
    conditioning = model.encode(tasks(name))
    mixed = conditioning.take(torch.tensor([0, 1, 0, 1]))
    sigmas, states, velocities = chain(model, mixed, 4, (0, 1, 2, 3))
    order = torch.tensor([3, 0, 2, 1])
    levels = sigmas[torch.tensor([2, 0, 1, 3])]
    x = torch.stack([states[k][row] for k, row in zip((2, 0, 1, 3), order.tolist(), strict=True)])
    with torch.no_grad():
        got = model.velocity(model.module, x, levels, mixed.take(order))
    expected = torch.stack([velocities[k][row] for k, row in zip((2, 0, 1, 3), order.tolist(), strict=True)])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_prompt_is_encoded_once_for_a_number_of_rows():
    model = built(SDXL)
    calls: list[int] = []
    model.pipe.text_encoder.register_forward_hook(lambda *_: calls.append(1))
    conditioning = model.encode(tasks()).take(torch.tensor([0, 0]))
    chain(model, conditioning, 4, (0, 1))
    first = len(calls)
    _, states, _ = chain(model, conditioning, 4, (2, 3))
    model.decode(states[-1], conditioning)
    assert len(calls) == first


def test_a_chain_is_that_of_a_registered_family():
    pipe = tiny.PIPELINES["StableDiffusion3Pipeline"]()[0]
    ours = AnyPipeline(pipe, size=(32, 32), call={"guidance_scale": 1.0})
    theirs = SD3.from_pretrained(pipe, dtype=torch.float32, device="cpu", size=(32, 32))
    photos = [tiny.photo(32), tiny.photo(32, seed=1)]
    found = []
    for model in (ours, theirs):
        sigmas, states, _ = chain(model, model.encode(tasks()), 4, (0, 1))  # type: ignore[arg-type]
        found.append((sigmas, states[0], states[-1], model.encode_images(photos)))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=2e-6)


def test_frozen_parts_in_cpu_memory_give_the_same_images():
    class Section(ImageModel):
        def build(self, *, device):
            return built(SDXL)

    images = []
    for offload in (False, True):
        made = build_offloaded(Section(), device=torch.device("cpu"), offload=offload, cache_prompts=False)
        conditioning = made.encode(tasks())
        images.append(made.decode(chain(made, conditioning, 2, (0, 1))[1][-1], conditioning))  # type: ignore[arg-type]
    assert [image.tobytes() for image in images[0]] == [image.tobytes() for image in images[1]]


def test_images_have_a_gradient_and_targets_are_decoded_again():
    model = built("Lumina2Pipeline")
    conditioning = model.encode(tasks())
    x = model.initial_noise(conditioning, generators(0, 1)).requires_grad_()
    images = model.decode_tensors(x, conditioning)
    assert images.shape[:2] == (2, 3)
    (gradient,) = torch.autograd.grad(images.mean(), x)
    assert gradient.abs().max() > 0
    clean = model.encode_images([tiny.photo(images.shape[-1])] * 2)
    assert clean.shape == x.shape


@pytest.mark.parametrize(
    ("name", "more"),
    [
        (SDXL, {"quantization_config": "4bit"}),
        (SDXL, {"objective": retouch.NFT()}),
        pytest.param("SanaPipeline", {}, marks=pytest.mark.slow),
        pytest.param("Kandinsky5I2IPipeline", {}, marks=pytest.mark.slow),
    ],
)
def test_a_loaded_pipeline_trains_in_three_lines(tmp_path, name, more):
    pipe, call = tiny.PIPELINES[name]()
    if "quantization_config" in more:  # it would change the weights of a loaded one
        pipe.save_pretrained(tmp_path / "folder")
        pipe = str(tmp_path / "folder")
    rows = [{**row, "image": tiny.photo(64, seed)} for seed, row in enumerate(PROMPTS)] if name in tiny.SOURCES else PROMPTS
    call = {name: value for name, value in call.items() if name not in ("height", "width")}
    made = trained(tmp_path, pipe, rows, size=(64, 64) if "Kandinsky" in name else (32, 32), call=call, **more)
    assert made.recipe.policy.model.kind == "pipeline"
    (step,) = (entry for entry in made.state.log_history if "policy/grad_norm" in entry)
    assert step["policy/grad_norm"] > 0
    assert step.get("policy/ratio_max_first", 0.0) <= 1e-6


class OwnPipeline(diffusers.DiffusionPipeline):
    """A pipeline that nobody has seen: its noise, its loop and its guidance are written in ``__call__``."""

    def __init__(self, unet, scheduler):
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler)

    @torch.no_grad()
    def __call__(self, prompt, num_images_per_prompt=1, num_inference_steps=9, generator=None, output_type="pil", **options):
        shade = torch.tensor([[[len(prompt) / 10.0] * 32]]).repeat(num_images_per_prompt, 1, 1)
        latents = randn_tensor((num_images_per_prompt, 4, 8, 8), generator=generator)
        self.scheduler.set_timesteps(num_inference_steps)
        for t in self.progress_bar(self.scheduler.timesteps):
            guided = self.unet(latents, t, shade).sample - 0.5 * self.unet(latents, t, 0 * shade).sample
            latents = self.scheduler.step(guided, t, latents).prev_sample
        if output_type == "latent":
            return (latents,)
        images = (latents[:, :3] / 2 + 0.5).clamp(0, 1)
        if output_type == "pil":
            return (self.numpy_to_pil(images.detach().permute(0, 2, 3, 1).numpy()),)
        return (images,)


def own_pipeline():
    blocks = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}
    sizes = {"block_out_channels": (8, 16), "layers_per_block": 1, "sample_size": 8, "attention_head_dim": 4, "norm_num_groups": 4}
    unet = diffusers.UNet2DConditionModel(**blocks, **sizes, cross_attention_dim=32)
    return OwnPipeline(unet, DDIMScheduler(clip_sample=False))


class Stop(retouch.Callback):
    def on_step(self, trainer, step, metrics):
        if step == 2:
            trainer.stop()


@pytest.mark.slow
def test_a_class_of_the_user_trains_and_a_run_that_was_stopped_continues_with_the_same_bits(tmp_path):
    def trained_weights(name, *callbacks):
        for each in callbacks:
            torch.manual_seed(0)
            made = trained(tmp_path / name, own_pipeline(), steps=4, callbacks=each)
        assert all(entry["policy/grad_norm"] > 0 for entry in made.state.log_history if "policy/grad_norm" in entry)
        made.save_pretrained(tmp_path / name / "lora")
        return load_file(tmp_path / name / "lora" / "adapter_model.safetensors")

    whole, twice = trained_weights("whole", ()), trained_weights("twice", [Stop()], ())
    assert whole.keys() == twice.keys()
    assert all(torch.equal(whole[key], twice[key]) for key in whole)


# The modules of diffusers whose names ComfyUI knows, from `comfy/utils.py` and, of Kandinsky 5, from its own model.
COMFYUI_KNOWS = {
    "AuraFlowPipeline": r"(joint|single)_transformer_blocks.\d+.attn.(to_[qkv]|to_out.0|add_[qkv]_proj|to_add_out)",
    "ChromaPipeline": r"(single_)?transformer_blocks.\d+.attn.(to_[qkv]|to_out.0|add_[qkv]_proj|to_add_out)",
    "Kandinsky5T2IPipeline": r"(text|visual)_transformer_blocks.\d+.(self|cross)_attention.(to_query|to_key|to_value|out_layer)",
    "Krea2Pipeline": r"(transformer_blocks|text_fusion.(layerwise|refiner)_blocks).\d+.attn.(to_[qkv]|to_gate|to_out.0)",
    "PixArtSigmaPipeline": r"transformer_blocks.\d+.attn[12].(to_[qkv]|to_out.0)",
}  # fmt: skip


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_above_the_noisiest_level_of_sdxl_the_predicted_image_is_that_of_the_level(prediction):
    """DiffusionNFT and supervised learning draw sigma up to 1, where predicted noise gives no image: a is 0."""
    model = AnyPipeline(tiny.sdxl(prediction)[0], call={})
    sigma = torch.stack([model.levels[-1], torch.tensor(0.97), torch.tensor(1.0)])
    sample, output = (torch.randn(1, 4, 8, 8, generator=each).expand(3, -1, -1, -1) for each in generators(0, 1))
    level = sigma.view(-1, 1, 1, 1)
    x = sample * ((1 - level) ** 2 + level**2).sqrt()
    predicted = x - level * model.as_velocity(output, sample, sigma)
    torch.testing.assert_close(predicted, predicted[:1].expand(3, -1, -1, -1), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")  # diffusers' Chroma uses it
@pytest.mark.parametrize("name", ["StableDiffusionPipeline", SDXL, "StableDiffusionInstructPix2PixPipeline", *COMFYUI_KNOWS])
def test_comfyui_knows_each_name_of_the_lora_that_is_written_for_it(tmp_path, name):
    pipe, _ = tiny.PIPELINES[name]()
    module, section = getattr(pipe, denoiser_name(pipe)), DiffusersPipeline(path="python:pipe")
    Lora(kind="lora", rank=4, alpha=8).make_trainable(module, targets=section.targets_in(module), seed=3)
    _ = [torch.nn.init.normal_(each) for path, each in module.named_parameters() if "lora_B" in path]
    with live_objects({"python:pipe": pipe}):
        write_lora(module, tmp_path, pipeline=section.pipeline, comfyui=section.comfyui, format="comfyui")
    written = load_file(tmp_path / COMFYUI_FILE)
    layers = {path: layer for path, layer in module.named_modules() if isinstance(layer, LoraLayer)}
    assert len(written) == 3 * len(layers)
    assert name not in COMFYUI_KNOWS or all(f"transformer.{path}.lora_B.weight" in written for path in layers)
    if name not in COMFYUI_KNOWS:  # a UNet, whose names diffusers reads by the same rule
        fresh, _ = tiny.PIPELINES[name]()
        fresh.load_lora_weights(tmp_path, weight_name=COMFYUI_FILE, adapter_name="read")
    for path, layer in layers.items():
        if name in COMFYUI_KNOWS:
            assert re.fullmatch(COMFYUI_KNOWS[name], path)
        else:
            assert torch.equal(fresh.unet.get_submodule(path).get_delta_weight("read"), layer.get_delta_weight("default"))


def test_attention_layers_are_those_of_attention():
    names = attention_layers(tiny.PIPELINES[SDXL]()[0].unet)
    assert names == tuple(sorted(f"attn{k}.{part}" for k in (1, 2) for part in ("to_q", "to_k", "to_v", "to_out.0")))


def changed(name: str, **changes: Any) -> Any:
    """A tiny pipeline with other parts."""
    pipe, _ = tiny.PIPELINES[name]()
    for key, value in changes.items():
        setattr(pipe, key, value)
    return pipe


class TwoDenoisers(OwnPipeline):
    """A pipeline whose second half is denoised by another model."""

    def __init__(self, unet, unet_2, scheduler):
        super().__init__(unet, scheduler)
        self.register_modules(unet_2=unet_2)


class NoLoop(OwnPipeline):
    """A pipeline that draws."""

    def __call__(self, prompt, generator=None):
        return randn_tensor((1, 3, 8, 8), generator=generator)


class Hidden(OwnPipeline):
    """A pipeline whose loop is in another method."""

    def __call__(self, prompt, **options):
        return super().__call__(prompt, **options)


class Momentum(OwnPipeline):
    """A pipeline that guides with what it kept from the last step."""

    @torch.no_grad()
    def __call__(self, prompt, num_images_per_prompt=1, num_inference_steps=9, generator=None, output_type="pil", **options):
        latents, kept = randn_tensor((num_images_per_prompt, 4, 8, 8), generator=generator), 0
        self.scheduler.set_timesteps(num_inference_steps)
        for t in self.scheduler.timesteps:
            kept = 0.5 * kept + self.unet(latents, t, torch.ones(len(latents), 1, 32)).sample
            latents = self.scheduler.step(kept, t, latents).prev_sample
        return (latents if output_type == "latent" else [None] * len(latents),)


class Early(OwnPipeline):
    """A pipeline that calls its model before its loop."""

    @torch.no_grad()
    def __call__(self, prompt, num_images_per_prompt=1, num_inference_steps=9, generator=None, output_type="pil", **options):
        latents = randn_tensor((num_images_per_prompt, 4, 8, 8), generator=generator)
        self.scheduler.set_timesteps(num_inference_steps)
        first = self.unet(latents, 999, torch.ones(len(latents), 1, 32)).sample
        for t in self.scheduler.timesteps:
            latents = self.scheduler.step(first, t, latents).prev_sample
        return (latents,)


class Idle(OwnPipeline):
    """A pipeline whose loop does not call its model."""

    @torch.no_grad()
    def __call__(self, prompt, num_images_per_prompt=1, num_inference_steps=9, generator=None, output_type="pil", **options):
        latents = randn_tensor((num_images_per_prompt, 4, 8, 8), generator=generator)
        self.scheduler.set_timesteps(num_inference_steps)
        for t in self.scheduler.timesteps:
            latents = self.scheduler.step(latents, t, latents).prev_sample
        return (latents,)


def of_class(kind: type[OwnPipeline]) -> OwnPipeline:
    made = own_pipeline()
    return kind(made.unet, made.scheduler)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "two denoisers": (lambda: TwoDenoisers(own_pipeline().unet, own_pipeline().unet, DDIMScheduler()), {}, "has unet and unet_2"),
    "no denoiser": (lambda: changed(SDXL, unet=None), {}, "has no transformer or unet"),
    "no loop": (lambda: of_class(NoLoop), {}, "calls no scheduler.step itself"),
    "a loop elsewhere": (lambda: of_class(Hidden), {}, "is no plain method"),
    **{
        f"steps of {kind.__name__}": (partial(changed, name, scheduler=kind()), {}, f"{kind.__name__}, {text}")
        for name, kind, text in (
            (SDXL, diffusers.LCMScheduler, "whose steps draw noise"),
            (SDXL, diffusers.TCDScheduler, "whose steps draw noise"),
            (SDXL, diffusers.EDMEulerScheduler, "which is not supported"),
            ("Lumina2Pipeline", diffusers.FlowMatchHeunDiscreteScheduler, "which is not supported"),
            ("Lumina2Pipeline", diffusers.FlowMatchLCMScheduler, "whose steps draw noise"),
        )
    },
    "noise of its own": (
        lambda: changed("Lumina2Pipeline", scheduler=diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)),
        {},
        "stochastic_sampling, which draws noise of its own",
    ),
    "another argument": (lambda: changed(SDXL), {"guidance": 2.0}, "takes no guidance; it takes prompt"),
    "no prompt": (lambda: diffusers.DDPMPipeline(own_pipeline().unet, diffusers.DDPMScheduler()), {}, "takes no prompt"),
    "a model before the loop": (lambda: of_class(Early), {}, "calls its unet before its loop"),
    "a loop without the model": (lambda: of_class(Idle), {}, "does not call its unet"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_a_pipeline_that_cannot_train_is_refused_with_the_reason(wrong):
    build, call, text = REFUSED[wrong]
    with pytest.raises(ValueError, match=text):
        AnyPipeline(build(), call=call).encode(tasks())


def test_a_cache_that_the_first_step_fills_is_found():
    model = built("QwenImage21Pipeline")
    assert model.compare(tasks()[0], 4)[1] == float("inf")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rollout": {**ROLLOUT, "guidance_scale": 4.0}}, "a pipeline guides by itself; use policy.model.call.guidance_scale"),
        ({"sharding": "fsdp2"}, "call the model equally often"),
        ({"call": {"guidance": 4.0}}, "takes no guidance"),
        ({"rows": [{**row, "image": tiny.photo(32, seed)} for seed, row in enumerate(PROMPTS)]},
         "has a source image, and StableDiffusionXLPipeline takes none"),
        ({"model": Momentum, "size": None}, "velocities in another order of steps differ"),
    ],
)  # fmt: skip
def test_a_wrong_run_of_a_pipeline_is_refused(tmp_path, changes, text):
    changes = {"size": (32, 32), "rows": PROMPTS, **changes}
    pipe = of_class(changes.pop("model")) if "model" in changes else changed(SDXL)
    with pytest.raises(ValueError, match=text):
        trained(tmp_path, pipe, changes.pop("rows"), **changes)


@pytest.mark.slow
def test_the_doctor_makes_the_dry_run_of_a_hub_id_from_its_configurations_alone(tmp_path):
    cached = tmp_path / "hub" / "models--acme--xl"
    snapshot = cached / "snapshots" / ("a" * 40)
    tiny.sdxl()[0].save_pretrained(snapshot)
    for file in snapshot.rglob("*.safetensors"):
        file.unlink()
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("a" * 40)
    (tmp_path / "prompts.txt").write_text("red\nblue\ngreen\n")
    recipe = {
        "name": "xl", "out": str(tmp_path / "runs"), "steps": 2, "tasks_per_step": 1, "group_size": 4, "learning_rate": 1e-4,
        "rollout": ROLLOUT,
        "policy": {"kind": "denoising", "model": {"kind": "pipeline", "path": "acme/xl", "size": [32, 32]},
                   "train": {"kind": "lora", "rank": 4, "alpha": 8}},
        "data": {"kind": "prompts", "path": str(tmp_path / "prompts.txt"), "held_out": 1},
        "reward": {"kind": "share", "combine": {"share": 1}},
        "advantage": {"kind": "group"}, "objective": {"kind": "policy_gradient", "clip_low": 1e-4, "clip_high": 1e-4},
    }  # fmt: skip
    (tmp_path / "xl.json").write_text(json.dumps(recipe))
    offline = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    printed = run_python("-m", "retouch", "doctor", tmp_path / "xl.json", "--device", "h100", **offline)
    assert "ok      memory        needs" in printed
    assert "the weights of acme/xl are not on this machine" in printed
