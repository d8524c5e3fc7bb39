"""Loaded models of every family train from Python, each for one step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxFillPipeline, FluxKontextPipeline, FluxPipeline, QwenImageEditPlusPipeline, ZImagePipeline
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
from retouch.models.flux.model import FluxKontext
from retouch.models.qwen_image import model as qwen_text
from retouch.models.qwen_image.model import QwenImageEdit, QwenImageEditPlus
from small_trainer import redness

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


@pytest.mark.parametrize("family", PIPELINES)
def test_a_loaded_pipeline_of_each_family_trains_one_step(family, tmp_path, small):
    load, changes = PIPELINES[family]
    rollout = {"num_steps": 2, "transition": {"kind": "sde", "noise_level": 0.7}}
    made = trained(tmp_path / "runs", load(tmp_path / "model"), **{"size": 32, "rollout": rollout, **changes})
    document = made.recipe.document()["policy"]["model"]
    assert document["kind"] == family
    assert document["dtype"] == "float32"


def test_a_pipeline_that_already_has_a_lora_raises(tmp_path):
    pipe = tiny_pipelines.sd3()
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["attn.to_q"]))
    with pytest.raises(ValueError, match=r"model.transformer has a LoRA already; fuse it \(pipe.fuse_lora"):
        trained(tmp_path, pipe, size=32)


WRITES = {"rollout": {"kind": "tokens", "max_new_tokens": 5}}


@pytest.mark.parametrize("kind", tiny_writers.KINDS)
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
