"""Exported weights, loaded by the libraries they are for, compute what the run computes."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImageEditPipeline, QwenImageTransformer2DModel, SD3Transformer2DModel, StableDiffusion3Pipeline
from peft import LoraConfig, PeftModel
from safetensors import safe_open
from safetensors.torch import load_file

import retouch
import tiny_models
from retouch import cli
from retouch.inference.exporting import export_target
from retouch.inference.opening import open_recipe, read_target
from retouch.models.common.lora import write_lora
from retouch.recipe.recipe import parse
from retouch.records.files import read_json
from retouch.run.session import run
from retouch.trainer.trainer import Trainer
from retouch_worlds.playground import playground_weights
from tiny_recipes import SMALL

FULL = {"train": {"kind": "full"}, "ema": {"decay": 0.9}}
NO_AVERAGE = {"ema": None}


def trained(tmp_path: Path, **policy: Any) -> Path:
    """A run of two steps."""
    recipe = parse({**SMALL, "out": str(tmp_path / "runs"), "policy": {**SMALL["policy"], **policy}})
    run(recipe, fresh=False)
    return recipe.folder


def qwen_output(module: Any) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        return module(
            hidden_states=torch.randn(2, 18, 32, generator=draw),
            timestep=torch.tensor([0.3, 0.9]),
            encoder_hidden_states=torch.randn(2, 5, 64, generator=draw),
            encoder_hidden_states_mask=torch.ones(2, 5, dtype=torch.bool),
            img_shapes=[[(1, 3, 3), (1, 3, 3)]] * 2,
            return_dict=False,
        )[0]


def expected(folder: Path, which: str) -> torch.Tensor:
    """What the run's transformer computes with the weights of that name."""
    parts, _ = open_recipe(*read_target(str(folder)), trained=True)
    if which == "current":
        return qwen_output(parts.model.module)
    with parts.copies.using(which):
        return qwen_output(parts.model.module)


def base() -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel.from_pretrained(playground_weights() / "transformer", torch_dtype=torch.float32)


@pytest.mark.parametrize("which", ["average", "current"])
def test_peft_and_diffusers_load_an_adapter(tmp_path: Path, which: Any) -> None:
    folder = trained(tmp_path)
    written = export_target(str(folder), to=tmp_path / "out", which=which)
    assert {path.name for path in written} == {
        "adapter_config.json", "adapter_model.safetensors", "pytorch_lora_weights.safetensors", "comfyui_lora.safetensors",
        "export.json", "README.md", "before-and-after.png",
    }  # fmt: skip
    wanted = expected(folder, which)
    assert not torch.equal(wanted, qwen_output(base()))
    assert torch.equal(qwen_output(PeftModel.from_pretrained(base(), tmp_path / "out")), wanted)
    others = dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer", "processor"))
    pipeline = QwenImageEditPipeline(transformer=base(), **others)
    pipeline.load_lora_weights(tmp_path / "out")
    assert torch.equal(qwen_output(pipeline.transformer), wanted)


@pytest.mark.parametrize("settings", [{}, FULL])
def test_other_users_may_read_exported_weights_if_the_umask_allows_it(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = trained(tmp_path, **settings)
    before = os.umask(0o027)
    try:
        written = export_target(str(folder), to=tmp_path / "out")
    finally:
        os.umask(before)
    assert any(path.suffix == ".safetensors" for path in written)
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in written} == {path.name: "0o640" for path in written}


def test_diffusers_loads_full_weights(tmp_path: Path) -> None:
    folder = trained(tmp_path, **FULL, attention="native")
    assert cli.main(["export", str(folder), "--to", str(tmp_path / "out")]) == 0
    wanted = expected(folder, "average")
    assert not torch.equal(wanted, expected(folder, "current"))
    assert torch.equal(qwen_output(QwenImageTransformer2DModel.from_pretrained(tmp_path / "out" / "transformer")), wanted)
    about = read_json(tmp_path / "out" / "export.json")
    assert (about["step"], about["weights"], about["recipe"]["name"]) == (2, "average", "small")
    assert about["recipe"]["policy"]["attention"] == "native", "the recipe of the run, not the one that opened it for the export"


def test_a_stable_diffusion_3_pipeline_loads_an_adapter(tmp_path: Path) -> None:
    def output(module: Any) -> torch.Tensor:
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            return module(
                hidden_states=torch.randn(2, module.config.in_channels, 8, 8, generator=draw),
                timestep=torch.tensor([300.0, 900.0]),
                encoder_hidden_states=torch.randn(2, 5, 48, generator=draw),
                pooled_projections=torch.randn(2, 40, generator=draw),
                return_dict=False,
            )[0]

    module: SD3Transformer2DModel = tiny_models.sd3_transformer()
    module.add_adapter(LoraConfig(r=4, lora_alpha=12, init_lora_weights=False, target_modules=["to_q", "to_out.0"]))
    write_lora(module, tmp_path, pipeline="StableDiffusion3Pipeline")
    names = ("scheduler", "vae", "tokenizer", "tokenizer_2", "tokenizer_3", "text_encoder", "text_encoder_2", "text_encoder_3")
    pipeline = StableDiffusion3Pipeline(transformer=tiny_models.sd3_transformer(), **dict.fromkeys(names))
    assert not torch.equal(output(pipeline.transformer), output(module))
    pipeline.load_lora_weights(tmp_path)
    assert torch.equal(output(pipeline.transformer), output(module))
    assert json.loads((tmp_path / "adapter_config.json").read_text())["lora_alpha"] == 12


def test_the_same_weights_are_exported_as_the_same_bytes(tmp_path: Path) -> None:
    """Ten exports, since safetensors writes the entries of its metadata in random order."""
    module: SD3Transformer2DModel = tiny_models.sd3_transformer()
    module.add_adapter(LoraConfig(r=4, init_lora_weights=False, target_modules=["to_q", "to_out.0", "to_k", "to_v"]))
    for number in range(10):
        write_lora(module, tmp_path / str(number), pipeline="StableDiffusion3Pipeline")
    files = {path.name: path.read_bytes() for path in (tmp_path / "0").iterdir()}
    assert sorted(files) == ["adapter_config.json", "adapter_model.safetensors", "pytorch_lora_weights.safetensors"]
    for number in range(1, 10):
        assert {path.name: path.read_bytes() for path in (tmp_path / str(number)).iterdir()} == files
    written = tmp_path / "0" / "pytorch_lora_weights.safetensors"
    with safe_open(written, "pt") as opened:
        metadata = opened.metadata()
    targets = ["to_k", "to_out.0", "to_q", "to_v"]  # a set in PEFT: its order differs between processes
    assert json.loads(metadata["lora_adapter_metadata"])["transformer.target_modules"] == targets
    assert json.loads(files["adapter_config.json"])["target_modules"] == targets
    assert metadata["format"] == "pt"
    assert load_file(written).keys() == {
        name.replace("base_model.model", "transformer") for name in load_file(tmp_path / "0" / "adapter_model.safetensors")
    }


def test_a_run_with_a_function_as_reward_is_exported_without_its_script(tmp_path: Path) -> None:
    def brightness(images: Any, **kwargs: Any) -> list[float]:
        return [image.convert("L").getpixel((0, 0)) / 255 for image in images]

    trainer = Trainer(
        model=retouch.models.PlaygroundTextToImage(),
        reward_funcs=brightness,
        train_dataset=[{"prompt": "a red circle"}, {"prompt": "a blue square"}],
        peft_config=retouch.Lora(rank=2, alpha=4),
        rollout={"num_steps": 2, "transition": {"kind": "cps", "noise_level": 0.7}},
        **{"steps": 1, "tasks_per_step": 1, "group_size": 2, "output_dir": tmp_path, "run_name": "bright"},
    )
    trainer.train()
    of_trainer = {path.name for path in trainer.save_pretrained(tmp_path / "by-trainer")}
    assert cli.main(["export", str(trainer.folder), "--to", str(tmp_path / "out")]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == of_trainer
    for name in ("pytorch_lora_weights.safetensors", "adapter_model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "by-trainer" / name).read_bytes()


def test_invalid_exports_raise_and_write_nothing(tmp_path: Path) -> None:
    folder = trained(tmp_path, **NO_AVERAGE)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(ValueError, match="not empty"):
        export_target(str(folder), to=tmp_path / "taken")
    with pytest.raises(ValueError, match="this is a file; name a new folder"):
        export_target(str(folder), to=tmp_path / "taken" / "file")
    with pytest.raises(ValueError, match="kept no average"):
        export_target(str(folder), to=tmp_path / "out", which="average")
    with pytest.raises(ValueError, match="is not a run"):
        export_target("recipes/quickstart.jsonnet", to=tmp_path / "out")
    assert not (tmp_path / "out").exists()
