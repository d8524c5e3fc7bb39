"""Qwen-Image-2.1 in recipes: a whole run with a tiny model, what diffusers reads of it, and what its published size takes."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_qwen_image_2
import torch
from peft import LoraConfig

import tiny_flux_runs
import tiny_models
from measured_memory import measured_peak, saved_bytes
from published_plans import plan
from retouch.assembly.model import lora_targets
from retouch.doctor.memory import describe, footprint
from retouch.inference.exporting import export_target
from retouch.inference.opening import open_target
from retouch.memory.images import image_model_plan
from retouch.memory.plan import LoraShape, Setup, activation_bytes
from retouch.memory.sizes import lora_count, parameter_count
from retouch.models.base import ImageBatch
from retouch.models.qwen_image_2.family import QwenImage2Model
from retouch.models.qwen_image_2.model import QwenImage2
from retouch.recipe.recipe import load, parse
from retouch.session.session import run

PUBLISHED = {"kind": "qwen-image-2", "path": "Qwen/Qwen-Image-2.1", "size": [512, 768], "dtype": "bfloat16"}
FAMILY = QwenImage2Model(path="Qwen/Qwen-Image-2.1")
RECIPE = "recipes/qwen-image-2/flow-grpo.jsonnet"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen_image_2.save(tmp_path_factory.mktemp("qwen-image-2"))


def recipe_of(model: dict[str, Any], root: Path, **changes: Any) -> dict[str, Any]:
    prompts = root / "prompts.txt"
    prompts.write_text("a red circle on a green square\nblue\ngreen\n")
    made = tiny_flux_runs.small(model, prompts, root / "runs")
    return made | {"data": {"kind": "prompts", "path": str(prompts), "held_out": 1}} | changes


def described(module: Any) -> dict[str, Any]:
    return {"class": type(module).__name__, "config": {key: value for key, value in module.config.items() if key[0] != "_"}}


def lines_of(recipe: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (recipe.folder / "metrics.jsonl").read_text().splitlines()]


def photos(root: Path) -> Path:
    folder = root / "photos"
    folder.mkdir()
    for number in range(3):
        tiny_models.picture(number, 64, 64).save(folder / f"{number}.png")
    rows = [{"file_name": f"{number}.png", "instruction": "make it red"} for number in range(3)]
    (folder / "metadata.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def test_rl_with_guidance_and_what_diffusers_makes_of_the_adapter(weights: Path, tmp_path: Path) -> None:
    made = recipe_of({"kind": "qwen-image-2", "path": str(weights), "size": [64, 96]}, tmp_path, minibatches=2)
    made["policy"]["gradient_checkpointing"] = True
    made["rollout"]["guidance_scale"] = 2.0
    made["learning_rate"] = 0.1
    recipe = parse(made)
    assert run(recipe, fresh=False) == 0
    lines = lines_of(recipe)
    assert len(lines) == 2
    assert all(line["policy/ratio_max_first"] <= 1e-5 < line["policy/ratio_max"] for line in lines)
    export_target(str(recipe.folder), to=tmp_path / "out")
    parts, step = open_target(str(recipe.folder))
    parts.judge.close()
    assert step == 2
    model = parts.model
    assert isinstance(model, QwenImage2)
    pipe = tiny_qwen_image_2.pipeline()
    conditioning = model.encode([tiny_models.task("one", "a red circle"), tiny_models.task("two", "blue")])
    x, sigma = model.initial_noise(conditioning, tiny_models.generators(2)), torch.tensor([0.8, 0.4])
    with torch.no_grad():
        ours, untrained = (model.velocity(module, x, sigma, conditioning) for module in (model.module, pipe.transformer))
        pipe.load_lora_weights(tmp_path / "out")
        theirs = model.velocity(pipe.transformer, x, sigma, conditioning)
    assert torch.equal(ours, theirs)
    assert not torch.equal(theirs, untrained)


def test_it_learns_to_edit_images(weights: Path, tmp_path: Path) -> None:
    made = recipe_of({"kind": "qwen-image-2", "path": str(weights), "size": None, "source_area": 64**2}, tmp_path, steps=1)
    recipe = parse(made | {"data": {"kind": "folder", "path": str(photos(tmp_path)), "held_out": 1}})
    assert run(recipe, fresh=False) == 0
    assert lines_of(recipe)[0]["policy/ratio_max_first"] <= 1e-5
    published = describe(parse(made | {"policy": {**made["policy"], "model": {**PUBLISHED, "size": None}}}), None)
    assert published is not None
    assert footprint(recipe, published).tokens == 64**2 + 4**2 + 512
    assert footprint(parse(made), published).tokens == 64**2 + 512


def test_the_recipe_steps_with_a_tiny_model(weights: Path, tmp_path: Path) -> None:
    small = {"steps": 1, "tasks_per_step": 2, "group_size": 2, "ranks": "null", "out": tmp_path, "device": "cpu", "minibatches": 1}
    model = {"path": weights, "size": [64, 96], "dtype": "float32", "source_area": 64**2}
    sizes = {"data.path": photos(tmp_path), "data.held_out": 1, "eval.tasks": 1, "eval.num_steps": 6, "rollout.num_steps": 6}
    small |= {f"policy.model.{key}": value for key, value in model.items()} | sizes | {"trackers": [], "eval.batch": 1}
    recipe = load(RECIPE, [f"{key}={value}" for key, value in small.items()])
    assert run(recipe, fresh=False) == 0
    assert lines_of(recipe)[0]["policy/ratio_max_first"] <= 1e-5


def test_the_twin_differs_in_its_world_and_sizes_alone() -> None:
    full, twin = (load(name).document() for name in (RECIPE, RECIPE.replace(".jsonnet", "-playground.jsonnet")))
    for key in ("objective", "advantage", "optimizer", "minibatches", "epochs"):
        assert full[key] == twin[key]
    for key in ("transition", "window", "reduction", "shared_noise"):
        assert full["rollout"][key] == twin["rollout"][key]
    assert full["policy"]["train"] == twin["policy"]["train"]


def test_a_recipe_is_checked_before_its_weights_are_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"policy\.model\.guidance: unknown key"):
        parse(recipe_of({**PUBLISHED, "guidance": 3.5}, tmp_path))
    made = recipe_of(PUBLISHED, tmp_path)
    made["policy"]["train"] = {"kind": "ip-adapter", "encoder": "playground"}
    with pytest.raises(ValueError, match="is for models of Flux and Qwen-Image, and not for qwen-image-2"):
        parse(made)


def test_the_published_size() -> None:
    """The transformer's by hand; that of the text encoder, Qwen3-VL-8B, is known without its head of 0.62 billion."""
    parts = FAMILY.published()
    assert parts is not None
    width, text, latents = 4096, 4096, 64
    block = 4 * width**2 + 3 * 3 * width**2 + 2 * 128  # no biases; norms of queries and keys have weights, and no others
    ends = 2 * latents * width + (text + width) * width + text  # tokens in and out, and the text with its norm
    time = (256 + width) * width + (4 + 1) * width**2  # its embedding, and the modulation of all blocks and of the last norm
    assert parameter_count(parts["transformer"]) == 32 * block + ends + time == 7_115_124_736
    assert parameter_count(parts["text_encoder"]) == pytest.approx(8.77e9 - 151_936 * width, rel=0.002)
    assert parameter_count(parts["vae"]) == 337_740_404


def test_what_memory_it_takes_is_planned_from_the_published_configuration(tmp_path: Path) -> None:
    recipe = parse(recipe_of(PUBLISHED, tmp_path))
    published = describe(recipe, None)
    assert published is not None
    found = footprint(recipe, published)
    assert found.tokens == (512 // 16) * (768 // 16) + 512
    setup = Setup(lora=LoraShape(4, tuple(lora_targets(recipe.policy))), rows=32, tokens=found.tokens, gradient_checkpointing=False)
    assert found.plan == plan(FAMILY, setup)


def test_a_folder_is_planned_with_the_numbers_that_it_holds(weights: Path, tmp_path: Path) -> None:
    recipe = parse(recipe_of({**PUBLISHED, "path": str(weights), "size": [64, 96], "dtype": "float32"}, tmp_path))
    in_folder = describe(recipe, weights)
    assert in_folder is not None
    model = recipe.policy.model.build(device=torch.device("cpu"))
    held = {row.name: row.bytes for row in footprint(recipe, in_folder).plan.rows}
    transformer, vae, encoder = model.parts
    assert held["transformer, frozen weights"] == 4 * sum(weight.numel() for weight in transformer.parameters())
    assert held["vae"] == 4 * sum(tensor.numel() for tensor in vae.state_dict().values())
    assert held["text_encoder"] == 4 * sum(weight.numel() for weight in encoder.parameters())


def test_adapters_are_as_large_as_peft_makes_them() -> None:
    module = tiny_qwen_image_2.transformer()
    linear = [name for name, layer in module.named_modules() if isinstance(layer, torch.nn.Linear) and "transformer_blocks" in name]
    assert linear
    assert all(name.endswith(FAMILY.lora_targets) for name in linear)
    module.requires_grad_(False)
    module.add_adapter(LoraConfig(r=4, target_modules=list(FAMILY.lora_targets)))
    trained = sum(weight.numel() for weight in module.parameters() if weight.requires_grad)
    assert lora_count(described(tiny_qwen_image_2.transformer()), rank=4, targets=FAMILY.lora_targets) == trained


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_about_what_autograd_keeps(dtype: torch.dtype) -> None:
    part = described(tiny_qwen_image_2.transformer())
    part["config"] |= {"num_layers": 8, "num_attention_heads": 4}
    module = type(tiny_qwen_image_2.transformer())(**part["config"]).to(dtype).train()
    mask = torch.arange(40 + 256 // 4)[None] >= 40
    inputs: dict[str, Any] = {"hidden_states": torch.randn(1, 256, 8, dtype=dtype), "timestep": torch.tensor([0.5])}
    inputs |= {"encoder_hidden_states": torch.randn(1, 40, 32, dtype=dtype), "img_shapes": [[(1, 16, 16)]], "img_mask": mask}
    setup: dict[str, Any] = {"lora": None, "rows": 1, "tokens": 296, "dtype": dtype}
    measured, shape = saved_bytes(lambda: module(**inputs), module), FAMILY.shape(part)
    assert activation_bytes(shape, Setup(**setup, gradient_checkpointing=False)) == pytest.approx(measured, rel=0.2)
    module.enable_gradient_checkpointing()
    assert saved_bytes(lambda: module(**inputs), module) < activation_bytes(shape, Setup(**setup)) < measured


def test_sampling_takes_what_it_takes_on_the_cpu() -> None:
    module, vae = tiny_qwen_image_2.transformer(), tiny_qwen_image_2.vae()
    parts = {"transformer": described(module), "vae": described(vae)}
    batch = ImageBatch(rows=2, size=(64, 96), source=(64, 64), sources=1, text=24, dtype=torch.float32)
    planned = {row.name: row.bytes for row in image_model_plan(FAMILY, parts, batch).phases}
    inputs = FAMILY.step_inputs(parts, batch)
    inputs = {name: torch.zeros(each.shape) if getattr(each, "is_meta", False) else each for name, each in inputs.items()}
    assert inputs["hidden_states"].shape[:2] == (1, 4 * 6 + 4 * 4), "one row at a time"
    latents = torch.zeros(FAMILY.latents(parts["vae"], batch).shape)
    with torch.no_grad():
        module(**inputs), vae.decode(latents)
        step, decoding = measured_peak(lambda: module(**inputs)), measured_peak(lambda: vae.decode(latents))
    kept = sum(value.nbytes for value in inputs.values() if isinstance(value, torch.Tensor)) + 3 * inputs["hidden_states"].nbytes
    assert 0.75 * (step + kept) < planned["rendering: one denoising step"] <= step + kept
    assert planned["rendering: decoding of latents"] == pytest.approx(decoding, rel=0.05)
