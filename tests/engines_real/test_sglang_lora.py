"""Our adapters in SGLang's own models: every layer of an adapter has a layer there, with the same weights.

Runs SGLang's loader of adapters on its layers for tiny models, on a CPU, with ``make engines-sglang``.
"""

import importlib
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

import sglang_wheel
import tiny_models
from retouch.models.lora import write_lora
from retouch_models.flux import FluxModel
from retouch_models.qwen_image import QwenImageModel
from retouch_models.sd3 import SD3Model

pytestmark = [*sglang_wheel.MARKS]
DITS, CONFIGS = "sglang.multimodal_gen.runtime.models.dits", "sglang.multimodal_gen.configs.models.dits"
FUSED = ("add_q_proj", "add_k_proj", "add_v_proj")
FAMILIES = {
    "sd3": (SD3Model, tiny_models.sd3_transformer, "stablediffusion3", "stablediffusion3:StableDiffusion3TransformerConfig"),
    "flux": (FluxModel, tiny_models.flux_transformer, "flux", "flux:FluxConfig"),
    "qwen-image": (QwenImageModel, tiny_models.qwen_transformer, "qwen_image", "qwenimage:QwenImageDitConfig"),
}
"""Ours: the section and a tiny model. Theirs: the module of the model, and its configuration."""


@pytest.fixture(scope="module")
def lora_pipeline():
    """SGLang's pipeline with adapters; its models can be built afterwards."""
    from sglang.multimodal_gen.runtime.pipelines_core.lora.pipeline import LoRAPipeline

    with sglang_wheel.one_process():
        yield type("Pipeline", (LoRAPipeline,), {"create_pipeline_stages": lambda self: None})


def loaded(lora_pipeline, monkeypatch, folder, family, targets=None):
    """(our model with an adapter, SGLang's pipeline that has loaded it, the number of layers to which it was applied)."""
    section, make, module, configuration = FAMILIES[family]
    own = make()
    tiny_models.make_trainable(own, "lora", section.lora_targets if targets is None else targets)
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    write_lora(own, folder, pipeline=None)
    theirs = importlib.import_module(f"{DITS}.{module}")
    monkeypatch.setattr(theirs, "USPAttention", lambda *_, **__: torch.nn.Identity(), raising=False)  # it needs a server
    file, _, name = configuration.partition(":")
    config = getattr(importlib.import_module(f"{CONFIGS}.{file}"), name)()
    config.update_model_arch({name: value for name, value in own.config.items() if not name.startswith("_")})
    transformer = getattr(theirs, type(own).__name__)(config, hf_config=dict(own.config))
    pipeline = object.__new__(lora_pipeline)
    vars(pipeline).update(
        modules={"transformer": transformer},
        lora_adapters=defaultdict(dict),
        loaded_adapter_paths={},
        loaded_adapter_alphas={},
        lora_rank=None,
        lora_alpha=None,
        lora_target_modules=None,
        lora_layers={},
        device=torch.device("cpu"),
        exclude_lora_layers=config.arch_config.exclude_lora_layers,
        server_args=SimpleNamespace(lora_path=None, lora_weight_name=None, pipeline_config=SimpleNamespace(dit_config=config)),
    )
    pipeline.convert_module_lora_layers(transformer, "transformer", pipeline.lora_layers)
    pipeline.load_lora_adapter(str(folder), "ours", 0)
    applied = pipeline._apply_lora_to_layers(
        pipeline.lora_layers, ["ours"], [str(folder)], 0, [1.0], clear_existing=True, merge_weights=False
    )
    return own, pipeline, applied


def weights_of(own):
    """Layer to its (A, B)."""
    named = dict(own.named_parameters())
    names = [name.removesuffix(".lora_A.default.weight") for name in named if ".lora_A." in name]
    return {name: tuple(named[f"{name}.lora_{each}.default.weight"] for each in "AB") for name in names}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_adapter_layer_is_loaded_into_the_sglang_model(lora_pipeline, monkeypatch, tmp_path, family):
    own, pipeline, applied = loaded(lora_pipeline, monkeypatch, tmp_path, family)
    adapter, expected = pipeline.lora_adapters["ours"], weights_of(own)
    if family == "qwen-image":  # the projections of the text are one layer
        blocks = sorted({name.removesuffix(f".{FUSED[0]}") for name in expected if name.endswith(FUSED[0])})
        for block in blocks:
            parts = [expected.pop(f"{block}.{name}") for name in FUSED]
            expected[f"{block}.to_added_qkv"] = tuple(torch.stack(each) for each in zip(*parts, strict=True))
        assert blocks
    assert {name.rpartition(".lora_")[0] for name in adapter if ".lora_" in name} == expected.keys() <= pipeline.lora_layers.keys()
    for name, (down, up) in expected.items():
        assert torch.equal(adapter[f"{name}.lora_A"], down), name
        assert torch.equal(adapter[f"{name}.lora_B"], up), name
    assert applied == len(expected)
    assert pipeline.loaded_adapter_alphas == {"ours": own.peft_config["default"].lora_alpha}


def test_adapters_of_only_some_fused_projections_are_not_applied_by_sglang(lora_pipeline, monkeypatch, tmp_path):
    """Therefore such targets are refused (tests/policies/engines/test_sglang_engine.py)."""
    own, _, applied = loaded(lora_pipeline, monkeypatch, tmp_path, "qwen-image", ("attn.to_q", "attn.add_k_proj"))
    assert applied == len(weights_of(own)) / 2 > 0
