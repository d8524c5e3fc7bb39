"""FLUX.2-klein, Qwen-Image-2.1 and Z-Image in recipes: runs with tiny models, and adapters in diffusers."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Flux2KleinPipeline, ZImagePipeline
from peft import LoraConfig

import tiny_flux2
import tiny_models
import tiny_qwen_image_2
from family_runs import metrics_rows, small_recipe, write_edits
from retouch.inference.exporting import export_target
from retouch.inference.opening import open_recipe, read_target
from retouch.models.base import DiffusersModel
from retouch.models.flux2 import Flux2KleinModel
from retouch.models.flux2.model import Flux2Klein
from retouch.models.qwen_image_2 import QwenImage2Model
from retouch.models.qwen_image_2.model import QwenImage2
from retouch.models.z_image import ZImageModel
from retouch.models.z_image.model import ZImage
from retouch.recipe.recipe import load, parse
from retouch.run.session import run


@dataclass(frozen=True)
class Tiny:
    """A family, and its tiny model: ``save`` writes its folder, ``pipeline`` opens that with diffusers."""

    section: type[DiffusersModel]
    adapter: type
    published: str
    save: Callable[[Path], Path]
    pipeline: Callable[[Path], Any]
    size: tuple[int, int] = (64, 96)
    learning_rate: float = 0.1
    parts: Any = None
    recipe: str = ""

    @property
    def kind(self) -> str:
        return str(self.section.model_fields["kind"].default)

    def model(self, weights: Path | None = None, **changes: Any) -> dict[str, Any]:
        """The section of the published model, or of the tiny one in ``weights``."""
        if weights is not None:
            return {"kind": self.kind, "path": str(weights), "size": list(self.size), "dtype": "float32", **changes}
        return {"kind": self.kind, "path": self.published, "size": [512, 768], "dtype": "bfloat16", **changes}


FAMILIES = {
    "flux2": Tiny(
        Flux2KleinModel,
        Flux2Klein,
        "black-forest-labs/FLUX.2-klein-base-4B",
        tiny_flux2.save,
        Flux2KleinPipeline.from_pretrained,
        parts=tiny_flux2,
        recipe="recipes/flux2/ocr-grpo.jsonnet",
    ),
    "qwen-image-2": Tiny(
        QwenImage2Model,
        QwenImage2,
        "Qwen/Qwen-Image-2.1",
        tiny_qwen_image_2.save,
        lambda _: tiny_qwen_image_2.pipeline(),
        parts=tiny_qwen_image_2,
        recipe="recipes/qwen-image-2/flow-grpo.jsonnet",
    ),
    "z-image": Tiny(
        ZImageModel,
        ZImage,
        "Tongyi-MAI/Z-Image-Turbo",
        tiny_models.save_z_image,
        ZImagePipeline.from_pretrained,
        size=(32, 48),
        learning_rate=1e-2,
    ),
}
EDITORS = [FAMILIES["flux2"], FAMILIES["qwen-image-2"]]
every_family = pytest.mark.parametrize("tiny", FAMILIES.values(), ids=FAMILIES, scope="module")
every_editor = pytest.mark.parametrize("tiny", EDITORS, ids=[tiny.kind for tiny in EDITORS], scope="module")


@pytest.fixture(scope="module")
def weights(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp(tiny.kind))


@every_family
def test_adapter_trained_with_guidance_gives_equal_velocities_in_diffusers(tiny: Tiny, weights: Path, tmp_path: Path) -> None:
    made = small_recipe(tiny.model(weights), tmp_path, minibatches=2, learning_rate=tiny.learning_rate)
    made["policy"]["gradient_checkpointing"] = True
    made["rollout"]["guidance_scale"] = 2.0
    recipe = parse(made)
    assert run(recipe, fresh=False) == 0
    lines = metrics_rows(recipe)
    assert len(lines) == 2
    assert all(line["policy/ratio_max_first"] <= 1e-5 < line["policy/ratio_max"] for line in lines)
    export_target(str(recipe.folder), to=tmp_path / "out")
    parts, step = open_recipe(*read_target(str(recipe.folder)), trained=True)
    parts.judge.close()
    assert step == 2
    model = parts.model
    assert isinstance(model, tiny.adapter)
    pipe = tiny.pipeline(weights)
    conditioning = model.encode([tiny_models.task("one", "a red circle"), tiny_models.task("two", "blue")])
    x, sigma = model.initial_noise(conditioning, tiny_models.generators(2)), torch.tensor([0.8, 0.4])
    with torch.no_grad():
        ours, untrained = (model.velocity(module, x, sigma, conditioning) for module in (model.module, pipe.transformer))
        pipe.load_lora_weights(tmp_path / "out")
        theirs = model.velocity(pipe.transformer, x, sigma, conditioning)
    assert torch.equal(ours, theirs)
    assert not torch.equal(theirs, untrained)


@pytest.mark.parametrize(
    ("tiny", "more"),
    [(FAMILIES["flux2"], {}), (FAMILIES["qwen-image-2"], {"source_area": 64**2})],
    ids=["flux2", "qwen-image-2"],
    scope="module",
)
def test_editing_run_takes_a_step(tiny: Tiny, more: dict[str, int], weights: Path, tmp_path: Path) -> None:
    made = small_recipe(tiny.model(weights, size=None, **more), tmp_path, steps=1)
    recipe = parse(made | {"data": {"kind": "folder", "path": str(write_edits(tmp_path)), "held_out": 1}})
    assert run(recipe, fresh=False) == 0
    assert metrics_rows(recipe)[0]["policy/ratio_max_first"] <= 1e-5


def test_the_recipe_of_flux2_takes_a_step(tmp_path: Path) -> None:
    prompts = tmp_path / "words.txt"
    prompts.write_text('a sign that says "open"\na door with "push" on it\na shop called "Azir"\n')
    judge = json.dumps({"kind": "share", "channel": "red", "combine": {"share": 1}})
    sizes = {"data.path": prompts, "eval.num_steps": 2, "rollout.num_steps": 3, "reward": judge}
    _takes_a_step(FAMILIES["flux2"], tiny_flux2.save(tmp_path / "weights"), tmp_path, sizes)


def test_the_recipe_of_qwen_image_2_takes_a_step(tmp_path: Path) -> None:
    judge = '{"kind": "photos", "colour": [200, 60, 40], "combine": {"reward": 1}}'  # needs no weights
    sizes = {"data.path": write_edits(tmp_path), "eval.num_steps": 6, "rollout.num_steps": 6, "eval.batch": 1, "reward": judge}
    sizes["policy.model.source_area"] = 64**2
    _takes_a_step(FAMILIES["qwen-image-2"], tiny_qwen_image_2.save(tmp_path / "weights"), tmp_path, sizes)


def _takes_a_step(tiny: Tiny, weights: Path, root: Path, changes: dict[str, Any]) -> None:
    small = {"steps": 1, "tasks_per_step": 2, "group_size": 2, "ranks": "null", "out": root, "device": "cpu", "minibatches": 1}
    model = {"policy.model.path": weights, "policy.model.size": list(tiny.size), "policy.model.dtype": "float32"}
    sizes = {"data.held_out": 1, "eval.tasks": 1, "trackers": []}
    recipe = load(tiny.recipe, [f"{key}={value}" for key, value in (small | model | sizes | changes).items()])
    assert run(recipe, fresh=False) == 0
    assert metrics_rows(recipe)[0]["policy/ratio_max_first"] <= 1e-5


def test_step_distilled_weights_train_without_guidance_and_raise_with_it(tmp_path: Path) -> None:
    weights = tiny_flux2.save(tmp_path / "distilled", distilled=True)
    made = small_recipe({"kind": "flux2-klein", "path": str(weights), "size": [64, 96]}, tmp_path, steps=1)
    assert run(parse(made), fresh=False) == 0
    made["rollout"]["guidance_scale"] = 2.0
    with pytest.raises(ValueError, match="step-distilled weights sample without guidance"):
        run(parse(made | {"name": "guided"}), fresh=False)


@every_editor
def test_playground_twin_keeps_the_algorithm_settings_of_the_full_recipe(tiny: Tiny) -> None:
    full, twin = (load(name).document() for name in (tiny.recipe, tiny.recipe.replace(".jsonnet", "-playground.jsonnet")))
    for key in ("objective", "advantage", "optimizer", "minibatches", "epochs"):
        assert full[key] == twin[key]
    for key in ("transition", "window", "reduction", "shared_noise"):
        assert full["rollout"][key] == twin["rollout"][key]
    assert full["policy"]["train"] == twin["policy"]["train"]


@every_family
def test_unsupported_model_settings_raise_when_the_recipe_is_parsed(tiny: Tiny, tmp_path: Path) -> None:
    own = f"only .*'flux' .* has it, and this is '{tiny.kind}'"
    with pytest.raises(ValueError, match=rf"policy\.model\.guidance: unknown key; {own}"):
        parse(small_recipe(tiny.model(guidance=3.5), tmp_path))
    made = small_recipe(tiny.model(), tmp_path)
    made["policy"]["train"] = {"kind": "ip-adapter", "encoder": "playground"}
    with pytest.raises(ValueError, match=f"is for models of Flux and Qwen-Image, not for {tiny.kind}"):
        parse(made)
    if tiny.section.takes.images == (0, 0):
        with pytest.raises(ValueError, match=rf"policy\.model\.size: missing; {tiny.kind} has no source image"):
            parse(small_recipe(tiny.model(size=None), tmp_path))


@every_editor
def test_lora_targets_are_all_linear_layers_of_the_blocks_that_can_have_an_adapter(tiny: Tiny) -> None:
    module, targets = tiny.parts.transformer(), tiny.section.lora_targets
    linear = [name for name, layer in module.named_modules() if isinstance(layer, torch.nn.Linear) and "transformer_blocks" in name]
    left_out = [name for name in linear if not name.endswith(targets)]
    assert linear
    assert left_out == ([f"single_transformer_blocks.{k}.attn.to_out" for k in range(2)] if tiny.kind == "flux2-klein" else [])
    module.requires_grad_(False)
    module.add_adapter(LoraConfig(r=4, target_modules=list(targets)))
    trained = {name.partition(".lora_")[0] for name, weight in module.named_parameters() if weight.requires_grad}
    assert trained == set(linear) - set(left_out)
