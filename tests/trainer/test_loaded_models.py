"""Loaded models of every family train from Python; a pipeline counts as it is: every other change is taken over or refused."""

import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    FluxFillPipeline,
    FluxKontextPipeline,
    FluxPipeline,
    QwenImageEditPlusPipeline,
    UniPCMultistepScheduler,
    ZImagePipeline,
)
from diffusers.models.attention_processor import JointAttnProcessor2_0
from peft import LoraConfig
from PIL import Image

import retouch
import tiny_emu3
import tiny_flux2
import tiny_janus
import tiny_models
import tiny_pipelines
import tiny_qwen_image_2
import tiny_writers
from retouch.models.loaded import HARMLESS, TAKEN_OVER
from retouch_models.flux.model import Flux, FluxKontext
from retouch_models.qwen_image import model as qwen_text
from retouch_models.qwen_image.model import QwenImageEdit, QwenImageEditPlus
from retouch_models.sd3.model import SD3
from slow_params import slow_except
from small_trainer import redness

EULER = FlowMatchEulerDiscreteScheduler

PROMPTS = [{"prompt": text} for text in ("a red circle", "blue", "green")]


def edits(**more):
    """Rows with a source image."""
    return [{**row, "image": tiny_models.image(number, 32, 32), **more} for number, row in enumerate(PROMPTS)]


def trained(out, model, rows=PROMPTS, **changes):
    """A trainer that has made one step, in which a weight changed."""
    common: dict[str, Any] = {"learning_rate": 1e-2, "tasks_per_step": 1, "group_size": 2, "steps": 1, "device": "cpu"}
    common |= {"peft_config": retouch.Lora(rank=2, alpha=4), "trackers": (), "samples": {"every": 0}, "progress": False}
    made = retouch.Trainer(model, redness, rows, output_dir=out, run_name="run", **{**common, **changes})
    assert made.train() is not None
    (step,) = (entry for entry in made.state.log_history if "policy/grad_norm" in entry)
    assert step["policy/grad_norm"] > 0
    assert step["policy/ratio_max_first"] <= 1e-5
    return made


def flux(kind, folder):
    parts = FluxPipeline.from_pretrained(tiny_models.save_flux(folder, fills=kind is FluxFillPipeline)).components
    return kind(**{name: part for name, part in parts.items() if name not in ("image_encoder", "feature_extractor")})


PIPELINES: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "flux": (lambda folder: flux(FluxPipeline, folder), {}),
    "flux-kontext": (lambda folder: flux(FluxKontextPipeline, folder), {"rows": edits()}),
    "flux-fill": (
        lambda folder: flux(FluxFillPipeline, folder),
        {"rows": edits(mask=Image.new("L", (32, 32), 255)), "columns": {"mask": "mask"}},
    ),
    "flux2-klein": (lambda _: tiny_flux2.pipeline(), {"size": 64}),
    "qwen-image": (lambda _: tiny_pipelines.qwen_image(), {}),
    "qwen-image-edit": (lambda _: tiny_pipelines.qwen_image_edit(), {"rows": edits()}),
    "qwen-image-edit-plus": (lambda _: tiny_pipelines.qwen_image_edit(QwenImageEditPlusPipeline), {"rows": edits()}),
    "qwen-image-2": (lambda _: tiny_qwen_image_2.pipeline(), {"size": 64}),
    "z-image": (lambda folder: ZImagePipeline.from_pretrained(tiny_models.save_z_image(folder)), {}),
}


@pytest.fixture
def small(monkeypatch):
    """Source images keep their size, and the tokenizers know bytes only."""
    monkeypatch.setattr(FluxKontext, "source_as_is", True)
    monkeypatch.setattr(qwen_text, "OFFICIAL_PREFIX", {})
    for editor in (QwenImageEdit, QwenImageEditPlus):
        monkeypatch.setattr(editor, "CONDITION_AREA", 32 * 32)
        monkeypatch.setattr(editor, "SOURCE_AREA", 32 * 32)


@pytest.mark.parametrize("family", slow_except(["flux", "qwen-image-edit-plus", "z-image"], PIPELINES))
def test_a_loaded_pipeline_of_each_family_trains_one_step(family, tmp_path, small):
    load, changes = PIPELINES[family]
    rollout = {"num_steps": 2, "transition": {"kind": "sde", "noise_level": 0.7}}
    made = trained(tmp_path / "runs", load(tmp_path / "model"), **{"size": 32, "rollout": rollout, **changes})
    document = made.recipe.document()["policy"]["model"]
    assert document["kind"] == family
    assert document["dtype"] == "float32"


WRITES = {"rollout": {"kind": "tokens", "max_new_tokens": 5}}


@pytest.mark.parametrize("kind", slow_except(["qwen3", "qwen2.5-vl"], tiny_writers.KINDS))
def test_a_writer_trains_with_a_frozen_pipeline_as_prompt_renderer(kind, tmp_path):
    processor = tiny_writers.tokenizer()
    if kind in tiny_writers.VISION_KINDS:
        processor = tiny_models.ImageProcessorOnly(image_processor=tiny_writers.image_processor(kind), tokenizer=processor)
    pipe = tiny_pipelines.sd3()
    before = {name: weight.clone() for name, weight in pipe.transformer.state_dict().items()}
    renderer = {"model": pipe, "num_steps": 2, "cut_off": "draw"}
    made = trained(tmp_path, tiny_writers.module(kind), renderer=renderer, processing_class=processor, size=32, **WRITES)
    assert made.recipe.document()["renderer"]["kind"] == "prompt"
    assert all(torch.equal(weight, before[name]) for name, weight in pipe.transformer.state_dict().items())


def test_a_qwen_vl_writer_trains_with_a_frozen_editor_as_response_renderer(tmp_path, small):
    pipe = tiny_pipelines.qwen_image_edit()
    writer = tiny_models.qwen_text_encoder(pipe.tokenizer, seed=1)
    renderer = {"model": pipe, "num_steps": 2, "cut_off": "draw"}
    made = trained(tmp_path, writer, edits(), renderer=renderer, processing_class=pipe.processor, **WRITES)
    assert made.recipe.document()["renderer"]["kind"] == "response"


@pytest.mark.slow
def test_emu3_trains_on_image_tokens_and_a_second_run_gives_equal_metrics(tmp_path):
    whole = tiny_emu3.module()
    for name in ("one", "two"):  # as in a notebook; the second run starts from the same weights as the first
        made = trained(tmp_path / name, whole, edits(), size=tiny_emu3.SIZE, processing_class=tiny_emu3.tokenizer())
    assert made.recipe.document()["renderer"]["kind"] == "codes"
    one, two = ((tmp_path / name / "run" / "metrics.jsonl").read_text() for name in ("one", "two"))
    assert one == two


def test_janus_trains_on_image_tokens_and_is_described_in_the_recipe(tmp_path):
    whole = tiny_janus.whole().to(torch.bfloat16)
    whole.save_pretrained(tmp_path / "janus")
    tiny_janus.tokenizer().save_pretrained(tmp_path / "janus")
    whole.config._name_or_path = whole.name_or_path = str(tmp_path / "janus")
    made = retouch.Trainer(whole, redness, PROMPTS, peft_config=retouch.Lora(rank=2, alpha=4))
    document = made.recipe.document()
    assert document["policy"]["model"] == {
        **{"kind": "janus", "path": f"python:{tmp_path / 'janus'}", "dtype": "bfloat16", "attention": "sdpa", "weights": None}
    }
    trained(tmp_path / "runs", whole.float(), samples={"every": 1, "tasks": 1, "groups": 1})


def given(pipe, rows=PROMPTS, **options):
    """Make a run of the pipeline, without training."""
    retouch.Trainer(pipe, redness, rows, peft_config=retouch.Lora(rank=2), device="cpu", **{"size": 32, **options})


def scheduled(**settings):
    return lambda pipe: setattr(pipe, "scheduler", EULER.from_config(pipe.scheduler.config, **settings))


NOISE: dict[str, Callable[[Any], None]] = {
    "set_shift": lambda pipe: pipe.scheduler.set_shift(6.0), "another shift": scheduled(shift=6.0, use_dynamic_shifting=False),
    "a shift by size": scheduled(use_dynamic_shifting=True, base_shift=0.9, max_shift=2.0),
    "a linear shift by size": scheduled(use_dynamic_shifting=True, time_shift_type="linear"),
    "Karras": scheduled(use_karras_sigmas=True), "exponential": scheduled(use_exponential_sigmas=True),
    "a last noise level": scheduled(shift_terminal=0.1),
    "a higher least sigma": lambda pipe: setattr(pipe.scheduler, "sigma_min", 0.3),
}  # fmt: skip


def check_images(kind, pipe, *, num_steps, guidance_scale):
    """Check that the run's sampling gives the image of the pipeline."""
    pipe.set_progress_bar_config(disable=True)
    call = {"num_inference_steps": num_steps, "height": 32, "width": 32, "guidance_scale": guidance_scale}
    (theirs,) = pipe("a red circle", **call, generator=tiny_models.generators(1)).images
    given(pipe)  # a pipeline that has been called is no other pipeline
    model = kind.from_pretrained(pipe, dtype=torch.float32, device="cpu", size=(32, 32))
    conditioning = model.encode([tiny_models.task("x", "a red circle")])
    assert torch.equal(model.sigmas(num_steps, conditioning), pipe.scheduler.sigmas)
    latents = tiny_models.euler(model, conditioning, tiny_models.generators(1), num_steps=num_steps)
    (ours,) = model.decode(latents, conditioning)
    assert np.abs(np.asarray(ours).astype(int) - np.asarray(theirs)).max() <= 1


@pytest.mark.parametrize(
    ("family", "change"), [*(("sd3", change) for change in NOISE), ("flux", "a shift by size"), ("flux", "a last noise level")]
)
def test_point_1_4_a_run_samples_the_images_of_the_pipeline(family, change, tmp_path):
    pipe = tiny_pipelines.sd3() if family == "sd3" else PIPELINES[family][0](tmp_path)
    NOISE[change](pipe)
    check_images(*((SD3, pipe) if family == "sd3" else (Flux, pipe)), num_steps=4, guidance_scale=3.5 if family == "flux" else 1.0)


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


@pytest.mark.parametrize("change", slow_except(["another scale of latents", "no T5", "shorter prompts of CLIP", "frozen"], USED))
def test_point_1_4_what_is_taken_over_gives_the_images_of_the_pipeline(change):
    pipe = tiny_pipelines.sd3()
    USED[change](pipe)
    given(pipe)
    check_images(SD3, pipe, num_steps=3, guidance_scale=1.0)


@pytest.mark.parametrize("family", slow_except(["flux-fill", "qwen-image-edit-plus", "z-image"], PIPELINES))
def test_point_1_4_every_family_refuses_what_no_table_lists(family, tmp_path, small):
    """Each attribute that the pipeline of a family has is given another value, one after the other."""
    load, changes = PIPELINES[family]
    pipe = load(tmp_path)
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
        patch.setattr("retouch_models.qwen_image.model.OFFICIAL_PREFIX", {})
        for name in ("one", "two"):
            trained(tmp_path / name, pipe, gradient_checkpointing=True, **common)
