"""Memory plans of writers and image models, compared with torch's profiler and with counts by hand."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import DynamicCache

import tiny_emu3
import tiny_models
import tiny_writers
from measured_memory import measured_peak
from retouch.memory.images import codes_plan, image_model_plan
from retouch.memory.peak import peak_bytes
from retouch.memory.plan import LoraShape, MemoryPlan
from retouch.memory.sizes import build_meta, parts, reward_model, stored_count
from retouch.memory.tokens import WriterSetup, writer_plan
from retouch.models.common.recompute import recomputing
from retouch.models.language import published_language_model, read_description
from retouch.models.sd3.family import SD3Model
from retouch.models.shapes import ImageBatch
from retouch.models.z_image.family import ZImageModel

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
VLM = "Qwen/Qwen2.5-VL-7B-Instruct"
SETUP = WriterSetup(
    lora=LoraShape(4, TARGETS),
    prompt=100,
    completion=28,
    update=(1, 1),
    rollout=(1, 1),
    evaluation=1,
    logits_at_once=8,
    dtype=torch.float32,
    trained_dtype=torch.float32,
    copies=(),
    gradient_checkpointing=False,
)


def rows(plan: MemoryPlan) -> dict[str, int]:
    return {row.name: row.bytes for row in (*plan.rows, *plan.phases)}


def small(layers: int) -> Any:
    return tiny_writers.module(
        "qwen2.5", num_hidden_layers=layers, hidden_size=64, intermediate_size=160, num_attention_heads=4, num_key_value_heads=2
    )


def described(module: nn.Module) -> dict[str, Any]:
    return {"class": type(module).__name__, "config": module.config.to_dict()}  # type: ignore[union-attr, operator]


# Peak memory


def test_the_peak_on_the_meta_device_equals_that_of_the_cpu() -> None:
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64))
    x = torch.randn(512, 64)

    def train(module: nn.Module, inputs: torch.Tensor) -> None:
        module(inputs).sum().backward()
        module.zero_grad(set_to_none=True)

    train(net, x)
    on_meta, x_meta = copy.deepcopy(net).to("meta"), x.to("meta")
    assert peak_bytes(lambda: train(on_meta, x_meta), existing=[x_meta, *on_meta.parameters()]) == measured_peak(
        lambda: train(net, x)
    )


def test_freed_tensors_are_not_counted_and_views_are_not_counted_twice() -> None:
    def allocate() -> None:
        for _ in range(5):
            tensor = torch.empty(1000, device="meta")
            tensor.view(10, 100).T[3:]
            del tensor

    assert peak_bytes(allocate) == 4000


# A writer


def test_published_models_have_their_known_sizes() -> None:
    """16.6 GB for the 7B vision-language model, 41 GB for the 20.4 B transformer, in 16 bits."""
    language = published_language_model(VLM)
    assert language is not None
    setup = replace(SETUP, dtype=torch.bfloat16, lora=LoraShape(32, TARGETS))
    assert rows(writer_plan(language, setup))["writer, frozen weights"] / 1e9 == pytest.approx(16.6, rel=0.005)
    editor = parts("qwen-image-edit-2511")
    assert stored_count(editor["transformer"]) * 2 / 1e9 == pytest.approx(41, rel=0.005)
    assert stored_count(editor["text_encoder"]) * 2 / 1e9 == pytest.approx(16.6, rel=0.005)
    clip = reward_model("openai/clip-vit-base-patch32")
    assert clip is not None
    assert stored_count(clip) == 151_277_313


def vision_weights(language: dict[str, Any]) -> int:
    return sum(weight.numel() for name, weight in build_meta(language).named_parameters() if name.startswith("model.visual."))


def test_planned_weights_gradients_and_moments_follow_from_parameter_counts() -> None:
    language = published_language_model(VLM)
    assert language is not None
    wide, narrow, layers = 3584, 512, 28
    trained = 32 * layers * (2 * (wide + wide) + 2 * (wide + narrow))
    setup = replace(SETUP, dtype=torch.bfloat16, lora=LoraShape(32, TARGETS), copies=(torch.float32,) * 2, ranks=8)
    alone = rows(writer_plan(language, setup))
    assert alone["writer, trained weights"] == alone["gradients"] == 4 * trained
    assert alone["AdamW's two moments"] == 8 * trained
    assert alone["copies of the trained weights"] == 2 * 4 * trained
    eight = rows(writer_plan(language, replace(setup, moments="8bit")))
    assert eight["AdamW's two moments"] == trained * 2 + trained * 2 * 4 // 256
    assert "AdamW's two moments" not in rows(writer_plan(language, replace(setup, moments="cpu")))
    zero = rows(writer_plan(language, replace(setup, sharding="zero2")))
    assert zero["AdamW's two moments"] == trained
    assert zero["writer, frozen weights"] == alone["writer, frozen weights"]
    sharded = rows(writer_plan(language, replace(setup, sharding="fsdp2")))
    for name in ("writer, trained weights", "gradients", "AdamW's two moments"):
        assert sharded[name] == pytest.approx(alone[name] / 8, rel=1e-6)
    replicated = 2 * (2 * 152064 * wide + vision_weights(language))  # embeddings and head, and the vision tower
    assert sharded["writer, frozen weights"] == replicated + math.ceil((alone["writer, frozen weights"] - replicated) / 8)
    waiting = rows(writer_plan(language, replace(setup, sharding="fsdp2", weights_on_cpu=True)))
    assert waiting["writer, frozen weights"] == replicated
    assert not {"writer, trained weights", "gradients", "AdamW's two moments", "copies of the trained weights"} & waiting.keys()
    waiting = rows(writer_plan(language, replace(setup, sharding="fsdp2", weights_on_cpu=True, lora=None)))
    assert waiting["gradients"] == waiting["writer, trained weights"] == 2 * replicated
    whole = rows(writer_plan(language, replace(setup, lora=None)))
    assert "writer, frozen weights" not in whole
    assert whole["gradients"] == whole["writer, trained weights"]
    offloaded = writer_plan(language, replace(setup, lora=None, copies=(torch.float32,), offload_reference=True))
    assert rows(offloaded)["copies of the trained weights"] == whole["writer, trained weights"], "the other of the two"
    assert offloaded.phases[-1].bytes > whole["writer, trained weights"], "it is moved to the device to be used"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_planned_activations_match_the_peak_measured_on_the_cpu(checkpointing: bool) -> None:
    planned, measured = [], []
    for layers in (2, 6):
        model = small(layers)
        planned.append(writer_plan(described(model), replace(SETUP, gradient_checkpointing=checkpointing)).phases[0].bytes)
        model.requires_grad_(False)
        inject_adapter_in_model(LoraConfig(r=4, target_modules=list(TARGETS)), model.model)
        states = torch.randn(1, 128, 64, requires_grad=True)

        def train(model: Any = model, states: torch.Tensor = states) -> None:
            with recomputing(model, on=checkpointing):
                output = model.model(inputs_embeds=states, use_cache=False).last_hidden_state
            output.sum().backward()
            states.grad = None
            model.zero_grad(set_to_none=True)

        train()
        measured.append(measured_peak(train))
    assert planned[1] - planned[0] == pytest.approx(measured[1] - measured[0], rel=0.2)
    assert planned[0] == pytest.approx(measured[0], rel=0.2)


def test_the_kv_cache_is_as_large_as_that_of_transformers() -> None:
    model = small(3)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.zeros(1, 40, dtype=torch.long), past_key_values=cache)
    kept = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))

    def planned(stage: str, **changes: Any) -> int:
        return rows(writer_plan(described(model), replace(SETUP, **changes)))[f"{stage}: cache and logits"]

    assert planned("rollout", completion=28 + 40) - planned("rollout") == kept
    assert planned("evaluation", completion=28 + 40, evaluation=5) - planned("evaluation", evaluation=5) == 5 * kept
    assert planned("rollout", rollout=(5, 5)) == planned("evaluation", evaluation=5) > planned("evaluation")


def test_planned_update_memory_is_linear_in_rows_and_in_logits_at_once() -> None:
    part = described(small(2))

    def update(**changes: Any) -> int:
        return writer_plan(part, replace(SETUP, gradient_checkpointing=True, **changes)).phases[0].bytes

    one, two, three = (update(update=(1, count)) for count in (1, 2, 3))
    assert three - two == pytest.approx(two - one, rel=0.01)
    assert update(logits_at_once=16) - update() == pytest.approx(update(logits_at_once=24) - update(logits_at_once=16), rel=0.01)
    assert update() < writer_plan(part, SETUP).phases[0].bytes


def test_targets_that_match_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="no linear layer named 'query'"):
        writer_plan(described(small(1)), replace(SETUP, lora=LoraShape(4, ("query",))))


def test_a_folder_without_a_model_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="contains no model"):
        read_description(tmp_path)


# Image models

RENDERING = ImageBatch(rows=2, size=(32, 32), source=(32, 32), sources=1, text=24, dtype=torch.float32)


SD3, Z_IMAGE = SD3Model(path="sd3"), ZImageModel(path="z-image")


def image_model(transformer: nn.Module) -> dict[str, Any]:
    modules = {"transformer": transformer, "vae": tiny_models.sd3_vae()}
    return {name: {"class": type(module).__name__, "config": dict(module.config)} for name, module in modules.items()}


def test_planned_memory_of_decoding_latents_matches_the_peak_on_the_cpu() -> None:
    vae = tiny_models.sd3_vae()
    side = 32 // 2 ** (len(vae.config.block_out_channels) - 1)
    latents = torch.randn(2, vae.config.latent_channels, side, side)
    with torch.no_grad():
        vae.decode(latents)
        measured = measured_peak(lambda: vae.decode(latents))
    planned = rows(image_model_plan(SD3, image_model(tiny_models.sd3_transformer()), RENDERING))
    assert planned["rendering: decoding of latents"] == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(("family", "transformer"), [(SD3, "sd3"), (Z_IMAGE, "z_image")])
def test_larger_batches_need_more_memory_and_the_same_weights(family: Any, transformer: str) -> None:
    model = image_model(getattr(tiny_models, f"{transformer}_transformer")())
    one, two = (rows(image_model_plan(family, model, replace(RENDERING, rows=count))) for count in (1, 2))
    assert two["image model"] == one["image model"] == 4 * stored_count(model["transformer"])
    for name in ("rendering: one denoising step", "rendering: decoding of latents"):
        assert two[name] == pytest.approx(2 * one[name], rel=0.1)


def test_a_part_on_another_device_is_not_counted() -> None:
    assert "vae" not in rows(image_model_plan(SD3, image_model(tiny_models.sd3_transformer()), RENDERING, without=("vae",)))


# Image tokens


def test_the_emu3_plan_matches_counts_by_hand() -> None:
    """Counts by hand: embeddings and head, and 32 layers of grouped-query attention and a gated MLP."""
    described = parts("emu3")
    width, inner, layers, narrow, vocabulary = 4096, 14336, 32, 1024, 184_622
    layer = 2 * width * width + 2 * width * narrow + 3 * width * inner + 2 * width
    count = 2 * vocabulary * width + layers * layer + width
    assert stored_count(described["writer"]) == count == 8_492_011_520
    setup = replace(
        SETUP,
        lora=None,
        prompt=1328,
        completion=2048,
        update=(1, 1),
        rollout=(2, 16),
        evaluation=8,
        logits_at_once=256,
        dtype=torch.bfloat16,
        trained_dtype=torch.bfloat16,
        copies=(torch.bfloat16,),
        gradient_checkpointing=True,
        ranks=8,
        sharding="zero2",
        grammar_sets=2,
    )
    plan = rows(writer_plan(described["writer"], setup))
    assert "fp32 master weights and gradients" not in plan  # ZeRO shards its own
    alone = rows(writer_plan(described["writer"], replace(setup, sharding="replicated", ranks=1)))
    assert alone["fp32 master weights and gradients"] == 8 * count
    assert "writer, frozen weights" not in plan
    assert plan["writer, trained weights"] == plan["copies of the trained weights"] == 2 * count
    assert "gradients" not in plan  # they are DeepSpeed's bucket, which exists during the backward pass alone
    assert plan["AdamW's two moments"] == count
    token = 2 * 2 * layers * narrow  # keys and values, two bytes each
    cache = token * (2 * 1328 + 16 * (1328 + 2048))
    assert 0 <= plan["rollout: cache and logits"] - cache < 0.6e9
    assert 0 <= plan["evaluation: cache and logits"] - token * (8 * 1328 + 8 * (1328 + 2048)) < 2e9
    alone = rows(writer_plan(described["writer"], replace(setup, grammar_sets=1)))
    fp32 = 256 * vocabulary * 4
    assert plan["update: activations and logits"] > 2 * count + 3 * fp32
    # The allowed and the excluded tokens, one mask per position instead of one for all.
    assert plan["update: activations and logits"] - alone["update: activations and logits"] == 2 * 255 * vocabulary


def test_planned_memory_of_the_image_tokenizer_matches_the_peak_on_the_cpu() -> None:
    vq = tiny_emu3.module(deep=True).model.vqmodel
    plan = codes_plan(described(vq), decoded=3, encoded=2, size=(32, 48))
    planned = rows(plan)
    assert planned["autoencoder"] == 4 * sum(tensor.numel() for tensor in vq.state_dict().values())
    height, width = 32 // vq.spatial_scale_factor, 48 // vq.spatial_scale_factor
    codes, pixels = torch.zeros(3, height, width, dtype=torch.long), torch.zeros(2, 3, 32, 48)
    with torch.no_grad():
        decoding = measured_peak(lambda: vq.decode(codes))
        encoding = measured_peak(lambda: vq.encode(pixels, torch.tensor([[32, 48]] * 2)))
    # On a CPU, convolutions and attention need workspaces in addition.
    assert planned["rendering: decoding of codes"] == pytest.approx(decoding, rel=0.3)
    assert planned["encoding: images to codes"] == pytest.approx(encoding, rel=0.3)
