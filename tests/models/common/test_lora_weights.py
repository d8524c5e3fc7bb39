"""The dtype of LoRA weights, and of the weights that the optimizer updates; the alpha of a stored LoRA."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

import tiny_models
import tiny_policies as tiny
from retouch.models.lora import write_lora
from retouch.models.train import Lora

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


def stored(
    folder: Path, format: Literal["diffusers", "peft"], *, says: dict[str, object] | None, **options: Any
) -> torch.nn.Module:
    """A network with a PEFT adapter, which is written to the folder.

    ``says``: changes of the stored configuration; None: it is not stored.
    """
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
def test_point_1_6_a_continued_lora_computes_what_it_computed(
    tmp_path: Path, format: Literal["diffusers", "peft"], options: dict[str, object], alpha: float
) -> None:
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


@pytest.mark.parametrize("extra", ["text_encoder.q.lora_A.weight", "x.lora_A.other.weight", "lora_unet_x.alpha"])
def test_point_1_6_a_file_with_other_tensors_is_refused(tmp_path: Path, extra: str) -> None:
    stored(tmp_path, "peft", says={})
    file = tmp_path / "adapter_model.safetensors"
    save_file({**load_file(file), extra: torch.ones(1)}, file)
    with pytest.raises(ValueError, match=rf"does not fit .* first at {extra}; it must have one adapter with the names of"):
        continued(tmp_path)
