"""A LoRA file for ComfyUI: ComfyUI loads all of its keys with the right scale; diffusers generates the same image from it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    FluxFillPipeline,
    FluxKontextPipeline,
    FluxPipeline,
    QwenImageEditPipeline,
    QwenImagePipeline,
    ZImagePipeline,
)
from peft import LoraConfig
from safetensors.torch import load_file

import tiny_flux2
import tiny_models
import tiny_pipelines
from comfyui_loader import ComfyUILoader
from retouch.models.base import COMFYUI_FILE as FILE
from retouch.models.base import DiffusersModel
from retouch.models.flux import FluxFillModel, FluxKontextModel, FluxModel
from retouch.models.flux2 import Flux2KleinModel
from retouch.models.lora import comfyui_tensors, write_lora
from retouch.models.qwen_image import QwenImageEditModel, QwenImageModel
from retouch.models.sd3 import SD3Model
from retouch.models.z_image import ZImageModel
from slow_params import slow_except

DIFFUSERS = "pytorch_lora_weights.safetensors"


def qwen() -> QwenImagePipeline:
    return QwenImagePipeline(
        transformer=tiny_models.qwen_transformer(),
        vae=tiny_models.qwen_vae(),
        text_encoder=None,
        tokenizer=tiny_models.qwen_tokenizer(),
        scheduler=FlowMatchEulerDiscreteScheduler(**tiny_models.SCHEDULER),
    )


def qwen_edit() -> QwenImageEditPipeline:
    parts = {name: getattr(qwen(), name) for name in ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")}
    return QwenImageEditPipeline(**parts, processor=None)


def flux_parts(folder: Path, *, fills: bool = False) -> Any:
    return FluxPipeline.from_pretrained(tiny_models.save_flux(folder, fills=fills))


def make(family: type[DiffusersModel], folder: Path) -> Any:
    """A tiny random pipeline of the family."""
    makers: dict[type[DiffusersModel], Callable[[], Any]] = {
        SD3Model: tiny_pipelines.sd3,
        FluxModel: lambda: flux_parts(folder),
        FluxKontextModel: lambda: FluxKontextPipeline(**flux_parts(folder).components),
        FluxFillModel: lambda: FluxFillPipeline(
            **{name: part for name, part in flux_parts(folder, fills=True).components.items() if name in FILL_PARTS}
        ),
        Flux2KleinModel: tiny_flux2.pipeline,
        QwenImageModel: qwen,
        QwenImageEditModel: qwen_edit,
        ZImageModel: lambda: ZImagePipeline.from_pretrained(tiny_models.save_z_image(folder)),
    }
    made = makers[family]()
    made.set_progress_bar_config(disable=True)
    made.transformer.eval()
    return made


FILL_PARTS = ("scheduler", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "transformer")
FAMILIES = [
    SD3Model, FluxModel, FluxKontextModel, FluxFillModel, Flux2KleinModel, QwenImageModel, QwenImageEditModel, ZImageModel,
]  # fmt: skip


def image(pipe: Any, family: type[DiffusersModel]) -> torch.Tensor:
    """An fp32 image after two steps. For Qwen-Image-Edit, whose pipeline takes no source image below 1024 x 1024: one velocity."""
    if family is QwenImageEditModel:
        return edit_velocity(pipe.transformer)
    draw = torch.Generator().manual_seed(3)
    inputs: dict[str, Any] = {"num_inference_steps": 2, "height": 32, "width": 32, "generator": draw, "output_type": "pt"}
    if family in (SD3Model, FluxModel, FluxKontextModel, FluxFillModel):
        inputs |= {"prompt": "blue", "max_sequence_length": 20}
    elif family is QwenImageModel:
        embeds = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(4))
        inputs |= {"prompt_embeds": embeds, "prompt_embeds_mask": torch.ones(1, 5, dtype=torch.long)}
    else:
        inputs |= {"prompt": "blue", "max_sequence_length": 64}
    if family is FluxKontextModel:
        inputs |= {"image": tiny_models.image(1, 32, 32), "max_area": 32 * 32, "_auto_resize": False}
    if family is FluxFillModel:
        inputs |= {"image": tiny_models.image(1, 32, 32), "mask_image": tiny_models.image(2, 32, 32).convert("L")}
    made: torch.Tensor = pipe(**inputs).images
    return made


def edit_velocity(transformer: Any) -> torch.Tensor:
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        made: torch.Tensor = transformer(
            hidden_states=torch.randn(1, 18, 64, generator=draw),
            timestep=torch.tensor([0.3]),
            encoder_hidden_states=torch.randn(1, 5, 32, generator=draw),
            encoder_hidden_states_mask=torch.ones(1, 5, dtype=torch.bool),
            img_shapes=[[(1, 3, 3), (1, 3, 3)]],
            return_dict=False,
        )[0]
    return made


def train(pipe: Any, family: type[DiffusersModel], *, alpha: float, targets: tuple[str, ...] | None = None) -> None:
    """Give the transformer an adapter of rank 4 whose weights are random."""
    torch.manual_seed(5)
    config = LoraConfig(r=4, lora_alpha=alpha, init_lora_weights=False, target_modules=list(targets or family.lora_targets))
    pipe.transformer.add_adapter(config)


def write(pipe: Any, family: type[DiffusersModel], to: Path) -> None:
    to.mkdir()
    write_lora(pipe.transformer, to, pipeline=family.pipeline, comfyui=family.comfyui)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
@pytest.mark.parametrize("alpha", slow_except([6.0], [8.0, 6.0]))
def test_diffusers_generates_the_same_image_from_each_lora_file(tmp_path: Path, family: type[DiffusersModel], alpha: float) -> None:
    pipe = make(family, tmp_path / "base")
    untrained = image(pipe, family)
    train(pipe, family, alpha=alpha)
    wanted = image(pipe, family)
    assert (wanted - untrained).abs().max() > 1e-4
    write(pipe, family, tmp_path / "out")
    for file in (DIFFUSERS, FILE):
        if (family, file) == (SD3Model, FILE):
            continue  # diffusers has no converter for other layouts of Stable Diffusion 3
        fresh = make(family, tmp_path / "base")
        fresh.load_lora_weights(tmp_path / "out", weight_name=file)
        # A converter multiplies one matrix by alpha / rank, which is exact for a power of two.
        if alpha == 8.0:
            assert torch.equal(image(fresh, family), wanted), file
        else:
            torch.testing.assert_close(image(fresh, family), wanted, atol=1e-5, rtol=0, msg=file)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_comfyui_loads_every_key_with_the_right_scale(tmp_path: Path, family: type[DiffusersModel]) -> None:
    pipe = make(family, tmp_path / "base")
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


def test_diffusers_lora_file_gets_the_wrong_scale_in_comfyui(tmp_path: Path) -> None:
    """The reason for a separate file: ComfyUI does not read the metadata that contain alpha."""
    pipe = tiny_pipelines.sd3()
    loaders = [ComfyUILoader(pipe.transformer) for _ in range(2)]
    path = "transformer_blocks.0.attn.to_q"
    before = loaders[0].weight(path).clone()
    train(pipe, SD3Model, alpha=8.0)
    write(pipe, SD3Model, tmp_path / "out")
    changes = []
    for loader, file in zip(loaders, (DIFFUSERS, FILE), strict=True):
        assert loader.load(load_file(tmp_path / "out" / file)) == []
        changes.append(loader.weight(path) - before)
    torch.testing.assert_close(2 * changes[0], changes[1], atol=1e-5, rtol=0)


def test_lora_on_part_of_a_fused_qkv_module_leaves_the_rest_unchanged(tmp_path: Path) -> None:
    """FLUX.2's queries, keys and values are one module in ComfyUI; those without an adapter do not change."""
    pipe = tiny_flux2.pipeline()
    loader = ComfyUILoader(pipe.transformer)
    key_before = loader.weight("transformer_blocks.1.attn.to_k").clone()
    train(pipe, Flux2KleinModel, alpha=6.0, targets=("attn.to_q", "attn.to_v"))
    wanted = image(pipe, Flux2KleinModel)
    write(pipe, Flux2KleinModel, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / FILE)
    assert tensors["lora_unet_double_blocks_1_img_attn_qkv.lora_down.weight"].shape[0] == 8
    assert tensors["lora_unet_double_blocks_1_img_attn_qkv.alpha"] == 12
    assert loader.load(tensors) == []
    assert torch.equal(loader.weight("transformer_blocks.1.attn.to_k"), key_before)
    fresh = tiny_flux2.pipeline()
    fresh.load_lora_weights(tmp_path / "out", weight_name=FILE)
    torch.testing.assert_close(image(fresh, Flux2KleinModel), wanted, atol=1e-5, rtol=0)


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


def test_comfyui_tensor_names_match_the_module_path() -> None:
    """Two matrices and alpha for each adapted module."""
    pipe = tiny_pipelines.sd3()
    down, up = torch.ones(4, 32), torch.ones(32, 4)
    path = "transformer_blocks.0.attn.to_q"
    assert SD3Model.comfyui is not None
    tensors = {f"{path}.lora_A.weight": down, f"{path}.lora_B.weight": up}
    made = comfyui_tensors(tensors, pipe.transformer, SD3Model.comfyui, alpha=2.0)
    assert sorted(made) == [f"transformer.{path}.{name}" for name in ("alpha", "lora_A.weight", "lora_B.weight")]
