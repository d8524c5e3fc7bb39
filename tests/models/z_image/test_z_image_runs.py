"""Z-Image in recipes: a whole run with a tiny model, what diffusers reads of it, and what its published size takes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ZImagePipeline

import tiny_flux_runs
import tiny_models
from published_plans import plan
from retouch.assembly.model import lora_targets
from retouch.assembly.value_head import build_head
from retouch.doctor.memory import describe, footprint
from retouch.inference.exporting import export_target
from retouch.inference.opening import open_target
from retouch.memory.plan import LoraShape, Setup
from retouch.models.base import DiffusersModel
from retouch.models.common.pipeline_model import accepts_prompt
from retouch.models.z_image.family import ZImageModel
from retouch.models.z_image.model import ZImage
from retouch.objectives.advantages import GAEAdvantage
from retouch.recipe.recipe import parse
from retouch.renderers.wrappers import parts_of
from retouch.session.session import run

PUBLISHED = {"kind": "z-image", "path": "Tongyi-MAI/Z-Image-Turbo", "size": [512, 768], "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_z_image(tmp_path_factory.mktemp("z-image"))


def recipe_of(model: dict[str, Any], root: Path, **changes: Any) -> dict[str, Any]:
    prompts = root / "prompts.txt"
    prompts.write_text("a red circle on a green square\nblue\ngreen\n")
    made = tiny_flux_runs.small(model, prompts, root / "runs")
    return made | {"data": {"kind": "prompts", "path": str(prompts), "held_out": 1}} | changes


def test_rl_with_guidance_and_what_diffusers_makes_of_the_adapter(weights: Path, tmp_path: Path) -> None:
    made = recipe_of({"kind": "z-image", "path": str(weights), "size": [32, 48]}, tmp_path)
    made["policy"]["gradient_checkpointing"] = True
    made["rollout"]["guidance_scale"] = 2.0
    made["minibatches"] = 2
    recipe = parse(made)
    assert run(recipe, fresh=False) == 0
    lines = [json.loads(line) for line in (recipe.folder / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    assert all(line["policy/ratio_max_first"] <= 1e-5 < line["policy/ratio_max"] for line in lines)
    export_target(str(recipe.folder), to=tmp_path / "out")
    parts, step = open_target(str(recipe.folder))
    parts.judge.close()
    assert step == 2
    model = parts.model
    assert isinstance(model, ZImage)
    pipe = ZImagePipeline.from_pretrained(weights)
    conditioning = model.encode([tiny_models.task("one", "a red circle"), tiny_models.task("two", "blue")])
    x, sigma = model.initial_noise(conditioning, tiny_models.generators(2)), torch.tensor([0.8, 0.4])
    with torch.no_grad():
        ours, untrained = (model.velocity(module, x, sigma, conditioning) for module in (model.module, pipe.transformer))
        pipe.load_lora_weights(tmp_path / "out")
        theirs = model.velocity(pipe.transformer, x, sigma, conditioning)
    assert torch.equal(ours, theirs)
    assert not torch.equal(theirs, untrained)


def test_a_recipe_is_checked_before_its_weights_are_looked_for(tmp_path: Path) -> None:
    without = {key: value for key, value in PUBLISHED.items() if key != "size"}
    with pytest.raises(ValueError, match=r"policy\.model\.size: missing; z-image has no source image"):
        parse(recipe_of(without, tmp_path))
    with pytest.raises(ValueError, match=r"policy\.model\.guidance: unknown key; only .*'flux' .* has it, and this is 'z-image'"):
        parse(recipe_of({**PUBLISHED, "guidance": 3.5}, tmp_path))
    made = recipe_of(PUBLISHED, tmp_path)
    made["policy"]["train"] = {"kind": "ip-adapter", "encoder": "playground"}
    with pytest.raises(ValueError, match="is for models of Flux and Qwen-Image, and not for z-image"):
        parse(made)


@pytest.mark.parametrize("path", ["Tongyi-MAI/Z-Image-Turbo", "Tongyi-MAI/Z-Image"])
def test_what_memory_it_takes_is_planned_from_the_published_configuration(path: str, tmp_path: Path) -> None:
    recipe = parse(recipe_of({**PUBLISHED, "path": path}, tmp_path))
    described = describe(recipe, None)
    assert described is not None
    found = footprint(recipe, described)
    assert found.tokens == (512 // 16) * (768 // 16) + 512
    setup = Setup(lora=LoraShape(4, tuple(lora_targets(recipe.policy))), rows=32, tokens=found.tokens, gradient_checkpointing=False)
    assert found.plan == plan(ZImageModel(path=path), setup)


def test_a_folder_is_planned_with_the_numbers_that_it_holds(weights: Path, tmp_path: Path) -> None:
    section = {**PUBLISHED, "path": str(weights), "size": [32, 48], "dtype": "float32"}
    recipe = parse(recipe_of(section, tmp_path, advantage={"kind": "gae"}))
    described = describe(recipe, weights)
    assert described is not None
    assert isinstance(recipe.policy.model, DiffusersModel)
    assert isinstance(recipe.advantage, GAEAdvantage)
    model = recipe.policy.model.build(device=torch.device("cpu"))
    head = build_head(recipe.advantage.head, model, tasks=[tiny_models.task("one", "blue")], seed=0)
    held = {row.name: row.bytes for row in footprint(recipe, described).plan.rows}
    transformer, vae, encoder = ([weight.numel() for weight in part.parameters()] for part in parts_of(model))
    assert held["transformer, frozen weights"] == 4 * sum(transformer)
    assert held["vae"] == 4 * sum(vae)
    assert held["text_encoder"] == 4 * sum(encoder)
    head_numbers = sum(weight.numel() for weight in head.parameters())
    assert 0.5 * held["value head"] < 16 * head_numbers <= held["value head"]


def test_a_writer_is_told_which_prompts_it_reads(weights: Path) -> None:
    section = ZImageModel(path=str(weights), size=(32, 48), dtype="float32")
    model = section.build(device=torch.device("cpu"))
    assert isinstance(model, ZImage)
    assert accepts_prompt(model, "a red circle")
    assert not accepts_prompt(model, "blue " * 120)
    assert not accepts_prompt(model, "blue<|im_end|>")
