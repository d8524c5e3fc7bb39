"""Single files: other weights of the denoiser, and LoRAs that are merged into it before the training."""

import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file

from retouch.models.kinds import IMAGE_MODELS
from retouch.models.lora import part_of_pipeline
from retouch.models.quantized import is_quantized

sys.path.insert(0, str(Path(__file__).parents[2] / "measurements" / "pipelines"))
import every_pipeline as tiny

PIPES = {"pipeline": tiny.sdxl, "sd3": tiny.sd3, "z-image": tiny.z_image}
LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["to_q", "to_v"]}


def built(kind: str, folder: Path, **keys):
    section = IMAGE_MODELS.load(kind)
    return section(path=str(folder), dtype="float32", size=(32, 32), **keys).build(device=torch.device("cpu")).module


@pytest.fixture(params=PIPES)
def saved(request, tmp_path):
    """The kind, the folder of a pipeline, and its denoiser."""
    pipe, _ = PIPES[request.param]()
    pipe.save_pretrained(tmp_path)
    return request.param, tmp_path, getattr(pipe, "unet", None) or pipe.transformer, type(pipe)


def test_a_lora_is_merged_with_its_scale_and_other_weights_replace_those_of_the_folder(saved):
    kind, folder, module, pipeline = saved
    part = part_of_pipeline(module)
    module.add_adapter(LoraConfig(**LORA))
    for name, weight in module.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.1)
    layers = {f"{part}_lora_layers": get_peft_model_state_dict(module), f"{part}_lora_adapter_metadata": LORA}
    pipeline.save_lora_weights(folder / "lora", **layers)
    module.fuse_lora(lora_scale=0.5)
    module.unload_lora()
    file, other = str(folder / "lora" / "pytorch_lora_weights.safetensors"), str(folder / "other.safetensors")
    expected = module.state_dict()
    assert all(map(torch.equal, built(kind, folder, loras={file: 0.5}).state_dict().values(), expected.values()))
    save_file({name: weight + 1 for name, weight in expected.items()}, other)
    merged = built(kind, folder, weights=other, loras={file: 0.0}).state_dict()
    assert all(torch.equal(merged[name], weight + 1) for name, weight in expected.items())
    junk = str(folder / "lora" / "junk.safetensors")
    Path(junk).write_bytes(b"\x80\x04junk" * 50)
    for keys, text in (
        ({"weights": junk}, f"policy.model.weights: {junk} has not the weights"),
        ({"loras": {junk: 1}}, f"policy.model.loras: {junk} is no LoRA"),
        ({"weights": file}, f"policy.model.weights: {file} has not the weights of a {type(module).__name__}"),
        ({"loras": {other: 1}}, f"which {type(module).__name__} has not; only its own layers can be merged"),
        ({"weights": "none.safetensors"}, "policy.model.weights: there is no file none.safetensors"),
        ({"loras": {"style.bin": 1}}, "policy.model.loras: style.bin is no .safetensors file"),
    ):
        with pytest.raises(ValueError, match=text):
            built(kind, folder, **keys)
    with pytest.raises(ValueError, match="is a single file; path is the folder or Hub id of the pipeline"):
        built(kind, Path(other))


def test_a_gguf_file_stays_quantised_and_takes_no_lora(tmp_path):
    gguf = pytest.importorskip("gguf")
    pipe, _ = tiny.sd3()
    pipe.save_pretrained(tmp_path)
    file = tmp_path / "q8.gguf"
    writer = gguf.GGUFWriter(file, "sd3")
    for name, tensor in pipe.transformer.state_dict().items():
        coded = "blocks" in name and tensor.dim() == 2 and tensor.shape[-1] % 32 == 0
        kind = gguf.GGMLQuantizationType.Q8_0 if coded else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert any(is_quantized(weight) for weight in built("sd3", tmp_path, weights=str(file)).parameters())
    with pytest.raises(ValueError, match="a LoRA cannot be merged into quantised weights"):
        built("sd3", tmp_path, weights=str(file), loras={str(tmp_path / "transformer" / "diffusion_pytorch_model.safetensors"): 1})
