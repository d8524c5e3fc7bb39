"""FLUX.2-klein in recipes: a whole run with a tiny model, what diffusers reads of it, and what its published sizes take."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_flux2
import torch
from diffusers import Flux2KleinPipeline
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
from retouch.memory.sizes import lora_count, parameter_count, stored_count
from retouch.models.base import ImageBatch
from retouch.models.flux2.family import Flux2KleinModel
from retouch.models.flux2.model import Flux2Klein
from retouch.recipe.recipe import load, parse
from retouch.session.session import run

PUBLISHED = {"kind": "flux2-klein", "path": "black-forest-labs/FLUX.2-klein-base-4B", "size": [512, 768], "dtype": "bfloat16"}
FAMILY = Flux2KleinModel(path="black-forest-labs/FLUX.2-klein-base-4B")
RECIPE = "recipes/flux2/ocr-grpo.jsonnet"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_flux2.save(tmp_path_factory.mktemp("flux2"))


def recipe_of(model: dict[str, Any], root: Path, **changes: Any) -> dict[str, Any]:
    prompts = root / "prompts.txt"
    prompts.write_text("a red circle on a green square\nblue\ngreen\n")
    made = tiny_flux_runs.small(model, prompts, root / "runs")
    return made | {"data": {"kind": "prompts", "path": str(prompts), "held_out": 1}} | changes


def described(module: Any) -> dict[str, Any]:
    return {"class": type(module).__name__, "config": {key: value for key, value in module.config.items() if key[0] != "_"}}


def lines_of(recipe: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (recipe.folder / "metrics.jsonl").read_text().splitlines()]


def test_rl_with_guidance_and_what_diffusers_makes_of_the_adapter(weights: Path, tmp_path: Path) -> None:
    made = recipe_of({"kind": "flux2-klein", "path": str(weights), "size": [64, 96]}, tmp_path, minibatches=2)
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
    assert isinstance(model, Flux2Klein)
    pipe = Flux2KleinPipeline.from_pretrained(weights)
    conditioning = model.encode([tiny_models.task("one", "a red circle"), tiny_models.task("two", "blue")])
    x, sigma = model.initial_noise(conditioning, tiny_models.generators(2)), torch.tensor([0.8, 0.4])
    with torch.no_grad():
        ours, untrained = (model.velocity(module, x, sigma, conditioning) for module in (model.module, pipe.transformer))
        pipe.load_lora_weights(tmp_path / "out")
        theirs = model.velocity(pipe.transformer, x, sigma, conditioning)
    assert torch.equal(ours, theirs)
    assert not torch.equal(theirs, untrained)


def test_it_learns_to_edit_images(weights: Path, tmp_path: Path) -> None:
    data = tmp_path / "photos"
    data.mkdir()
    for number in range(3):
        tiny_models.picture(number, 64, 64).save(data / f"{number}.png")
    rows = [{"file_name": f"{number}.png", "instruction": "make it red"} for number in range(3)]
    (data / "metadata.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    made = recipe_of({"kind": "flux2-klein", "path": str(weights), "size": None}, tmp_path, steps=1)
    recipe = parse(made | {"data": {"kind": "folder", "path": str(data), "held_out": 1}})
    assert run(recipe, fresh=False) == 0
    assert lines_of(recipe)[0]["policy/ratio_max_first"] <= 1e-5
    published = describe(parse(made | {"policy": {**made["policy"], "model": {**PUBLISHED, "size": None}}}), None)
    assert published is not None
    assert footprint(recipe, published).tokens == 2 * 64**2 + 512
    assert footprint(parse(made), published).tokens == 64**2 + 512


def test_step_distilled_weights_train_without_guidance_alone(tmp_path: Path) -> None:
    weights = tiny_flux2.save(tmp_path / "distilled", distilled=True)
    made = recipe_of({"kind": "flux2-klein", "path": str(weights), "size": [64, 96]}, tmp_path, steps=1)
    assert run(parse(made), fresh=False) == 0
    made["rollout"]["guidance_scale"] = 2.0
    with pytest.raises(ValueError, match="step-distilled weights sample without guidance"):
        run(parse(made | {"name": "guided"}), fresh=False)


def test_the_recipe_steps_with_a_tiny_model(weights: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "words.txt"
    prompts.write_text('a sign that says "open"\na door with "push" on it\na shop called "Azir"\n')
    small = {"steps": 1, "tasks_per_step": 2, "group_size": 2, "ranks": "null", "out": tmp_path, "device": "cpu", "minibatches": 1}
    model = {"policy.model.path": weights, "policy.model.size": [64, 96], "policy.model.dtype": "float32"}
    sizes = {"data.path": prompts, "data.held_out": 1, "eval.tasks": 1, "eval.num_steps": 2, "rollout.num_steps": 3, "trackers": []}
    judge = {"reward": json.dumps({"kind": "share", "channel": "red", "combine": {"share": 1}})}
    recipe = load(RECIPE, [f"{key}={value}" for key, value in (small | model | sizes | judge).items()])
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
    with pytest.raises(ValueError, match="is for models of Flux and Qwen-Image, and not for flux2-klein"):
        parse(made)


@pytest.mark.parametrize(
    ("path", "transformer", "text_encoder"),
    [("FLUX.2-klein-base-4B", 3_875_544_576, 4.02e9), ("FLUX.2-klein-9B", 9_078_581_248, 7.57e9)],
)
def test_the_published_sizes(path: str, transformer: int, text_encoder: float) -> None:
    parts = Flux2KleinModel(path=path).published()
    assert parts is not None
    assert parameter_count(parts["transformer"]) == transformer
    assert parameter_count(parts["text_encoder"]) == pytest.approx(text_encoder, rel=0.002)
    assert parameter_count(parts["vae"]) == 84_046_115
    assert stored_count(parts["vae"]) == 84_046_115 + 2 * 128 + 1, "the running statistics are part of the weights"
    assert Flux2KleinModel(path="somebody/else").published() is None


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
    module = tiny_flux2.transformer()
    linear = [name for name, layer in module.named_modules() if isinstance(layer, torch.nn.Linear) and "transformer_blocks" in name]
    left_out = [name for name in linear if not name.endswith(FAMILY.lora_targets)]
    assert left_out == [f"single_transformer_blocks.{k}.attn.to_out" for k in range(2)]
    module.requires_grad_(False)
    module.add_adapter(LoraConfig(r=4, target_modules=list(FAMILY.lora_targets)))
    trained = sum(weight.numel() for weight in module.parameters() if weight.requires_grad)
    assert lora_count(described(tiny_flux2.transformer()), rank=4, targets=FAMILY.lora_targets) == trained


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_about_what_autograd_keeps(dtype: torch.dtype) -> None:
    part = described(tiny_flux2.transformer())
    part["config"] |= {"num_layers": 3, "num_single_layers": 6, "num_attention_heads": 8}
    module = type(tiny_flux2.transformer())(**part["config"]).to(dtype).train()
    inputs: dict[str, Any] = {"hidden_states": torch.randn(2, 256, 64, dtype=dtype), "timestep": torch.tensor([0.5, 0.1])}
    inputs |= {"encoder_hidden_states": torch.randn(2, 40, 48, dtype=dtype)}
    inputs |= {"img_ids": torch.zeros(256, 4), "txt_ids": torch.zeros(40, 4)}
    setup: dict[str, Any] = {"lora": None, "rows": 2, "tokens": 296, "dtype": dtype}
    measured, shape = saved_bytes(lambda: module(**inputs), module), FAMILY.shape(part)
    assert activation_bytes(shape, Setup(**setup, gradient_checkpointing=False)) == pytest.approx(measured, rel=0.2)
    module.enable_gradient_checkpointing()
    assert saved_bytes(lambda: module(**inputs), module) < activation_bytes(shape, Setup(**setup)) < measured


def test_sampling_takes_what_it_takes_on_the_cpu() -> None:
    module, vae = tiny_flux2.transformer(), tiny_flux2.vae()
    parts = {"transformer": described(module), "vae": described(vae)}
    batch = ImageBatch(rows=2, size=(64, 96), source=(64, 64), sources=1, text=24, dtype=torch.float32)
    planned = {row.name: row.bytes for row in image_model_plan(FAMILY, parts, batch).phases}
    inputs = {
        name: torch.zeros(value.shape) if isinstance(value, torch.Tensor) else value
        for name, value in FAMILY.step_inputs(parts, batch).items()
    }
    assert inputs["hidden_states"].shape[1] == 8 * 12 + 8 * 8
    latents = torch.zeros(FAMILY.latents(parts["vae"], batch).shape)
    with torch.no_grad():
        module(**inputs), vae.decode(latents)
        step, decoding = measured_peak(lambda: module(**inputs)), measured_peak(lambda: vae.decode(latents))
    kept = sum(value.nbytes for value in inputs.values() if isinstance(value, torch.Tensor)) + 3 * inputs["hidden_states"].nbytes
    assert planned["rendering: one denoising step"] == pytest.approx(step + kept, rel=0.05)
    assert planned["rendering: decoding of latents"] == pytest.approx(decoding, rel=0.05)
