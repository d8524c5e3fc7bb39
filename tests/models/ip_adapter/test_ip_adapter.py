"""IP-Adapters on Flux and Qwen-Image: against diffusers' loading and pipelines, and the larger layout against its definition."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline
from diffusers.models.embeddings import ImageProjection
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPVisionModelWithProjection,
    SiglipImageProcessorPil,
    SiglipModel,
    SiglipVisionModel,
)

import tiny_encoders
import tiny_models
from retouch.models import ip_adapter
from retouch.models.base import packaged_config
from retouch.models.ip_adapter import ImageEncoder, ReferenceModel, embed_width
from retouch.models.train import IpAdapter
from retouch.types import Conditioning, Task
from retouch_models.flux.model import Flux, FluxFill
from retouch_models.qwen_image.model import QwenImageEdit
from retouch_plan.models import build_meta, parameter_count
from retouch_worlds.testing.models import check_model

SMALL = IpAdapter(encoder="playground", tokens=4, projection="linear", blocks="double")
LARGE = IpAdapter(encoder="playground", tokens=6, projection="mlp", blocks="all")
QWEN = IpAdapter(encoder="playground", tokens=6, projection="mlp", blocks="double")
QFORMER = IpAdapter(encoder="playground", tokens=6, projection="qformer", blocks="all")


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """Folders of a CLIP vision model (12 wide) and a SigLIP one (16 wide)."""
    return tiny_encoders.write(tmp_path_factory.mktemp("encoders"))


def encoder(encoders, name="clip"):
    return ImageEncoder.from_pretrained(encoders / name, dtype=torch.float32, device="cpu")


def flux(kind=Flux, form=SMALL, *, width=12, moved=True, dtype=torch.float32):
    channels = tiny_models.FILL_CHANNELS if kind is FluxFill else 64
    parts = {"transformer": tiny_models.flux_transformer(channels=channels).to(dtype), "vae": tiny_models.sd3_vae()}
    model = kind(**parts, text=tiny_models.flux_text(), scheduler_config=tiny_models.FLUX_SCHEDULER, size=(24, 40))
    return with_adapter(model, form, width=width, moved=moved)


def qwen(form=QWEN, *, width=12, moved=True):
    tokenizer = tiny_models.qwen_tokenizer()
    model = QwenImageEdit(
        transformer=tiny_models.qwen_transformer(),
        vae=tiny_models.qwen_vae(),
        text_encoder=tiny_models.qwen_text_encoder(tokenizer),
        tokenizer=tokenizer,
        image_processor=tiny_models.qwen_image_processor(),
        scheduler_config=tiny_models.SCHEDULER,
        template=tiny_models.TEMPLATE,
        condition_area="as_is",
        source_area="as_is",
    )
    return with_adapter(model, form, width=width, moved=moved)


def with_adapter(model, form, *, width, moved):
    model.module.requires_grad_(False)
    ip_adapter.attach(model.module, form, embed_width=width, seed=3)
    if moved:
        move(model.module)
    return model


@torch.no_grad()
def move(transformer):
    torch.manual_seed(8)
    for name, parameter in transformer.named_parameters():
        if parameter.requires_grad and "norm" not in name:
            parameter.normal_(0, 0.2)


def tasks():
    mask = Image.new("L", (40, 24))
    mask.paste(255, (5, 3, 21, 14))
    pairs = [(tiny_models.image(seed, 24, 40), tiny_models.image(10 + seed, 20 + seed, 30)) for seed in range(2)]
    return [
        replace(tiny_models.task(words, words, image), reference=reference, mask=mask)
        for words, (image, reference) in zip(("a red circle", "blue"), pairs, strict=True)
    ]


def velocity(model, conditioning, *, grad=False):
    x = model.initial_noise(conditioning, tiny_models.generators(len(next(iter(conditioning.tensors.values())))))
    with torch.set_grad_enabled(grad):
        return model.velocity(model.module, x, torch.linspace(0.9, 0.4, len(x)), conditioning)


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_image_embeddings_match_transformers(encoders, name):
    ours = encoder(encoders, name)
    pictures = [tiny_models.image(0, 20, 30), tiny_models.image(1, 40, 17)]
    kind, processor, field = {
        "clip": (CLIPVisionModelWithProjection, CLIPImageProcessorPil, "image_embeds"),
        "siglip": (SiglipVisionModel, SiglipImageProcessorPil, "pooler_output"),
    }[name]
    theirs = kind.from_pretrained(encoders / name)
    for row, picture in enumerate(pictures):
        pixels = processor.from_pretrained(encoders / name)(images=picture, return_tensors="pt")["pixel_values"]
        expected = getattr(theirs(pixels), field)
        torch.testing.assert_close(ours.embed(pictures)[row : row + 1], expected, atol=1e-5, rtol=1e-5)
    assert ours.width == embed_width(encoders / name) == expected.shape[1]
    assert not any(parameter.requires_grad for parameter in ours.model.parameters())


@pytest.mark.parametrize(("name", "kind"), [("two-clip", CLIPModel), ("two-siglip", SiglipModel)])
def test_vision_tower_of_a_two_tower_model_is_used(encoders, name, kind):
    ours, whole = encoder(encoders, name), kind.from_pretrained(encoders / name)
    picture = tiny_models.image(0, 20, 30)
    pixels = ours._processor(images=picture, return_tensors="pt")["pixel_values"]
    expected = whole.get_image_features(pixel_values=pixels)
    expected = expected if isinstance(expected, torch.Tensor) else expected.pooler_output
    torch.testing.assert_close(ours.embed([picture]), expected, atol=1e-5, rtol=1e-5)
    assert ours.width == expected.shape[1]


def test_parameter_counts_match_the_published_models():
    """The large adapter: 1152 to 2304 to 128 x 4096, its norm, and keys and values of 4096 to 3072 in 57 blocks."""
    siglip, clip = (
        packaged_config("encoders", name) for name in ("google/siglip-so400m-patch14-384", "openai/clip-vit-large-patch14")
    )
    assert parameter_count(siglip) == 428_225_600
    assert parameter_count(clip) == 303_966_208
    flux_dev = {"class": "FluxTransformer2DModel", "config": {}}
    projection = 1153 * 2304 + 2305 * 128 * 4096 + 2 * 4096
    large = IpAdapter(encoder="playground", tokens=128, projection="mlp", blocks="all")
    counted = projection + 57 * 2 * 4096 * 3072
    assert sum(adapter_sizes(flux_dev, large, embed_width=1152)) == counted == 2_645_600_512
    assert adapter_sizes(flux_dev, large, embed_width=1152)[0] == projection == 1_211_148_544
    small = 769 * 4 * 4096 + 2 * 4096 + 19 * 2 * 4097 * 3072
    assert sum(adapter_sizes(flux_dev, SMALL, embed_width=768)) == small


def adapter_sizes(described, settings, *, embed_width):
    """Numbers of parameters of the projection and of each block of an adapter on a described transformer."""
    module = copy.deepcopy(build_meta(described))
    with torch.device("meta"):
        ip_adapter.attach(module, settings, embed_width=embed_width, seed=0)
    return [sum(weight.numel() for weight in part.parameters()) for part in ip_adapter.modules(module)]


EVERY_MODEL = pytest.mark.parametrize(
    "model",
    [flux, lambda **o: flux(FluxFill, **o), lambda **o: flux(form=LARGE, **o), lambda **o: flux(form=QFORMER, **o), qwen],
    ids=["flux", "fill", "flux-large", "flux-qformer", "qwen"],
)


@EVERY_MODEL
def test_reference_model_passes_the_contract_checks(model, encoders):
    check_model(ReferenceModel(model(), encoder(encoders)), tasks())


@EVERY_MODEL
def test_untrained_adapter_leaves_the_velocity_bitwise_unchanged(model, encoders):
    made = ReferenceModel(model(moved=False), encoder(encoders))
    told = made.encode(tasks())
    plain = replace(told, tensors={name: each for name, each in told.tensors.items() if name != Conditioning.REFERENCE})
    bare = without_adapter(made.model, type(made.model))
    assert torch.equal(velocity(made, told), velocity(bare, plain))


@EVERY_MODEL
def test_only_adapter_weights_are_trainable_and_all_receive_gradients(model, encoders):
    made = ReferenceModel(model(), encoder(encoders))
    told = made.encode(tasks())
    velocity(made, told, grad=True).square().mean().backward()
    trained = {name for name, each in made.module.named_parameters() if each.grad is not None and each.grad.abs().max() > 0}
    mine = {id(each) for part in ip_adapter.modules(made.module) for each in part.parameters()}
    named = {name for name, each in made.module.named_parameters() if id(each) in mine}
    # This bias adds the same to the score of every key, so the softmax does not depend on it.
    assert trained >= {name for name in named if not name.endswith("to_k_ip.0.bias")}
    assert trained <= named == {name for name, each in made.module.named_parameters() if each.requires_grad}


@EVERY_MODEL
def test_velocity_depends_on_the_reference_and_a_missing_one_raises(model, encoders, tmp_path):
    """Also that of an adapter that is read from its file."""
    made, read = ReferenceModel(model(), encoder(encoders)), model(moved=False)
    told = made.encode(tasks())
    other = made.encode([replace(task, reference=tiny_models.image(40)) for task in tasks()])
    assert (velocity(made, told) - velocity(made, other)).abs().max() > 1e-3
    ip_adapter.write(made.module, tmp_path)
    ip_adapter.read(read.module, tmp_path)
    assert torch.equal(velocity(made, told), velocity(read, told))
    negative = made.encode_negative(tasks())
    assert torch.equal(negative.tensors[Conditioning.REFERENCE], torch.zeros(2, 12))
    with pytest.raises(ValueError, match="'blue' has no reference image"):
        made.encode([tasks()[0], replace(tasks()[1], reference=None)])


def without_adapter(model, kind):
    """The model with a transformer of the same weights to which no adapter was attached."""
    own = model.module
    bare = own.__class__.from_config(own.config).eval()
    theirs = own.state_dict()
    bare.load_state_dict({name: theirs[name] for name in bare.state_dict()})
    made = object.__new__(kind)
    made.__dict__ = {**model.__dict__, "module": bare}
    return made


def pipeline(model):
    pipe = FluxPipeline(
        **{"transformer": model.module, "vae": model.latents.vae},
        **{"text_encoder": model.text.clip, "tokenizer": model.text.clip_tokenizer},
        **{"text_encoder_2": model.text.t5, "tokenizer_2": model.text.t5_tokenizer},
        scheduler=FlowMatchEulerDiscreteScheduler(**tiny_models.FLUX_SCHEDULER),
        feature_extractor=CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_diffusers_pipeline_loads_the_adapter_and_generates_the_same_image(encoders, tmp_path):
    made = flux()
    told = ReferenceModel(made, encoder(encoders)).encode(tasks()[:1])
    ip_adapter.write(made.module, tmp_path)
    theirs = without_adapter(made, Flux)
    pipe, clip = pipeline(theirs), str(encoders / "clip")
    named = {"weight_name": ip_adapter.FILE, "image_encoder_pretrained_model_name_or_path": clip, "local_files_only": True}
    pipe.load_ip_adapter(str(tmp_path), **named, image_encoder_dtype=torch.float32)
    assert torch.equal(velocity(made, told), velocity(theirs, told))
    call = {"height": 24, "width": 40, "num_inference_steps": 3, "max_sequence_length": 20, "guidance_scale": 3.5}
    call |= {"ip_adapter_image": tasks()[0].reference, "generator": tiny_models.generators(1)}
    (drawn,) = pipe("a red circle", **call).images
    latents = tiny_models.euler(ReferenceModel(made, encoder(encoders)), told, tiny_models.generators(1), num_steps=3)
    assert made.decode(latents, told)[0].tobytes() == drawn.tobytes()


def test_adapter_with_16_tokens_is_loadable_by_diffusers_at_full_width(encoders, tmp_path):
    torch.manual_seed(0)
    sizes = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 32, "num_attention_heads": 2}
    kind = type(tiny_models.flux_transformer())
    transformer = kind(**sizes, joint_attention_dim=4096, axes_dims_rope=(8, 12, 12))
    sixteen = IpAdapter(encoder="playground", tokens=16, projection="linear", blocks="double")
    assert ip_adapter.loadable_by_diffusers(transformer, sixteen)
    assert not ip_adapter.loadable_by_diffusers(tiny_models.flux_transformer(), sixteen)
    ip_adapter.attach(transformer, sixteen, embed_width=12, seed=0)
    move(transformer)
    state = load_file(ip_adapter.write(transformer, tmp_path))
    projection = {name.removeprefix("image_proj."): each for name, each in state.items() if name.startswith("image_proj.")}
    theirs = transformer._convert_ip_adapter_image_proj_to_diffusers(projection)
    assert isinstance(theirs, ImageProjection)
    embeds = torch.randn(2, 12)
    assert torch.equal(theirs(embeds), transformer.encoder_hid_proj([embeds[:, None]])[0][:, 0])


def test_reference_attention_of_a_block_matches_its_formula(encoders):
    """softmax(q k / sqrt(d)) v over the reference's tokens, with q before rotation and k normed, times scale, before to_out."""
    form = LARGE.model_copy(update={"scale": 0.7})
    transformer = flux(form=form).module
    torch.manual_seed(1)
    picture, words, reference = torch.randn(2, 5, 64), torch.randn(2, 3, 64), torch.randn(2, 1, 6, 48)
    angles = torch.randn(8, 32)
    rotation = angles.cos(), angles.sin()
    for block in (transformer.transformer_blocks[0], transformer.single_transformer_blocks[1]):
        double = block is transformer.transformer_blocks[0]
        given = (picture, words) if double else (torch.cat([words, picture], dim=1),)
        attn, own = block.attn, block.attn.processor
        query = attn.norm_q((given[0] @ attn.to_q.weight.T + attn.to_q.bias).view(2, -1, 2, 32))
        key, value = ((reference[:, 0] @ layer.weight.T).view(2, 6, 2, 32) for layer in (own.to_k_ip, own.to_v_ip))
        key = key / (key.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        weights = (torch.einsum("rshd,rnhd->rhsn", query, key) / 32**0.5).softmax(-1)
        found = 0.7 * torch.einsum("rhsn,rnhd->rshd", weights, value).flatten(2)
        base = own.base(attn, *given, image_rotary_emb=rotation)
        ours = own(attn, *given, image_rotary_emb=rotation, ip_hidden_states=[reference])
        if double:
            torch.testing.assert_close(ours[0], base[0] + found @ attn.to_out[0].weight.T, atol=2e-6, rtol=1e-5)
            assert torch.equal(ours[1], base[1])
        else:
            torch.testing.assert_close(ours, base + found, atol=2e-6, rtol=1e-5)


def test_adapter_file_numbers_double_blocks_before_single_blocks(tmp_path):
    transformer = flux(form=LARGE).module
    state = load_file(ip_adapter.write(transformer, tmp_path))
    blocks = [*transformer.transformer_blocks, *transformer.single_transformer_blocks]
    for k, block in enumerate(blocks):
        for name in ("to_k_ip", "to_v_ip"):
            assert torch.equal(state[f"ip_adapter.{k}.{name}.weight"], getattr(block.attn.processor, name).weight)
    layers = {"proj.0.weight", "proj.0.bias", "proj.2.weight", "proj.2.bias", "norm.weight", "norm.bias"}
    assert state.keys() == {f"ip_adapter.{k}.{name}.weight" for k in range(3) for name in ("to_k_ip", "to_v_ip")} | {
        f"image_proj.{name}" for name in layers
    }


def test_adapter_file_with_other_tensor_names_is_loaded(encoders, tmp_path):
    made, other = flux(), flux(moved=False)
    state = load_file(ip_adapter.write(made.module, tmp_path))
    theirs = {
        name.replace("image_proj.", "ip_adapter_proj_model.")
        .replace("ip_adapter.0.to_", "double_blocks.0.processor.ip_adapter_double_stream_")
        .replace("_ip.", "_proj."): each
        for name, each in state.items()
    }
    assert "double_blocks.0.processor.ip_adapter_double_stream_k_proj.weight" in theirs
    save_file(theirs, tmp_path / "other.safetensors")
    ip_adapter.read(other.module, tmp_path / "other.safetensors")
    for one, two in zip(ip_adapter.modules(made.module), ip_adapter.modules(other.module), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


def test_unsupported_models_and_invalid_files_raise(tmp_path):
    broken, other = tmp_path / "broken", tmp_path / "other"
    for folder in (broken, other, tmp_path / "dino"):
        folder.mkdir()
    (broken / "ip_adapter.safetensors").write_bytes(b"no")
    ip_adapter.write(flux().module, other)
    (tmp_path / "dino" / "config.json").write_text(json.dumps({"model_type": "dinov2"}))
    mlp = flux(form=SMALL.model_copy(update={"tokens": 4, "projection": "mlp"})).module
    for message, call in (
        ("for Flux and Qwen-Image, not for SD3",
         lambda: ip_adapter.attach(tiny_models.sd3_transformer(), SMALL, embed_width=4, seed=0)),
        ("only double blocks", lambda: qwen(LARGE)),
        ("neither a folder with ip_adapter.safetensors", lambda: ip_adapter.read(flux().module, tmp_path)),
        ("cannot be read", lambda: ip_adapter.read(flux().module, broken)),
        ("other settings than the recipe's; the first difference is image_proj.proj.0.bias", lambda: ip_adapter.read(mlp, other)),
        ("no model .config.json", lambda: embed_width(tmp_path)),
        ("'dinov2'; use one of type clip",
         lambda: ImageEncoder.from_pretrained(tmp_path / "dino", dtype=torch.float32, device="cpu")),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()


def test_initialisation_depends_only_on_the_seed_and_not_on_the_global_generator():
    before = torch.random.get_rng_state()
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    transformer = tiny_models.flux_transformer()
    torch.random.set_rng_state(state)
    ip_adapter.attach(transformer, LARGE, embed_width=12, seed=3)
    assert torch.equal(torch.random.get_rng_state(), state)
    other = flux(form=LARGE, moved=False).module
    for one, two in zip(ip_adapter.modules(transformer), ip_adapter.modules(other), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    torch.random.set_rng_state(before)


def test_bfloat16_base_keeps_fp32_adapter_weights_and_close_velocities(encoders):
    exact, rounded = flux(form=QFORMER), flux(form=QFORMER, dtype=torch.bfloat16)
    assert {part.dtype for part in rounded.module.parameters() if part.requires_grad} == {torch.float32}
    assert next(rounded.module.parameters()).dtype == torch.bfloat16
    task = Task(id="a", instruction="blue", reference=tiny_models.image(1))
    told = ReferenceModel(exact, encoder(encoders)).encode([task])
    gap = (velocity(exact, told) - velocity(rounded, told)).norm() / velocity(exact, told).norm()
    assert 0 < gap < 0.1
    rounded.module.enable_gradient_checkpointing()
    rounded.module.train()
    velocity(rounded, told, grad=True).square().mean().backward()
    gradient = ip_adapter.modules(rounded.module)[1].to_v_ip
    assert all(each.grad.isfinite().all() for each in gradient.parameters())
