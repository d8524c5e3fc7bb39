"""FLUX.2-klein, Qwen-Image-2.1 and Z-Image in recipes: runs with tiny models, adapters in diffusers, and memory plans."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Flux2KleinPipeline, ZImagePipeline
from peft import LoraConfig

import tiny_flux2
import tiny_models
import tiny_qwen_image_2
from family_runs import description_of, metrics_rows, small_recipe, write_edits
from measured_memory import measured_peak
from published_plans import plan
from retouch.assembly.model import lora_targets
from retouch.doctor.memory import describe, footprint
from retouch.inference.exporting import export_target
from retouch.inference.opening import open_recipe, read_target
from retouch.memory.images import image_model_plan
from retouch.memory.plan import LoraShape, Setup
from retouch.memory.sizes import lora_count
from retouch.models.base import DiffusersModel
from retouch.models.flux2.family import Flux2KleinModel
from retouch.models.flux2.model import Flux2Klein
from retouch.models.qwen_image_2.family import QwenImage2Model
from retouch.models.qwen_image_2.model import QwenImage2
from retouch.models.shapes import ImageBatch
from retouch.models.z_image.family import ZImageModel
from retouch.models.z_image.model import ZImage
from retouch.recipe.recipe import load, parse
from retouch.session.session import run


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
    first_input: tuple[int, int] = (0, 0)
    planned_share: tuple[float, float] = (0.95, 1.05)

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
        first_input=(2, 8 * 12 + 8 * 8),
    ),
    "qwen-image-2": Tiny(
        QwenImage2Model,
        QwenImage2,
        "Qwen/Qwen-Image-2.1",
        tiny_qwen_image_2.save,
        lambda _: tiny_qwen_image_2.pipeline(),
        parts=tiny_qwen_image_2,
        recipe="recipes/qwen-image-2/flow-grpo.jsonnet",
        first_input=(1, 4 * 6 + 4 * 4),  # one row at a time
        planned_share=(0.75, 1.0),  # a part of the modulation is not traced, see its family.py
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
    ("tiny", "more", "source_tokens"),
    [(FAMILIES["flux2"], {}, 64**2), (FAMILIES["qwen-image-2"], {"source_area": 64**2}, 4**2)],
    ids=["flux2", "qwen-image-2"],
    scope="module",
)
def test_editing_run_takes_a_step_and_memory_plan_counts_source_tokens(
    tiny: Tiny, more: dict[str, int], source_tokens: int, weights: Path, tmp_path: Path
) -> None:
    made = small_recipe(tiny.model(weights, size=None, **more), tmp_path, steps=1)
    recipe = parse(made | {"data": {"kind": "folder", "path": str(write_edits(tmp_path)), "held_out": 1}})
    assert run(recipe, fresh=False) == 0
    assert metrics_rows(recipe)[0]["policy/ratio_max_first"] <= 1e-5
    published = describe(parse(made | {"policy": {**made["policy"], "model": tiny.model(size=None)}}), None)
    assert published is not None
    assert footprint(recipe, published).tokens == 64**2 + source_tokens + 512
    assert footprint(parse(made), published).tokens == 64**2 + 512


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


@pytest.mark.parametrize(
    ("tiny", "path"),
    [*((tiny, tiny.published) for tiny in FAMILIES.values()), (FAMILIES["z-image"], "Tongyi-MAI/Z-Image")],
    ids=[*FAMILIES, "z-image-base"],
)
def test_memory_is_planned_from_the_published_configuration(tiny: Tiny, path: str, tmp_path: Path) -> None:
    recipe = parse(small_recipe(tiny.model(path=path), tmp_path))
    published = describe(recipe, None)
    assert published is not None
    found = footprint(recipe, published)
    assert found.tokens == (512 // 16) * (768 // 16) + 512
    setup = Setup(
        lora=LoraShape(4, tuple(lora_targets(recipe.policy))),
        rows=32,
        tokens=found.tokens,
        trained_dtype=torch.bfloat16,
        gradient_checkpointing=False,
    )
    *training, _ = found.plan.rows
    assert training == list(plan(tiny.section(path=path), setup).rows)
    assert [phase.name for phase in found.plan.phases] == ["sampling: one denoising step", "sampling: decoding of latents"]


@every_family
def test_memory_plan_of_a_local_folder_counts_its_weights(tiny: Tiny, weights: Path, tmp_path: Path) -> None:
    recipe = parse(small_recipe(tiny.model(weights), tmp_path))
    in_folder = describe(recipe, weights)
    assert in_folder is not None
    model = recipe.policy.model.build(device=torch.device("cpu"))
    held = {row.name: row.bytes for row in footprint(recipe, in_folder).plan.rows}
    transformer, vae, encoder = model.parts
    assert held["transformer, frozen weights"] == 4 * sum(weight.numel() for weight in transformer.parameters())
    assert held["vae"] == 4 * sum(tensor.numel() for tensor in vae.state_dict().values())
    assert held["text_encoder"] == 4 * sum(weight.numel() for weight in encoder.parameters())


@every_editor
def test_lora_count_matches_the_parameters_created_by_peft(tiny: Tiny) -> None:
    module, targets = tiny.parts.transformer(), tiny.section.lora_targets
    linear = [name for name, layer in module.named_modules() if isinstance(layer, torch.nn.Linear) and "transformer_blocks" in name]
    left_out = [name for name in linear if not name.endswith(targets)]
    assert linear
    assert left_out == ([f"single_transformer_blocks.{k}.attn.to_out" for k in range(2)] if tiny.kind == "flux2-klein" else [])
    module.requires_grad_(False)
    module.add_adapter(LoraConfig(r=4, target_modules=list(targets)))
    trained = sum(weight.numel() for weight in module.parameters() if weight.requires_grad)
    assert lora_count(description_of(tiny.parts.transformer()), rank=4, targets=targets) == trained


@every_editor
def test_planned_rendering_memory_matches_the_measured_peak_on_cpu(tiny: Tiny) -> None:
    module, vae, family = tiny.parts.transformer(), tiny.parts.vae(), tiny.section(path=tiny.published)
    parts = {"transformer": description_of(module), "vae": description_of(vae)}
    batch = ImageBatch(rows=2, size=(64, 96), source=(64, 64), sources=1, text=24, dtype=torch.float32)
    planned = {row.name: row.bytes for row in image_model_plan(family, parts, batch).phases}
    inputs = family.step_inputs(parts, batch)
    inputs = {name: torch.zeros(each.shape) if getattr(each, "is_meta", False) else each for name, each in inputs.items()}
    assert inputs["hidden_states"].shape[:2] == tiny.first_input
    step = partial(module, **inputs)
    decode = partial(vae.decode, torch.zeros(family.latents(parts["vae"], batch).shape))
    encode = partial(vae.encode, torch.zeros(family.pixels(parts["vae"], batch).shape))
    with torch.no_grad():
        step(), decode(), encode()
        stepping, decoding, encoding = measured_peak(step), measured_peak(decode), measured_peak(encode)
    kept = sum(value.nbytes for value in inputs.values() if isinstance(value, torch.Tensor)) + 3 * inputs["hidden_states"].nbytes
    low, high = tiny.planned_share
    assert low * (stepping + kept) < planned["rendering: one denoising step"] <= high * (stepping + kept)
    assert planned["rendering: decoding of latents"] == pytest.approx(decoding, rel=0.05)
    # The CPU's convolutions of the encoder have workspaces, which a plan does not count: up to 262,144 bytes here.
    assert encoding - 2**18 <= planned["rendering: encoding of source images"] <= 1.05 * encoding
