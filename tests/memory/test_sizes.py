"""Sizes of the published models, and the memory plan, against published figures and real tiny models."""

import pytest
import torch
from peft import LoraConfig

import tiny_models
from measured_memory import saved_bytes
from published_plans import plan
from retouch.memory.plan import LoraShape, Setup, activation_bytes, moment_bytes
from retouch.memory.sizes import known_models, lora_count, parameter_count, parts, stored_count
from retouch.models.flux.family import FluxModel
from retouch.models.qwen_image.family import QwenImageModel
from retouch.models.sd3.family import SD3Model
from retouch.models.z_image.family import ZImageModel

QWEN = QwenImageModel(path="Qwen/Qwen-Image")
SD3_MEDIUM = SD3Model(path="stabilityai/stable-diffusion-3.5-medium")
Z_IMAGE = ZImageModel(path="Tongyi-MAI/Z-Image")
FAMILIES = {"qwen": QWEN, "sd3": SD3_MEDIUM, "flux": FluxModel(path="black-forest-labs/FLUX.1-dev"), "z-image": Z_IMAGE}
QWEN_LORA = LoraShape(64, QWEN.lora_targets)
TINY = {
    "qwen": tiny_models.qwen_transformer,
    "sd3": tiny_models.sd3_transformer,
    "flux": tiny_models.flux_transformer,
    "z-image": tiny_models.z_image_transformer,
}


def described(name):
    """A tiny transformer and its description in the form that ``parts`` returns."""
    module = TINY[name]()
    config = {key: value for key, value in module.config.items() if not key.startswith("_")}
    return module, {"class": type(module).__name__, "config": config}


def rows(setup, model=QWEN):
    return {row.name: row.bytes for row in plan(model, setup).rows}


@pytest.mark.parametrize(
    ("model", "part", "billions"),
    [
        ("qwen-image", "transformer", 20.4),
        ("qwen-image-edit-2511", "transformer", 20.4),
        ("qwen-image", "text_encoder", 8.3),
        ("qwen-image", "vae", 0.127),
        ("sd3-medium", "transformer", 2.08),
        ("sd3.5-medium", "transformer", 2.5),
        ("sd3.5-large", "transformer", 8.1),
        ("sd3.5-large", "text_encoder_3", 4.76),
        ("flux.1-dev", "transformer", 11.9),
        ("flux.1-schnell", "transformer", 11.9),
        ("flux.1-fill-dev", "transformer", 11.9),
        ("flux.1-dev", "text_encoder", 0.123),
        ("flux.1-dev", "text_encoder_2", 4.76),
        ("flux.1-dev", "vae", 0.084),
        ("z-image", "transformer", 6.15),
        ("z-image", "text_encoder", 4.02),
        ("z-image", "vae", 0.084),
        ("emu3", "writer", 8.49),
        ("emu3", "autoencoder", 0.271),
    ],
)
def test_parameter_counts_match_published_sizes(model, part, billions):
    assert stored_count(parts(model)[part]) / 1e9 == pytest.approx(billions, rel=0.02)


def test_planned_bytes_of_qwen_image_in_bf16_match_published_figures():
    made = rows(Setup(lora=QWEN_LORA, rows=1, tokens=9000))
    assert made["text_encoder"] / 1e9 == pytest.approx(16.6, rel=0.02)
    assert made["transformer, frozen weights"] / 1e9 == pytest.approx(41, rel=0.02)


def test_unknown_models_raise_with_their_name():
    assert set(known_models()) >= {
        *("emu3", "flux.1-dev", "flux.1-fill-dev", "flux.1-schnell"),
        *("qwen-image", "qwen-image-edit-2511", "sd3-medium", "sd3.5-large", "sd3.5-medium", "z-image"),
    }
    with pytest.raises(ValueError, match=r"'sd4'.*sd3\.5-large"):
        parts("sd4")
    with pytest.raises(ValueError, match="the size of class 'Other' is not known"):
        parameter_count({"class": "Other", "config": {}})


def test_flux_variants_differ_by_the_expected_parameter_counts():
    """Fill reads 320 more channels per token, and the distilled model has no guidance embedding."""
    dev, fill, schnell = (parts(f"flux.1-{name}")["transformer"] for name in ("dev", "fill-dev", "schnell"))
    width = 24 * 128
    assert parameter_count(fill) - parameter_count(dev) == (384 - 64) * width
    assert parameter_count(dev) - parameter_count(schnell) == (256 + 1) * width + (width + 1) * width


@pytest.mark.parametrize("name", TINY)
def test_parameter_counts_equal_those_of_real_models(name):
    module, part = described(name)
    assert parameter_count(part) == module.num_parameters()
    assert stored_count(part) == sum(tensor.numel() for tensor in module.state_dict().values())


@pytest.mark.parametrize("name", TINY)
def test_lora_parameter_counts_equal_those_of_peft(name):
    module, part = described(name)
    targets = FAMILIES[name].lora_targets
    module.requires_grad_(False)
    module.add_adapter(LoraConfig(r=4, target_modules=list(targets)))
    assert lora_count(part, rank=4, targets=targets) == sum(w.numel() for w in module.parameters() if w.requires_grad)


def test_a_lora_target_that_matches_no_layer_raises():
    with pytest.raises(ValueError, match=r"'attn\.to_queue'"):
        plan(QWEN, Setup(lora=LoraShape(4, ("attn.to_q", "attn.to_queue")), rows=1, tokens=1))


def test_planned_state_of_a_full_fine_tune_equals_that_of_adamw():
    module, part = described("qwen")
    optimizer = torch.optim.AdamW(module.parameters())
    for weight in module.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    kept = sum(state[key].nbytes for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq"))
    count = parameter_count(part)
    assert kept == 8 * count
    made = rows(Setup(lora=None, rows=1, tokens=10))
    whole = parameter_count(parts("qwen-image")["transformer"])
    assert made["AdamW's two moments"] == 8 * whole
    assert "AdamW's two moments" not in rows(Setup(lora=None, rows=1, tokens=10, moments="cpu"))
    eight = rows(Setup(lora=None, rows=1, tokens=10, moments="8bit"))["AdamW's two moments"]
    assert eight == pytest.approx(2 * whole, rel=0.02)
    assert moment_bytes(whole, "8bit", saved=True) == eight
    assert moment_bytes(whole, "cpu", saved=True) == moment_bytes(whole, None) == 8 * whole
    assert made["gradients"] == made["transformer, trained weights"] == 4 * whole
    assert "transformer, frozen weights" not in made
    table = rows(Setup(lora=None, rows=1, tokens=10), SD3_MEDIUM)["transformer, frozen weights"]
    assert table == 2 * 384 * 384 * 1536  # its position embeddings are a table that is not trained


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_planned_activations_are_within_20_percent_of_what_autograd_saves(name, dtype):
    module, part = described(name)
    if name == "z-image":
        part["config"] |= {"n_layers": 6, "n_heads": 4, "n_kv_heads": 4, "dim": 128}
    else:
        part["config"] |= {"num_layers": 6, "attention_head_dim": 32, "num_attention_heads": 4}
    if name == "flux":
        part["config"] |= {"num_layers": 3, "num_single_layers": 6}
    if name == "sd3":
        part["config"] |= {"dual_attention_layers": (), "caption_projection_dim": 128, "sample_size": 32, "pos_embed_max_size": 32}
    module = type(module)(**part["config"]).to(dtype).train()
    if name == "qwen":
        inputs = {"hidden_states": torch.randn(2, 256, 64), "encoder_hidden_states": torch.randn(2, 40, 32)}
        more = {"timestep": torch.tensor([0.5, 0.1]), "img_shapes": [[(1, 16, 16)]] * 2}
    elif name == "flux":
        inputs = {"hidden_states": torch.randn(2, 256, 64), "encoder_hidden_states": torch.randn(2, 40, 48)}
        inputs["pooled_projections"] = torch.randn(2, 16)
        more = {"timestep": torch.tensor([0.5, 0.1]), "guidance": torch.full((2,), 3.5)}
        more |= {"img_ids": torch.zeros(256, 3), "txt_ids": torch.zeros(40, 3)}
    elif name == "z-image":
        inputs = {"x": torch.randn(2, 16, 1, 32, 32), "cap_feats": torch.randn(2, 40, 32)}
        more = {"t": torch.tensor([0.5, 0.1])}
    else:
        inputs = {"hidden_states": torch.randn(2, 16, 32, 32), "encoder_hidden_states": torch.randn(2, 40, 48)}
        inputs["pooled_projections"] = torch.randn(2, 40)
        more = {"timestep": torch.tensor([500.0, 100.0])}
    inputs = {key: value.to(dtype) for key, value in inputs.items()}
    if name == "z-image":
        inputs = {key: list(value) for key, value in inputs.items()}
    setup = {"lora": None, "rows": 2, "tokens": 296, "dtype": dtype}
    measured = saved_bytes(lambda: module(**inputs, **more), module)
    shape = FAMILIES[name].shape(part)
    assert activation_bytes(shape, Setup(**setup, gradient_checkpointing=False)) == pytest.approx(measured, rel=0.2)
    module.enable_gradient_checkpointing()
    inputs_kept = saved_bytes(lambda: module(**inputs, **more), module)
    assert inputs_kept < activation_bytes(shape, Setup(**setup)) < measured


def test_the_z_image_plan_equals_counts_by_hand():
    width, text, read = 3840, 2560, 256
    feed = int(width / 3 * 8)
    block = 4 * width**2 + 3 * width * feed + 4 * width + 2 * 128  # no biases; four norms of tokens, two of heads
    told = (read + 1) * 4 * width
    ends = (64 + 1) * width + (width + 1) * 64 + (read + 1) * width  # input, output and modulation of the last layer
    time, words, padding = (read + 1) * 1024 + (1024 + 1) * read, text + (text + 1) * width, 2 * width
    whole = 34 * block + 32 * told + ends + time + words + padding
    assert parameter_count(parts("z-image")["transformer"]) == whole == 6_154_908_736
    lora = LoraShape(32, Z_IMAGE.lora_targets)
    made = rows(Setup(lora=lora, rows=1, tokens=4096 + 512, ranks=8, sharding="fsdp"), Z_IMAGE)
    assert made["two gathered blocks"] == 2 * 2 * (block + told)
    setup = Setup(lora=lora, rows=1, tokens=4096 + 512)
    assert rows(setup, Z_IMAGE)["gradients"] == 4 * 32 * 34 * (4 * 2 * width + 3 * (width + feed))


def test_fsdp_shards_the_transformer_and_nothing_else():
    one = rows(Setup(lora=QWEN_LORA, rows=1, tokens=9000))
    eight = rows(Setup(lora=QWEN_LORA, rows=1, tokens=9000, ranks=8, sharding="fsdp"))
    for name in ("transformer, frozen weights", "transformer, trained weights", "gradients", "AdamW's two moments"):
        assert 0 <= eight[name] * 8 - one[name] < 8
    for name in ("text_encoder", "vae", "activations (estimate)"):
        assert eight[name] == one[name]
    block = 2 * 20.4e9 / 60  # bytes of one of the sixty blocks
    assert eight["two gathered blocks"] == pytest.approx(2 * block, rel=0.02)
    assert rows(Setup(lora=QWEN_LORA, rows=1, tokens=9000, ranks=8)) == one
    waiting = rows(Setup(lora=QWEN_LORA, rows=1, tokens=9000, ranks=8, sharding="fsdp", weights_on_cpu=True))
    assert waiting == {name: eight[name] for name in ("two gathered blocks", "text_encoder", "vae", "activations (estimate)")}


def test_excluded_parts_and_weight_copies_change_the_plan():
    setup = {"lora": QWEN_LORA, "rows": 1, "tokens": 100}
    base, less = rows(Setup(**setup)), rows(Setup(**setup, without=("text_encoder",), copies=(torch.float32, torch.bfloat16)))
    assert less == {
        **{k: v for k, v in base.items() if k != "text_encoder"},
        "copies of the trained weights": base["gradients"] + base["gradients"] // 2,
    }
    assert plan(QWEN, Setup(**setup)).total == sum(base.values())
    with pytest.raises(ValueError, match="'transformer'"):
        plan(QWEN, Setup(**setup, without=("transformer",)))


EIGHT_BITS = torch.float8_e4m3fn


@pytest.mark.parametrize(
    "wrong",
    [{"rows": 0}, {"tokens": 0}, {"ranks": 0}, {"copies": (EIGHT_BITS,)}, {"dtype": EIGHT_BITS}, {"trained_dtype": EIGHT_BITS}],
)
def test_invalid_setups_raise(wrong):
    with pytest.raises(ValueError, match=r"at least|16 or 32"):
        Setup(**{"lora": None, "rows": 1, "tokens": 1, **wrong})
