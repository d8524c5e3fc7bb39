"""A quantised frozen base: the real libraries on the CPU."""

import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.utils import get_peft_model_state_dict
from torch import nn

import retouch
import tiny_models
import tiny_pipelines
from retouch.models import offloading, quantized
from retouch.models.parts import bits_hash
from retouch.models.quantized import is_quantized, plain_tensors
from retouch.recipe.recipe import load
from retouch.run import preflight
from retouch_plan.system import check_device, check_kernels
from slow_params import slow_except
from small_trainer import SMALL, assert_same, redness, run_results

pytest.importorskip("torchao")
pytest.importorskip("bitsandbytes")
CPU = torch.device("cpu")
BITS = ("8bit", "4bit")
BRIEF = {
    **{"device": "cpu", "tasks_per_step": 2, "group_size": 4, "microbatch": 4, "checkpoints.every": 1, "trackers": []},
    **{"eval.tasks": 1, "eval.num_steps": 1, "eval.headline": None, "eval.best_of_k": 0, "eval.every": 0, "samples.every": 0},
}
TASKS = [{"prompt": prompt} for prompt in ("a red bicycle", "two cats", "a tree")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Stable Diffusion 3, with blocks that are wide enough for 4 bits."""
    pipe, to = tiny_pipelines.sd3(), tmp_path_factory.mktemp("sd3")
    config = {"num_attention_heads": 4, "caption_projection_dim": 64, "joint_attention_dim": 128, "pooled_projection_dim": 128}
    torch.manual_seed(0)
    transformer = type(pipe.transformer).from_config({**pipe.transformer.config, **config})
    encoders = {"text_encoder": tiny_models.clip(64, 1), "text_encoder_2": tiny_models.clip(64, 2)}
    pipe.register_modules(transformer=transformer, **encoders, text_encoder_3=tiny_models.t5(128, 3))
    pipe.save_pretrained(to)
    return to


def trained(folder: Any, out: Path, name: str, base: Any, *, steps: int = 2, **more: Any) -> retouch.Trainer:
    more = {**SMALL, "quantization_config": base, "output_dir": out, "run_name": name, "steps": steps, **more}
    trainer = retouch.Trainer(str(folder) if isinstance(folder, Path) else folder, redness, TASKS, **more, checkpoints={"every": 1})
    trainer.train()
    return trainer


def checks(trainer: retouch.Trainer) -> dict[str, Any]:
    """The checks of a run's preflight."""
    return {check["name"]: check for check in json.loads((trainer.folder / "preflight.json").read_text())}


def lora_file(trainer: retouch.Trainer, to: Path) -> Path:
    """Export the LoRA of a run, and return the file with its weights."""
    names = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")
    return next(Path(file) for file in trainer.save_pretrained(to) if Path(file).name in names)


def adapter(module: Any) -> dict[str, torch.Tensor]:
    return dict(get_peft_model_state_dict(module, adapter_name=next(iter(module.peft_config))))


BASES = [{part: bits} for part in ("quantize", "text_encoders") for bits in BITS]


@pytest.mark.parametrize("base", slow_except([{"quantize": "4bit"}], BASES), ids=str)
def test_a_lora_over_a_quantised_base_starts_at_ratio_1_and_resumes_to_the_bit_and_its_export_loads_on_the_full_base(
    folder: Path, tmp_path: Path, base: dict[str, str]
) -> None:
    import diffusers

    whole = trained(folder, tmp_path, "whole", base)
    trained(folder, tmp_path, "parts", base, steps=1)
    resumed = trained(folder, tmp_path, "parts", base)
    assert_same(run_results(whole.folder), run_results(resumed.folder))
    files = [lora_file(trainer, tmp_path / name) for trainer, name in ((whole, "a"), (resumed, "b"))]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert checks(whole)["ratio_before"]["value"] <= 1e-6
    assert checks(whole)["frozen_gradient"]["ok"]
    model: Any = retouch.load_run(whole.folder)._parts[0].model
    assert any(is_quantized(weight) for weight in model.module.parameters()) == ("quantize" in base)
    assert all(any(map(is_quantized, encoder.parameters())) for encoder in model.text.encoders) == ("text_encoders" in base)
    full = diffusers.StableDiffusion3Pipeline.from_pretrained(folder)
    full.load_lora_weights(files[0].parent)
    held, loaded = adapter(model.module), adapter(full.transformer)
    assert held.keys() == loaded.keys()
    assert [name for name in held if not torch.equal(held[name], loaded[name])] == []


@pytest.mark.slow
def test_quantised_blocks_that_wait_in_cpu_memory_compute_the_same_bits(folder: Path, tmp_path: Path) -> None:
    runs = [
        trained(folder, tmp_path, name, "8bit", gradient_checkpointing=True, devices={"swap_blocks": blocks})
        for name, blocks in (("stay", 0), ("wait", 2))
    ]
    assert_same(*(run_results(run.folder) for run in runs))


@pytest.mark.parametrize("bits", slow_except(["4bit"], BITS))
def test_a_language_model_writes_prompts_over_a_quantised_base(tmp_path: Path, bits: str) -> None:
    """Its ratio is 1 up to rounding also in full: tokens are drawn with a cache, and evaluated without."""

    def wrote(name: str, steps: int) -> retouch.Trainer:
        words = {"name": name, "out": str(tmp_path), "policy.base": {"quantize": bits}, "steps": steps, **BRIEF}
        recipe = load("sd3/prompt-enhancer-playground", [f"{key}={json.dumps(value)}" for key, value in words.items()])
        trainer = retouch.Trainer.from_recipe(recipe, progress=False)
        trainer.train()
        return trainer

    whole = wrote("whole", 2)
    wrote("parts", 1)
    assert_same(run_results(whole.folder), run_results(wrote("parts", 2).folder))
    assert checks(whole)["ratio_before"]["ok"]
    assert checks(whole)["frozen_gradient"]["ok"]
    file = lora_file(whole, tmp_path / "lora")
    held: Any = retouch.load_run(whole.folder)._parts[0].model.module
    section: Any = whole.recipe.policy.model
    full = section.build(device=CPU, gradient_checkpointing=False).module
    assert any(map(is_quantized, held.parameters()))
    assert not any(map(is_quantized, full.parameters()))
    full.load_adapter(str(file.parent))
    assert [name for name, tensor in adapter(held).items() if not torch.equal(tensor, adapter(full)[name])] == []


def test_the_preflight_names_a_frozen_layer_without_a_gradient() -> None:
    class NoGradient(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return super().forward(x)

    module = nn.Sequential(nn.Linear(8, 8), NoGradient(8, 8)).requires_grad_(False)
    run: Any = type("Run", (), {"policy": type("Policy", (), {"module": module})})
    (check,) = preflight._frozen_gradient(run)
    assert not check.ok
    assert check.value == math.inf
    assert "(NoGradient)" in check.text


@pytest.mark.parametrize("bits", BITS)
def test_offloaded_copies_and_page_locked_buffers_of_quantised_layers_compute_the_same(bits: str) -> None:
    torch.manual_seed(0)
    layer = quantized.quantized_layer(nn.Linear(128, 64), bits, device=CPU)
    x = torch.randn(3, 128)
    expected, digest = layer(x), bits_hash(layer.weight)
    offloading.repack([layer], lambda size: torch.empty(size, dtype=torch.uint8))
    weight = layer.weight
    with offloading.on_device(CPU, [layer]):
        assert layer.weight is not weight
        assert torch.equal(layer(x), expected)
    assert layer.weight is weight
    assert torch.equal(layer(x), expected)
    assert bits_hash(layer.weight) == digest
    for plain in plain_tensors(layer.weight):  # codes and scales are both part of the hash
        plain.data.view(-1)[:1].add_(1)
        assert bits_hash(layer.weight) != digest
        digest = bits_hash(layer.weight)


def test_quantised_weights_are_smaller_and_embedders_norms_and_projections_are_kept(folder: Path) -> None:
    sizes = {}
    for bits in (None, *BITS):
        module = type(tiny_models.sd3_transformer()).from_pretrained(folder / "transformer", torch_dtype=torch.bfloat16)
        if bits is not None:
            quantized.quantize(module, bits, device=CPU)
        assert not any(is_quantized(weight) for name, weight in module.named_parameters() if "blocks" not in name)
        weights = [weight for name, weight in module.named_parameters() if "blocks" in name and weight.dim() > 1]
        sizes[bits] = sum(plain.nbytes for weight in weights for plain in plain_tensors(weight))
    assert sizes["8bit"] / sizes[None] < 0.56
    assert sizes["4bit"] / sizes[None] < 0.42  # 2/3 of the bytes of the tiny bias-free rest are in 16 bits
    with pytest.raises(ValueError, match=r"policy\.base\.quantize: a Sequential has no blocks"):
        quantized.quantize(nn.Sequential(nn.Linear(64, 64)), "8bit", device=CPU)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ImportError("No module named 'torchao'"),
            r"8bit needs torchao \(No module .*\); install it: pip install 'retouch\[quantized\]'",
        ),
        (
            RuntimeError("no kernel image is available for execution on the device\nCompile with ..."),
            "torchao cannot compute 8bit layers on cpu: no kernel image is available .*; use 4bit, or null",
        ),
    ],
)
def test_train_and_doctor_name_a_missing_library_or_kernel_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(*_: Any, **__: Any) -> nn.Module:
        raise error

    monkeypatch.setattr(quantized, "quantized_layer", fail)
    recipe = load("playground/grpo", ['policy.train={"kind":"lora","rank":4}', 'policy.base={"quantize":"8bit"}', "device=cpu"])
    with pytest.raises(ValueError, match=rf"policy\.base\.quantize: {message}"):
        recipe.policy.require_kernels(CPU)
    target, _ = check_device("cpu", device=None, weights_here=True)
    assert re.match(rf"policy\.base\.quantize: {message}", next(check_kernels(recipe, target)).text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({}, "quantised weights cannot train"),
        ({"sharding": "fsdp2"}, "fsdp2 cannot shard quantised weights"),
        ({"sharding": "zero3"}, "zero3"),
        ({"devices": '{"swap_blocks":1}'}, "blocks in 4bit do not wait in CPU memory; use 8bit"),
        ({"policy.compile": "regional"}, "quantised layers are not compiled"),
        ({"policy.model": '{"kind":"import","class":"tiny_models:Anything"}'}, "only for models in the layout of a diffusers"),
    ],
)
def test_settings_that_cannot_have_a_quantised_base_are_refused(words: dict[str, str], message: str) -> None:
    given = ['policy.base={"quantize":"4bit"}', *(f"{key}={value}" for key, value in words.items())]
    with pytest.raises(ValueError, match=message):
        load("playground/grpo", given)


def configurations() -> list[tuple[Any, str | dict[str, str]]]:
    import diffusers
    import transformers
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig

    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    int8, bits = diffusers.TorchAoConfig(Int8WeightOnlyConfig()), transformers.BitsAndBytesConfig
    mapped = diffusers.PipelineQuantizationConfig
    return [
        ("4bit", {"quantize": "4bit"}),
        (bits(**nf4), {"quantize": "4bit"}),
        (diffusers.BitsAndBytesConfig(**nf4), {"quantize": "4bit"}),
        (int8, {"quantize": "8bit"}),
        (bits(load_in_4bit=True), "only bnb_4bit_quant_type='nf4' with bnb_4bit_use_double_quant=True"),
        (bits(load_in_8bit=True), "picks outliers over all rows of a batch"),
        (diffusers.TorchAoConfig(Int8DynamicActivationInt8WeightConfig()), "only Int8WeightOnlyConfig; give '8bit'"),
        (diffusers.GGUFQuantizationConfig(compute_dtype=torch.bfloat16), "from_single_file"),
        ({"quantize": "4bit", "text_encoders": "8bit"}, {"quantize": "4bit", "text_encoders": "8bit"}),
        (mapped(quant_mapping={"transformer": int8, "text_encoder_2": bits(**nf4)}), {"quantize": "8bit", "text_encoders": "4bit"}),
        (mapped(quant_mapping={"vae": diffusers.BitsAndBytesConfig(**nf4)}), "only the transformer and all text encoders"),
        ("2bit", "give '8bit', '4bit', a BitsAndBytesConfig or a TorchAoConfig"),
    ]


def test_objects_of_diffusers_and_transformers_are_taken_if_they_mean_the_same_and_refused_otherwise() -> None:
    from retouch.trainer.arguments import base_document

    for given, expected in configurations():
        if isinstance(expected, dict):
            assert base_document(given) == expected
        else:
            with pytest.raises(ValueError, match="quantization_config: ") as refused:
                base_document(given)
            assert expected in str(refused.value)


def by_loader(folder: Path, config: Any) -> Any:
    """The transformer, quantised by diffusers' own loader."""
    kind: Any = type(tiny_models.sd3_transformer())
    dtype = torch.float32  # by default bfloat16, whose products are slow on most CPUs
    return kind.from_pretrained(folder, subfolder="transformer", quantization_config=config, torch_dtype=dtype)


def by_torchao(config: str, folder: Path) -> Any:
    import diffusers
    from torchao import quantization

    return by_loader(folder, diffusers.TorchAoConfig(getattr(quantization, config)(set_inductor_config=False)))


def by_hand(replacement: Any, folder: Path) -> Any:
    """The transformer with the linear layers of its blocks replaced: diffusers' loader of bitsandbytes finds no GPU here."""
    module = by_loader(folder, None)
    for name, layer in list(module.transformer_blocks.named_modules()):
        if type(layer) is nn.Linear:
            made = replacement(layer.in_features, layer.out_features).requires_grad_(False)
            made.load_state_dict(layer.state_dict())
            parent, _, last = name.rpartition(".")
            setattr(module.transformer_blocks.get_submodule(parent), last, made.to("cpu"))
    return module


def by_bitsandbytes(layer: str, folder: Path, **settings: Any) -> Any:
    import bitsandbytes

    return by_hand(partial(getattr(bitsandbytes.nn, layer), **settings), folder)


def by_quanto(weights: str, folder: Path) -> Any:
    quanto = pytest.importorskip("optimum.quanto")
    module = by_loader(folder, None)
    quanto.quantize(module.transformer_blocks, weights=getattr(quanto, weights))
    quanto.freeze(module.transformer_blocks)
    return module


def by_gguf(kind: str, folder: Path) -> Any:
    """The transformer from a GGUF file, by diffusers' ``from_single_file``."""
    import diffusers

    gguf = pytest.importorskip("gguf")
    whole, stored, file = by_loader(folder, None), gguf.GGMLQuantizationType[kind], folder / f"{kind}.gguf"
    writer = gguf.GGUFWriter(file, "sd3")
    for name, tensor in whole.state_dict().items():
        if "blocks" in name and tensor.dim() == 2:
            writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), stored), raw_dtype=stored)
        else:
            writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = diffusers.GGUFQuantizationConfig(compute_dtype=torch.float32)
    kinds = {"quantization_config": config, "torch_dtype": torch.float32}
    return type(whole).from_single_file(str(file), config=str(folder), subfolder="transformer", **kinds)


class SDNQLinear(nn.Linear):
    """The name under which SDNQ's layers are known: their forward pass has no gradient."""

    __module__ = "sdnq.layers"


LOADED: list[tuple[str, Any, str | None]] = [
    ("torchao int8", partial(by_torchao, "Int8WeightOnlyConfig"), None),
    ("torchao fp8", partial(by_torchao, "Float8WeightOnlyConfig"), None),
    ("bitsandbytes NF4, by hand", partial(by_bitsandbytes, "LinearNF4"), None),
    ("bitsandbytes FP4, by hand", partial(by_bitsandbytes, "LinearFP4"), None),
    ("quanto int8", partial(by_quanto, "qint8"), None),
    ("quanto int4", partial(by_quanto, "qint4"), None),
    ("GGUF Q8_0", partial(by_gguf, "Q8_0"), None),
    ("GGUF Q4_0", partial(by_gguf, "Q4_0"), None),
    ("torchao int8 with activations", partial(by_torchao, "Int8DynamicActivationInt8WeightConfig"), "set policy.base.quantize"),
    (
        "bitsandbytes int8, by hand",
        partial(by_bitsandbytes, "Linear8bitLt", has_fp16_weights=False),
        'by bitsandbytes in 8 bits.*quantization_config="8bit"',
    ),
    ("SDNQ", partial(by_hand, SDNQLinear), 'by SDNQ.*quantization_config="8bit"'),
]


SLOW = ("torchao fp8", "bitsandbytes FP4, by hand", "quanto int4", "GGUF Q4_0")


@pytest.mark.parametrize(
    ("make", "message"), [pytest.param(*row[1:], id=row[0], marks=[pytest.mark.slow] * (row[0] in SLOW)) for row in LOADED]
)
def test_a_loaded_pipeline_that_is_quantised_trains_or_is_refused_with_what_to_use(
    tmp_path: Path, folder: Path, make: Any, message: str | None
) -> None:
    import diffusers

    pipe = diffusers.StableDiffusion3Pipeline.from_pretrained(folder, transformer=make(folder))
    if message is None:
        run = trained(pipe, tmp_path, "loaded", None, steps=1)
        assert any(map(is_quantized, pipe.transformer.parameters()))
        assert checks(run)["ratio_before"]["value"] <= 1e-6
        assert checks(run)["frozen_gradient"]["ok"]
        return
    with pytest.raises(ValueError, match=message):
        trained(pipe, tmp_path, "loaded", None, steps=1)
