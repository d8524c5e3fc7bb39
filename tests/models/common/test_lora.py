"""The weights of a LoRA, a stored LoRA that is continued, and its file for ComfyUI and diffusers."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

import tiny_flux2
import tiny_models
import tiny_pipelines
import tiny_policies as tiny
from comfyui_loader import ComfyUILoader
from families import FAMILIES
from retouch.models.base import COMFYUI_FILE as FILE
from retouch.models.base import DiffusersModel
from retouch.models.lora import write_lora
from retouch.models.train import Lora
from retouch.types import Task
from retouch_models.flux2 import Flux2KleinModel
from retouch_models.qwen_image import model as qwen_model
from retouch_models.sd3 import SD3Model
from slow_params import slow_except

# The dtype of LoRA weights, and of the weights that the optimizer updates; the alpha of a stored LoRA

TARGETS = ("attn.to_q", "attn.to_out.0")


def network(dtype: torch.dtype, **options: object) -> torch.nn.Module:
    module = tiny_models.sd3_transformer().to(dtype)
    Lora.model_validate({"kind": "lora", "rank": 4, "alpha": 8, **options}).make_trainable(module, targets=TARGETS, seed=3)
    return module


@pytest.mark.parametrize(
    ("base", "weights", "trained"),
    [
        (torch.bfloat16, "base", torch.bfloat16),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, "base", torch.float32),
        (torch.float16, "base", torch.float32),
    ],
)
def test_lora_weights_are_bfloat16_only_for_a_bfloat16_base(base: torch.dtype, weights: str, trained: torch.dtype) -> None:
    module = network(base, weights=weights)
    assert {p.dtype for p in module.parameters() if p.requires_grad} == {trained}
    said = Lora(kind="lora", rank=4, alpha=8, weights=weights).trained_dtype(str(base).removeprefix("torch."))  # type: ignore[arg-type]
    assert said == str(trained).removeprefix("torch.")


def stored(folder: Path, format: Any, *, says: dict[str, object] | None, **options: Any) -> torch.nn.Module:
    """A network with a PEFT adapter, which is written to the folder. ``says``: changes of the configuration; None: no such file."""
    torch.manual_seed(0)
    module = tiny_models.sd3_transformer().eval()
    keys = {"r": 4, "lora_alpha": 8, "target_modules": list(TARGETS), "init_lora_weights": "gaussian", **options}
    module.add_adapter(LoraConfig(**keys))
    for name, weight in module.named_parameters():
        if "lora_B" in name and keys["init_lora_weights"] == "gaussian":
            torch.nn.init.normal_(weight, std=0.3)
    write_lora(module, folder, pipeline="StableDiffusion3Pipeline", format=format)
    if format == "peft":
        file = folder / "adapter_config.json"
        content = json.loads(file.read_text())
        file.unlink()
        if says is not None:
            file.write_text(json.dumps({name: value for name, value in {**content, **says}.items() if value is not None}))
    elif says is None:
        file = folder / "pytorch_lora_weights.safetensors"
        save_file(load_file(file), file)
    return module


def velocity(module: torch.nn.Module) -> torch.Tensor:
    model = tiny.sd3_model()
    conditioning = model.encode(tiny.tasks())
    x = model.initial_noise(conditioning, [torch.Generator().manual_seed(k) for k in range(2)])
    return model.velocity(module, x, torch.tensor([0.7, 0.3]), conditioning)


def continued(folder: Path, alpha: float = 8.0) -> torch.nn.Module:
    module = tiny_models.sd3_transformer()
    Lora(rank=4, alpha=alpha, targets=TARGETS, init_from=str(folder)).make_trainable(module, targets=(), seed=1)
    return module


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "other ranks": ({"rank_pattern": {"to_q": 2}}, {}, r"has rank 2 at .*to_q, and the recipe's rank is 4"),
    "other alphas": ({"alpha_pattern": {"to_q": 64}}, {}, r"a different alpha for each layer \(8 at .* and 64 at .*to_q\)"),
    "one alpha pattern": ({"alpha_pattern": {".*": 64}}, {}, r"trained with alpha 64, .* set policy\.train\.alpha to 64$"),
    "rsLoRA": ({"use_rslora": True}, {}, r"set policy\.train\.alpha to 16$"),
    "DoRA": ({"use_dora": True}, {}, "use_dora True is not supported"),
    "biases": ({}, {"lora_bias": True}, "lora_bias True is not supported"),
    "PiSSA": ({"init_lora_weights": "pissa"}, {}, "init_lora_weights 'pissa' has changed the base weights"),
    "PiSSA, fast": ({"init_lora_weights": "pissa_niter_4"}, {}, "'pissa_niter_4' has changed the base weights"),
    "OLoRA": ({"init_lora_weights": "olora"}, {}, "'olora' has changed the base weights"),
    "CorDA": ({}, {"init_lora_weights": "corda"}, "'corda' has changed the base weights"),
    "a trained bias": ({}, {"bias": "lora_only"}, "bias 'lora_only' is not supported"),
    "whole modules": ({}, {"modules_to_save": ["proj_out"]}, "modules_to_save .* is not supported"),
    "repeated layers": ({}, {"layer_replication": [[0, 1]]}, "layer_replication .* is not supported"),
    "transposed weights": ({}, {"fan_in_fan_out": True}, "fan_in_fan_out True is not supported"),
    "a field of the future": ({}, {"use_newlora": True}, "use_newlora True is not supported"),
    "another method": ({}, {"peft_type": "LOHA"}, "peft_type 'LOHA' is not supported"),
    "an alpha of 0": ({}, {"lora_alpha": 0}, "must be a number above 0"),
    "no alpha": ({}, {"lora_alpha": None}, r"no alpha is stored .* adapter_config\.json next to it"),
    "no configuration": ({}, None, "no alpha is stored"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_point_1_6_a_stored_lora_of_another_meaning_raises_with_the_field(tmp_path: Path, name: str) -> None:
    options, says, message = REFUSED[name]
    stored(tmp_path, "peft", says=says, **options)
    with pytest.raises(ValueError, match=rf"^policy\.train\.init_from: .*{message}"):
        continued(tmp_path)


@pytest.mark.parametrize("format", ["diffusers", "peft"])
@pytest.mark.parametrize(
    ("options", "alpha"),
    [
        ({}, 8.0),
        ({"use_rslora": True}, 16.0),
        ({"alpha_pattern": {"to_q": 32, r"to_out\.0": 32}}, 32.0),
        ({"init_lora_weights": "orthogonal"}, 8.0),
        ({"lora_dropout": 0.5, "alpha_pattern": {"to_q": 8}}, 8.0),
    ],
)
def test_point_1_6_a_continued_lora_computes_what_it_computed(tmp_path: Path, format: Any, options: Any, alpha: float) -> None:
    before = stored(tmp_path, format, says={}, **options).eval()
    apart = (velocity(before) - velocity(continued(tmp_path, alpha))).abs().max()
    assert apart <= 1e-6, options
    with pytest.raises(ValueError, match=rf"trained with alpha {alpha:g}, .* set policy\.train\.alpha to {alpha:g}"):
        continued(tmp_path, alpha / 4)


def test_point_1_6_without_a_stored_alpha_nothing_is_assumed(tmp_path: Path) -> None:
    before = stored(tmp_path, "diffusers", says=None)
    with pytest.raises(ValueError, match=r'no alpha is stored .* such as \{"r": 4, "lora_alpha": 8\}'):
        continued(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 8}')
    assert torch.equal(velocity(before), velocity(continued(tmp_path)))


def test_point_1_6_a_file_with_other_tensors_is_refused(tmp_path: Path) -> None:
    stored(tmp_path, "peft", says={})
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    for extra in ("text_encoder.q.lora_A.weight", "x.lora_A.other.weight", "lora_unet_x.alpha"):
        save_file({**tensors, extra: torch.ones(1)}, file)
        with pytest.raises(ValueError, match=rf"does not fit .* first at {extra}; it must have one adapter with the names of"):
            continued(tmp_path)


# A LoRA file for ComfyUI

DIFFUSERS = "pytorch_lora_weights.safetensors"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def saved(name: str) -> Path:
        folder: Path = tmp_path_factory.mktemp(name)
        FAMILIES[name].save(folder)
        return folder

    return saved


def velocity_of_comfyui_lora(model: Any, tasks: list[Task], transformer: Any) -> torch.Tensor:
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
    untrained = velocity_of_comfyui_lora(model, tasks, pipe.transformer)
    train(pipe, family.section, alpha=alpha)
    wanted = velocity_of_comfyui_lora(model, tasks, pipe.transformer)
    assert (wanted - untrained).abs().max() > 1e-4
    write(pipe, family.section, tmp_path / "out")
    for file in (DIFFUSERS, FILE):
        if (name, file) == ("sd3", FILE):
            continue  # diffusers has no converter for other layouts of Stable Diffusion 3
        fresh = family.pipeline(folders(name))
        fresh.load_lora_weights(tmp_path / "out", weight_name=file)
        # A converter multiplies one matrix by alpha / rank, which is exact for a power of two.
        atol = 0.0 if alpha == 8.0 else 1e-5
        torch.testing.assert_close(velocity_of_comfyui_lora(model, tasks, fresh.transformer), wanted, atol=atol, rtol=0, msg=file)


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
    wanted = velocity_of_comfyui_lora(model, tasks, pipe.transformer)
    write(pipe, Flux2KleinModel, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / FILE)
    assert tensors["lora_unet_double_blocks_1_img_attn_qkv.lora_down.weight"].shape[0] == 8
    assert tensors["lora_unet_double_blocks_1_img_attn_qkv.alpha"] == 12
    assert loader.load(tensors) == []
    assert torch.equal(loader.weight("transformer_blocks.1.attn.to_k"), key_before)
    fresh = tiny_flux2.pipeline()
    fresh.load_lora_weights(tmp_path / "out", weight_name=FILE)
    torch.testing.assert_close(velocity_of_comfyui_lora(model, tasks, fresh.transformer), wanted, atol=1e-5, rtol=0)


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
