"""Emu3 from folders, in transformers' layout and in the original one."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny_emu3
import tiny_models
from retouch.models.emu3 import DRAW, load_emu3, save_for_vllm
from retouch.types import Task

SETTINGS = {"size": tiny_emu3.SIZE, "prefill": DRAW, "dtype": torch.float32, "device": "cpu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("emu3")
    tiny_emu3.module(deep=True).save_pretrained(path)
    tiny_emu3.tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def original(folder, tmp_path_factory):
    """The same weights under the names of the original layout, in two folders."""
    language, autoencoder = tmp_path_factory.mktemp("language"), tmp_path_factory.mktemp("autoencoder")
    weights = tiny_emu3.module(deep=True).state_dict()  # as the class names them
    config = json.loads((folder / "config.json").read_text())
    text = {name: value for name, value in config["text_config"].items() if name != "rope_parameters"}
    (language / "config.json").write_text(
        json.dumps(text | {"model_type": "Emu3", "rope_theta": 1_000_000.0, "rope_scaling": None})
    )
    vq = config["vq_config"]
    told = {
        name: vq[name]
        for name in ("codebook_size", "embed_dim", "num_res_blocks", "attn_resolutions", "temporal_downsample_factor")
    }
    told |= {"ch": vq["base_channels"], "ch_mult": vq["channel_multiplier"], "z_channels": vq["latent_channels"], "double_z": False}
    told |= {"in_channels": 3, "out_channels": 3, "dropout": 0.0, "model_type": "Emu3VisionVQ"}
    (autoencoder / "config.json").write_text(json.dumps(told))
    save_file(
        {n.replace("model.text_model.", "model."): w for n, w in weights.items() if "vqmodel" not in n}, language / "m.safetensors"
    )
    save_file({_original_name(n): _convolution(n, w) for n, w in weights.items() if "vqmodel" in n}, autoencoder / "m.safetensors")
    return language, autoencoder


def _original_name(name):
    """The name of the weight in BAAI's autoencoder."""
    name = name.removeprefix("model.vqmodel.")
    for ours, theirs in (("_proj.", "."), (".out.", ".proj_out."), (".down_block.down.", ".down."), (".up_block.up.", ".up.")):
        name = name.replace(ours, theirs)
    for stage in range(3):
        name = name.replace(f".attn_norms.{stage}.", f".attn.{stage}.norm.")
    return name.replace(".middle_block.attn_norm.", ".mid.attn_1.norm.").replace(".middle_block.", ".mid.")


def _convolution(name, weight):
    return weight[:, :, None, None].clone() if "_proj.weight" in name else weight


def model_outputs(editor):
    task = Task(id="a", instruction="make it red", images=(tiny_models.image(0, 16, 24),), target=None, tags={}, meta={})
    prompts = editor.encode([task])
    states, _ = editor.prefill(editor.module, prompts)
    return prompts.ids, editor.logits(editor.module, states), editor.decode_codes(editor.encode_codes(task.images))[0]


def test_both_folder_layouts_load_the_same_model(folder, original):
    expected = model_outputs(load_emu3(folder, **SETTINGS))
    language, autoencoder = original
    names = load_file(autoencoder / "m.safetensors")
    assert {"encoder.mid.attn_1.q.weight", "encoder.mid.attn_1.norm.weight", "encoder.down.1.attn.0.norm.weight"} <= names.keys()
    found = model_outputs(load_emu3(language, autoencoder=autoencoder, tokenizer=folder, **SETTINGS))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert found[2].tobytes() == expected[2].tobytes()


def test_export_for_vllm_is_a_llama_model_with_the_same_logits(folder, tmp_path):
    editor = load_emu3(folder, **SETTINGS)
    save_for_vllm(editor, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["LlamaForCausalLM"], "llama")
    served = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True).eval()
    assert served.state_dict().keys() == editor.module.state_dict().keys()
    ids = model_outputs(editor)[0]
    with torch.no_grad():
        assert torch.equal(served(ids).logits, editor.module(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path, local_files_only=True).get_vocab() == editor.words.tokenizer.get_vocab()


@pytest.mark.parametrize("layout", ["transformers", "original"])
def test_autoencoder_stays_in_fp32_when_the_model_is_loaded_in_bfloat16(folder, original, layout):
    where = (
        {"source": folder} if layout == "transformers" else {"source": original[0], "autoencoder": original[1], "tokenizer": folder}
    )
    editor = load_emu3(**where, **SETTINGS | {"dtype": torch.bfloat16})
    exact = load_emu3(folder, **SETTINGS)
    assert {p.dtype for p in editor.module.parameters()} == {torch.bfloat16}
    assert all(torch.equal(a, b) for a, b in zip(editor.vq.state_dict().values(), exact.vq.state_dict().values(), strict=True))


def test_invalid_or_incomplete_model_folder_raises(folder, original, tmp_path):
    language, autoencoder = original
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_emu3(tmp_path, tokenizer=folder, **SETTINGS)
    with pytest.raises(ValueError, match="type 'Emu3VisionVQ'"):
        load_emu3(autoencoder, tokenizer=folder, **SETTINGS)
    with pytest.raises(ValueError, match="Emu3-VisionTokenizer"):
        load_emu3(language, tokenizer=folder, **SETTINGS)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_emu3(language, autoencoder=autoencoder, **SETTINGS)
    (tmp_path / "config.json").write_text((autoencoder / "config.json").read_text())
    weights = load_file(autoencoder / "m.safetensors")
    weights["encoder.other"] = weights.pop("quant_conv.conv.weight")
    save_file(weights, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=r"missing .*quant_conv.*unexpected .*other"):
        load_emu3(language, tokenizer=folder, autoencoder=tmp_path, **SETTINGS)
