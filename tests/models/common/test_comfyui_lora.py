"""A LoRA file for ComfyUI: ComfyUI loads all of its keys with the right scale; diffusers generates the same image from it."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file

import tiny_flux2
import tiny_models
import tiny_pipelines
from comfyui_loader import ComfyUILoader
from families import FAMILIES
from retouch.models.base import COMFYUI_FILE as FILE
from retouch.models.base import DiffusersModel
from retouch.models.flux2 import Flux2KleinModel
from retouch.models.lora import write_lora
from retouch.models.qwen_image import model as qwen_model
from retouch.models.sd3 import SD3Model
from retouch.types import Task
from slow_params import slow_except

DIFFUSERS = "pytorch_lora_weights.safetensors"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def saved(name: str) -> Path:
        folder: Path = tmp_path_factory.mktemp(name)
        FAMILIES[name].save(folder)
        return folder

    return saved


def velocity(model: Any, tasks: list[Task], transformer: Any) -> torch.Tensor:
    conditioning = model.encode(tasks)
    x = model.initial_noise(conditioning, tiny_models.generators(len(tasks)))
    with torch.no_grad():
        made: torch.Tensor = model.velocity(transformer, x, torch.linspace(0.8, 0.3, len(tasks)), conditioning)
    return made


def train(pipe: Any, family: type[DiffusersModel], *, alpha: float, targets: tuple[str, ...] | None = None) -> None:
    """Give the transformer an adapter of rank 4 whose weights are random."""
    torch.manual_seed(5)
    config = LoraConfig(r=4, lora_alpha=alpha, init_lora_weights=False, target_modules=list(targets or family.lora_targets))
    pipe.transformer.add_adapter(config)


def write(pipe: Any, family: type[DiffusersModel], to: Path) -> None:
    to.mkdir()
    write_lora(pipe.transformer, to, pipeline=family.pipeline, comfyui=family.comfyui)


every_family = pytest.mark.parametrize(
    "name", ["sd3", "flux", "flux-kontext", "flux-fill", "flux2", "qwen-image", "qwen-image-edit", "z-image"]
)


@pytest.fixture(autouse=True)
def _prefix_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qwen_model, "OFFICIAL_PREFIX", {})


@every_family
@pytest.mark.parametrize("alpha", slow_except([6.0], [8.0, 6.0]))
def test_diffusers_computes_the_same_velocity_from_each_lora_file(
    tmp_path: Path, folders: Callable[[str], Path], name: str, alpha: float
) -> None:
    family = FAMILIES[name]
    model, pipe, tasks = family.build(folders(name)), family.pipeline(folders(name)), family.tasks()
    untrained = velocity(model, tasks, pipe.transformer)
    train(pipe, family.section, alpha=alpha)
    wanted = velocity(model, tasks, pipe.transformer)
    assert (wanted - untrained).abs().max() > 1e-4
    write(pipe, family.section, tmp_path / "out")
    for file in (DIFFUSERS, FILE):
        if (name, file) == ("sd3", FILE):
            continue  # diffusers has no converter for other layouts of Stable Diffusion 3
        fresh = family.pipeline(folders(name))
        fresh.load_lora_weights(tmp_path / "out", weight_name=file)
        # A converter multiplies one matrix by alpha / rank, which is exact for a power of two.
        atol = 0.0 if alpha == 8.0 else 1e-5
        torch.testing.assert_close(velocity(model, tasks, fresh.transformer), wanted, atol=atol, rtol=0, msg=file)


@every_family
def test_comfyui_loads_every_key_with_the_right_scale(tmp_path: Path, folders: Callable[[str], Path], name: str) -> None:
    family, pipe = FAMILIES[name].section, FAMILIES[name].pipeline(folders(name))
    loader = ComfyUILoader(pipe.transformer)
    before = {path: loader.weight(path).clone() for path in loader.rows}
    train(pipe, family, alpha=6.0)
    write(pipe, family, tmp_path / "out")
    assert loader.load(load_file(tmp_path / "out" / FILE)) == []
    adapted = 0
    for path in loader.rows:
        layer = pipe.transformer.get_submodule(path)
        change = torch.zeros_like(before[path])
        if hasattr(layer, "lora_A"):
            change = 6.0 / 4 * layer.lora_B["default"].weight.detach() @ layer.lora_A["default"].weight.detach()
            adapted += 1
        torch.testing.assert_close(loader.weight(path) - before[path], change, atol=1e-5, rtol=0)
    assert adapted == sum("lora_A" in name for name, _ in pipe.transformer.named_parameters())


def test_lora_on_part_of_a_fused_qkv_module_leaves_the_rest_unchanged(tmp_path: Path, folders: Callable[[str], Path]) -> None:
    """FLUX.2's queries, keys and values are one module in ComfyUI; those without an adapter do not change."""
    model, pipe, tasks = FAMILIES["flux2"].build(folders("flux2")), tiny_flux2.pipeline(), FAMILIES["flux2"].tasks()
    loader = ComfyUILoader(pipe.transformer)
    key_before = loader.weight("transformer_blocks.1.attn.to_k").clone()
    train(pipe, Flux2KleinModel, alpha=6.0, targets=("attn.to_q", "attn.to_v"))
    wanted = velocity(model, tasks, pipe.transformer)
    write(pipe, Flux2KleinModel, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / FILE)
    assert tensors["lora_unet_double_blocks_1_img_attn_qkv.lora_down.weight"].shape[0] == 8
    assert tensors["lora_unet_double_blocks_1_img_attn_qkv.alpha"] == 12
    assert loader.load(tensors) == []
    assert torch.equal(loader.weight("transformer_blocks.1.attn.to_k"), key_before)
    fresh = tiny_flux2.pipeline()
    fresh.load_lora_weights(tmp_path / "out", weight_name=FILE)
    torch.testing.assert_close(velocity(model, tasks, fresh.transformer), wanted, atol=1e-5, rtol=0)


def test_comfyui_file_is_not_written_for_a_module_without_a_comfyui_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipe = tiny_flux2.pipeline()
    train(pipe, Flux2KleinModel, alpha=6.0, targets=("attn.to_q", "norm_out.linear"))
    write(pipe, Flux2KleinModel, tmp_path / "out")
    assert "norm_out.linear has no name in ComfyUI" in caplog.text
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"adapter_config.json", "adapter_model.safetensors", DIFFUSERS}
    with pytest.raises(ValueError, match=r"norm_out\.linear has no name in ComfyUI"):
        write_lora(pipe.transformer, tmp_path / "out", pipeline=None, comfyui=Flux2KleinModel.comfyui, format="comfyui")


@pytest.mark.parametrize(
    ("format", "files"),
    [("diffusers", {DIFFUSERS}), ("peft", {"adapter_config.json", "adapter_model.safetensors"}), ("comfyui", {FILE})],
)
def test_only_the_requested_format_is_written(tmp_path: Path, format: Any, files: set[str]) -> None:
    pipe = tiny_pipelines.sd3()
    train(pipe, SD3Model, alpha=6.0)
    write_lora(pipe.transformer, tmp_path, pipeline=SD3Model.pipeline, comfyui=SD3Model.comfyui, format=format)
    assert {file.name for file in tmp_path.iterdir()} == files
    if format == "peft":
        assert json.loads((tmp_path / "adapter_config.json").read_text())["lora_alpha"] == 6.0
