"""LoRA files of diffusers, PEFT and kohya's scripts in a benchmark: the same weights make the same images, and no layer is left out
without an error."""

import re

import diffusers
import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

import suite_rows
import tiny_pipelines
from retouch import cli
from retouch_bench.lora import load_lora
from retouch_bench.running import run

TARGETS = ["attn.to_q", "attn.to_out.0", "img_mlp.net.0.proj"]
CONVERTED = {
    "QwenImagePipeline": "transformer_blocks_0_attn_to_q", "QwenImageEditPlusPipeline": "transformer_blocks_0_attn_to_q",
    "FluxPipeline": "double_blocks_0_img_attn_proj", "FluxKontextPipeline": "double_blocks_0_img_attn_proj",
    "Flux2KleinPipeline": "double_blocks_0_img_attn_proj", "ZImagePipeline": "layers_0_attention_to_q",
}  # fmt: skip


@pytest.fixture(scope="module")
def weights():
    """A LoRA of a tiny Qwen-Image, with the names of diffusers."""
    torch.manual_seed(0)
    transformer = tiny_pipelines.qwen_image().transformer
    transformer.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=TARGETS, init_lora_weights=False))
    found = get_peft_model_state_dict(transformer, adapter_name="default")
    return {f"transformer.{key}": tensor.detach().clone().contiguous() for key, tensor in found.items()}


def kohya(weights, path, *, alpha=2.0):
    """The file that kohya's scripts write: names without dots, and alpha beside the weights."""
    made = {}
    for key, tensor in weights.items():
        layer, part = re.fullmatch(r"transformer\.(.*)\.(lora_[AB])\.weight", key).groups()
        name = f"lora_unet_{layer.replace('.', '_')}"
        made[f"{name}.{'lora_down' if part == 'lora_A' else 'lora_up'}.weight"] = tensor
        made[f"{name}.alpha"] = torch.tensor(alpha)
    save_file(made, path)
    return path


def image(lora):
    pipeline = tiny_pipelines.qwen_image()
    if lora is not None:
        load_lora(pipeline, lora)
    call = {"num_inference_steps": 2, "height": 32, "width": 32, "max_sequence_length": 64}
    return bytes(pipeline(prompt="a cat", generator=torch.Generator().manual_seed(0), **call).images[0].tobytes())


def test_formats_of_one_lora_make_the_same_image(weights, tmp_path):
    save_file(weights, tmp_path / "diffusers.safetensors")
    peft = tmp_path / "peft"
    peft.mkdir()
    LoraConfig(r=2, lora_alpha=2, target_modules=TARGETS).save_pretrained(peft)
    own = {key.replace("transformer.", "base_model.model.", 1): tensor for key, tensor in weights.items()}
    save_file(own, peft / "adapter_model.safetensors")
    plain, right = image(None), image(tmp_path / "diffusers.safetensors")
    assert plain != right
    assert image(kohya(weights, tmp_path / "kohya.safetensors")) == right
    assert image(peft) == right
    assert image(kohya(weights, tmp_path / "weak.safetensors", alpha=1.0)) not in (plain, right)
    save_file({**own, "base_model.model.other.lora_A.weight": torch.ones(2, 8)}, peft / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"1 of its \d+ layers are not in QwenImagePipeline: base_model.model.other"):
        load_lora(tiny_pipelines.qwen_image(), peft)


def test_a_lora_that_does_not_match_the_pipeline_raises_with_the_layer_names(weights, tmp_path):
    path = tmp_path / "lora.safetensors"
    first = next(iter(weights)).partition(".lora_A")[0]
    others = {key: tensor for key, tensor in weights.items() if not key.startswith(first)}
    moved = {key.replace("blocks.0", "blocks.9"): tensor for key, tensor in weights.items() if key.startswith(first)}
    save_file({**others, **moved}, path)
    name = first.replace("blocks.0", "blocks.9")
    with pytest.raises(ValueError, match=rf"1 of its \d+ layers are not in QwenImagePipeline: {name}"):
        load_lora(tiny_pipelines.qwen_image(), path)
    kohya({**others, **moved}, path)
    with pytest.raises(ValueError, match=r"1 of its \d+ layers are not in QwenImagePipeline: lora_unet_transformer_blocks_9_"):
        load_lora(tiny_pipelines.qwen_image(), path)
    kohya(weights, path)
    with pytest.raises(ValueError, match=r"none of its layers is in StableDiffusion3Pipeline: lora_unet_transformer_blocks_0_"):
        load_lora(tiny_pipelines.sd3(), path)
    save_file({key: torch.cat([tensor, tensor], -1) for key, tensor in weights.items()}, path)
    with pytest.raises(ValueError, match="diffusers cannot load it into QwenImagePipeline"):
        load_lora(tiny_pipelines.qwen_image(), path)
    save_file({"a.weight": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="diffusers cannot load it"):
        load_lora(tiny_pipelines.qwen_image(), path)
    path.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_lora(tiny_pipelines.qwen_image(), path)


@pytest.mark.parametrize("family", [*CONVERTED, "StableDiffusion3Pipeline"])
def test_diffusers_converts_kohya_files_of_the_documented_families(family):
    """As docs/benchmarks.md lists them."""
    layer = CONVERTED.get(family, "joint_blocks_0_x_block_attn_proj")
    given = {f"lora_unet_{layer}.lora_{part}.weight": torch.ones(2, 2) for part in ("down", "up")}
    found = getattr(diffusers, family).lora_state_dict(given)
    assert all(key.startswith("transformer.") for key in found) == (family in CONVERTED)


def test_the_command_takes_a_kohya_file(weights, tmp_path, capsys):
    tiny_pipelines.qwen_image().save_pretrained(tmp_path / "model")
    data = suite_rows.lines(tmp_path / "prompts.txt", ["a cat", "a dog"])
    words = ["bench", "prompts", "--data", str(data), "--judge", "share:red", "--device", "cpu"]
    words += ["--model", str(tmp_path / "model"), "--out", str(tmp_path / "out")]
    for call in ("num_inference_steps=2", "height=32", "width=32", "max_sequence_length=64"):
        words += ["--call", call]
    assert cli.main([*words, "--lora", str(kohya(weights, tmp_path / "kohya.safetensors"))]) == 0
    assert "kohya.safetensors" in capsys.readouterr().out
    ninth = {f"lora_unet_transformer_blocks_9_attn_to_q.lora_{part}.weight": torch.ones(2, 2) for part in ("down", "up")}
    save_file({**load_file(tmp_path / "kohya.safetensors"), **ninth}, tmp_path / "more.safetensors")
    assert cli.main([*words, "--lora", str(tmp_path / "more.safetensors")]) == 2
    assert "lora_unet_transformer_blocks_9_attn_to_q" in capsys.readouterr().err


def test_a_loaded_pipeline_accepts_a_kohya_file(weights, tmp_path):
    data = suite_rows.lines(tmp_path / "prompts.txt", ["a cat"])
    call = {"num_inference_steps": 2, "height": 32, "width": 32, "max_sequence_length": 64}
    found = run(
        "prompts", model=tiny_pipelines.qwen_image(),
        lora=kohya(weights, tmp_path / "kohya.safetensors"), judge="share:red", data=data, call=call, out=tmp_path / "out",
    )  # fmt: skip
    assert found.table["all"]["share"]["n"] == 1
