"""What all families of image models do: they sample as diffusers' pipelines do, load their folders, pass the contract checks, train
an adapter that diffusers loads, and refuse wrong inputs; and what is peculiar to a family without a file of its own."""

import json
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, get_args

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.flux import pipeline_flux_fill
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as edit_module
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus_module
from PIL import Image

import retouch
import tiny_flux2
import tiny_flux_runs
import tiny_models
import tiny_pipelines
import tiny_policies
import tiny_qwen_image_2
from changed_recipes import differing_paths
from families import CPU, FAMILIES, ours
from family_runs import check_gradient_checkpointing, small_recipe, write_edits
from retouch.config.errors import kinds_of
from retouch.inference.exporting import export_target
from retouch.inference.opening import open_recipe, read_target
from retouch.inference.sampling import sample_target
from retouch.models.base import DiffusersModel, ImageModel, ImportedModel, TaskInputs
from retouch.models.kinds import IMAGE_MODELS
from retouch.models.pipeline import Guided, pack, unpack
from retouch.policies.denoising import DenoisingPolicy
from retouch.policies.weights import WeightCopies
from retouch.protocols import DecodesTensors, DenoisingModel
from retouch.recipe.policy import DenoisingPolicyKeys
from retouch.recipe.recipe import load, parse
from retouch.records.folder import RunFolder
from retouch.renderers.prompts import accepts_prompt
from retouch.run.session import run
from retouch.types import Conditioning
from retouch_models.flux import FluxFillModel, FluxModel
from retouch_models.flux.model import FluxKontext, FluxText
from retouch_models.flux2.model import Flux2Klein, Flux2Text
from retouch_models.qwen_image import model as qwen_model
from retouch_models.sd3 import SD3Model
from retouch_models.sd3.model import SD3
from retouch_models.z_image.model import ZImageText
from retouch_worlds.models.family import PlaygroundModel
from slow_params import slow_after


@pytest.fixture(scope="module", autouse=True)
def _prefix_of_bytes():
    """The tiny tokenizer of Qwen-Image knows bytes only, so its official templates have longer prefixes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qwen_model, "OFFICIAL_PREFIX", {})
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of each family, which is written when it is first needed."""
    made = {}

    def folder(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            FAMILIES[name].save(made[name])
        return made[name]

    return folder


@pytest.fixture(scope="module")
def models(folders):
    made = {}
    return lambda name: made.setdefault(name, FAMILIES[name].build(folders(name)) if name not in made else None)


every_family = pytest.mark.parametrize("name", FAMILIES)

# Sampling equals that of diffusers

IMAGES = ((72, 80), (64, 100))
SAMPLED = [
    *[("sd3", 1.0, 0, 2e-6), ("sd3", 4.5, 0, 2e-6), ("flux", 1.0, 0, 2e-6), ("flux", 3.0, 0, 5e-6)],
    *[("flux-fill", 1.0, 1, 2e-6), ("flux-kontext", 1.0, 1, 2e-6), ("qwen-image", 1.0, 0, 2e-6), ("qwen-image", 4.0, 0, 2e-6)],
    # The pipeline encodes a reference image once and repeats its latents; encoding it in a batch rounds differently.
    *[("flux2", 1.0, 0, 0.0), ("flux2", 4.0, 1, 1e-5), ("flux2", 1.0, 2, 1e-5)],
    *[("qwen-image-edit", 1.0, 1, 2e-6), ("qwen-image-edit", 4.0, 1, 2e-6)],
    *[("qwen-image-edit-plus", 1.0, 2, 2e-6), ("qwen-image-edit-plus", 4.0, 2, 2e-6)],
    *[("qwen-image-2", 1.0, 0, 0.0), ("qwen-image-2", 4.0, 1, 0.0), ("qwen-image-2", 1.0, 2, 0.0)],
    *[("z-image", 1.0, 0, 5e-6), ("z-image", 4.0, 0, 5e-6)],
]


@pytest.fixture
def small_areas(monkeypatch):
    """Pipelines of Qwen-Image-Edit resize images to 64 x 64 px or 32 x 32 px, and Fill takes the mode of the masked image's latents
    in place of a sample, so that equal tasks give equal inputs."""
    real = edit_module.calculate_dimensions
    monkeypatch.setattr(edit_module, "calculate_dimensions", lambda area, ratio: real(64 * 64, ratio))
    monkeypatch.setattr(plus_module, "CONDITION_IMAGE_SIZE", 32 * 32)
    monkeypatch.setattr(plus_module, "VAE_IMAGE_SIZE", 64 * 64)
    monkeypatch.setattr(pipeline_flux_fill, "retrieve_latents", lambda encoded, generator=None: encoded.latent_dist.mode())


@pytest.mark.usefixtures("small_areas")
@pytest.mark.parametrize(("name", "scale", "sources", "atol"), SAMPLED)
def test_sampled_latents_match_the_pipeline(folders, models, name, scale, sources, atol):
    family, model = FAMILIES[name], models(name)
    sizes = IMAGES if family.size == (64, 96) else ((24, 40), (40, 24))
    tasks = family.tasks(sources=sources, sizes=sizes)
    if name == "qwen-image-2" or name.startswith("qwen-image-edit"):
        tasks = tasks[1:]  # in a batch of the pipeline, padding moves image positions
    assert len({len(task.instruction) for task in tasks}) == len(tasks)
    theirs = family.theirs(family.pipeline(folders(name)), tasks, scale)
    found = ours(model, tasks, scale)
    if name == "flux2":
        found = unpack(model.latents.denormalise(found), height=8, width=12)
    torch.testing.assert_close(found, pack(theirs) if name == "z-image" else theirs, atol=atol, rtol=2e-6 if name == "sd3" else 0)


def test_latents_of_undistilled_flux_match_the_pipeline(tmp_path):
    family = replace(FAMILIES["flux"], save=partial(tiny_models.save_flux, distilled=False), options={})
    family.save(tmp_path)
    torch.testing.assert_close(
        ours(family.build(tmp_path), family.tasks()), family.theirs(family.pipeline(tmp_path), family.tasks()), atol=2e-6, rtol=0
    )


@pytest.mark.parametrize("name", ["flux2", "qwen-image-2"])
@pytest.mark.parametrize("sources", [0, 2])
def test_the_default_output_size_is_that_of_the_pipeline(folders, name, sources):
    """FLUX.2: that of the first source. Qwen-Image-2.1: that of the last, fitted to an area."""
    family = FAMILIES[name]
    model, pipe = family.build(folders(name), size=None), family.pipeline(folders(name))
    tasks = family.tasks("blue", sources=sources, sizes=((72, 80), (40, 120) if name == "qwen-image-2" else (64, 100)))
    size = model.encode(tasks).shared["size"]
    assert size == {"flux2": ((512, 512), (72, 80)), "qwen-image-2": ((1024, 1024), (32, 96))}[name][bool(sources)]
    if sources:
        theirs = family.theirs(pipe, tasks, height=None, width=None)
        assert ours(model, tasks).numel() == theirs.numel()


# Folders and contract checks


@every_family
def test_a_saved_pipeline_is_loaded_in_the_dtype_with_all_parts_but_the_transformer_frozen(folders, name):
    family = FAMILIES[name]
    model = family.build(folders(name), "bfloat16")
    assert {part.dtype for part in model.parts} == {torch.bfloat16}
    assert not any(weight.requires_grad for part in model.parts[1:] for weight in part.parameters())
    assert all(weight.requires_grad for weight in model.module.parameters())
    conditioning = model.encode(family.tasks())
    x = model.initial_noise(conditioning, tiny_models.generators(2))
    velocity = model.velocity(model.module, x, torch.tensor([0.5, 0.5]), conditioning)
    assert (velocity.shape, velocity.dtype, x.dtype) == (x.shape, torch.float32, torch.float32)
    assert model.encode_images([tiny_models.image(1)]).dtype == torch.float32
    assert model.decode(x, conditioning)[0].size == family.size[::-1]
    with pytest.raises(ValueError, match=r"no model_index\.json"):
        family.section(path=str(folders(name) / "vae")).build(device=CPU)


@pytest.mark.parametrize(
    ("name", "sources"), [*((name, family.sources) for name, family in FAMILIES.items()), ("flux2", 2), ("qwen-image-2", 2)]
)
def test_a_model_passes_the_contract_checks(models, name, sources):
    model = models(name)
    assert isinstance(model, DenoisingModel)
    retouch.testing.check_model(model, FAMILIES[name].tasks(sources=sources))


@pytest.mark.parametrize(("name", "trained"), [("flux2", "single_transformer"), ("qwen-image-2", "txt_in"), ("z-image", "context")])
def test_gradient_checkpointing_gives_the_same_gradients(folders, name, trained):
    model = FAMILIES[name].build(folders(name))
    check_gradient_checkpointing(model, model.encode(FAMILIES[name].tasks()), trained=trained)


@every_family
def test_an_image_round_trip_matches_the_autoencoder(models, name):
    """Qwen-Image-2.1's images are RGBA; transparent pixels become white."""
    model, (height, width) = models(name), FAMILIES[name].size
    pictures = [tiny_models.image(k, height, width) for k in range(2)]
    x, conditioning = model.encode_images(pictures), model.encode(FAMILIES[name].tasks())
    mine = model.decode(x, conditioning)
    processor = VaeImageProcessor(vae_scale_factor=8)
    transparent = name == "qwen-image-2"
    pixels = processor.preprocess([picture.convert("RGBA") for picture in pictures] if transparent else pictures)
    with torch.no_grad():
        frames = name.startswith("qwen")
        decoded = model.latents.vae(pixels.unsqueeze(2)).sample[:, :, 0] if frames else model.latents.vae(pixels).sample
        found = model.decode_tensors(x, conditioning)
    for image, theirs, tensor in zip(mine, processor.postprocess(decoded), found, strict=True):
        if transparent:
            assert theirs.mode == "RGBA"
            theirs = Image.alpha_composite(Image.new("RGBA", theirs.size, "white"), theirs).convert("RGB")
        assert (image.mode, image.size) == ("RGB", (width, height))
        levels = [np.asarray(each).astype(int) for each in (image, theirs)]
        assert abs(levels[0] - levels[1]).max() <= 1  # one level, where a value is at the boundary of two levels
        assert abs(tensor.movedim(0, -1).numpy() * 255 - levels[0]).max() <= 0.5 + 1e-3


DECODING = {**tiny_policies.MODELS, "playground": lambda: PlaygroundModel().build(device=CPU)}


@pytest.mark.parametrize("family", DECODING)
def test_decode_tensors_has_gradients_for_latents_but_not_for_the_autoencoder(family):
    """``policy.gradient_checkpointing`` recomputes the decoder's activations too, if the autoencoder can."""
    found = []
    for on in (False, True) if family == "sd3" else (False,):
        model, kept = DECODING[family](), []
        if on:
            model.module.enable_gradient_checkpointing()
        assert isinstance(model, DecodesTensors)
        conditioning = model.encode(tiny_policies.tasks(2))
        x = (0.5 * model.initial_noise(conditioning, tiny_models.generators(2))).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor, kept=kept: kept.append(tensor.nbytes) or tensor, lambda t: t):
            images = Guided(model, 2.0).decode_tensors(x, conditioning)
        images.square().mean().backward()
        assert x.grad.abs().sum() > 0
        assert all(parameter.grad is None for parameter in model.latents.vae.parameters())
        found.append((x.grad, sum(kept)))
        if on:
            model.latents.vae.disable_gradient_checkpointing()
    if family == "sd3":
        torch.testing.assert_close(found[1][0], found[0][0])
        assert found[1][1] < found[0][1]


def test_both_branches_of_guidance_have_gradient():
    policy = tiny_policies.policy("sd3", guidance=3.0, train="full")
    tasks = tiny_policies.tasks()
    x, sigma = policy.model.initial_noise(policy.model.encode(tasks), tiny_models.generators(2)), torch.full((2,), 0.5)
    weight = policy.module.proj_out.bias
    (whole,) = torch.autograd.grad(policy.model.velocity(policy.module, x, sigma, policy.model.encode(tasks)).sum(), weight)
    inner = policy.model.model
    (positive,) = torch.autograd.grad(inner.velocity(policy.module, x, sigma, inner.encode(tasks)).sum(), weight)
    # The output bias has the same gradient in both branches: 3 times that of the positive minus 2 times that of the negative.
    torch.testing.assert_close(whole, positive, rtol=1e-4, atol=1e-5)
    assert whole.abs().min() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_branches_of_unequal_length_run_without_a_mask_in_bfloat16(dtype):
    """With a mask, attention in 16 bits cannot use the flash kernel. Rows of one task have texts of the same length."""
    model = tiny_policies.edit_model()
    model.module.to(dtype)
    masks = []
    model.module.register_forward_pre_hook(
        lambda module, args, kwargs: masks.append(kwargs["encoder_hidden_states_mask"] is not None), with_kwargs=True
    )
    guided, rows, sigma = Guided(model, 3.5), torch.tensor([0, 0]), torch.tensor([0.9, 0.4])
    tasks = tiny_policies.tasks(4)[3:]
    conditioning = guided.encode(tasks).take(rows)
    assert conditioning.tensors["embeds"].shape[1] != conditioning.negative.tensors["embeds"].shape[1]
    x = guided.initial_noise(conditioning, tiny_models.generators(2))
    found = guided.velocity(guided.module, x, sigma, conditioning)
    assert masks == ([True] if dtype == torch.float32 else [False, False])
    branches = [
        model.velocity(model.module, x, sigma, encode(tasks).take(rows)) for encode in (model.encode, model.encode_negative)
    ]
    torch.testing.assert_close(found, model.combine(*branches, 3.5), atol=1e-5, rtol=1e-4)


# Wrong inputs

SPECIAL = r"'red<\|im_end\|>' contains the special token <\|im_end\|>; remove it"
LONG = "abc " * 300
PROMPTS = {
    "sd3": (LONG, r"tokens, but the text encoders read \[77, 77, 256\]; shorten it"),
    "flux": (LONG, "tokens, but T5 reads at most 20; shorten it"),
    "flux2": (LONG, r"tokens in its template, but FLUX\.2-klein reads at most 96; shorten it"),
    "qwen-image": (LONG, "tokens; at most 512"),
    "qwen-image-edit": ("x" * 4096, "rotary positions, and the transformer has 4096; shorten the instruction or reduce the images"),
    "qwen-image-2": (LONG, r"tokens in its template, but Qwen-Image-2\.1 reads at most 512; shorten it"),
    "z-image": (LONG, "tokens in its template, but Z-Image reads at most 512; shorten it"),
}
SIZES = [
    *[("sd3", 24, 25, "multiples of 8 px, up to 96"), ("sd3", 104, 24, "multiples of 8 px, up to 96")],
    ("flux", 20, 40, r"does not divide into tokens of 8 px; set policy\.model\.size"),
    *[("flux2", 20, 40, "does not divide into tokens of 8 px"), ("qwen-image", 24, 30, "does not divide into tokens of 8 px")],
    ("qwen-image-2", 48, 96, r"48 x 96 px .* multiples of 32 px"),
    *[("z-image", 20, 40, "does not divide into tokens of 8 px"), ("z-image", 24, 136, "at most 128 x 128 px")],
]
UNEVEN = r"source images in one batch: task 'a' has 1, task 'b' has 0; give all"
APART = r"task 'a' has 24 x 24, task 'b' has 24 x 32 .*; set policy\.model\.size"
RED, BLUE, PICTURE = tiny_models.task("a", "red", tiny_models.image(0)), tiny_models.task("b", "blue"), tiny_models.image(0)
SOURCES = [
    *[("flux2", [RED, BLUE], UNEVEN), ("qwen-image-2", [RED, BLUE], UNEVEN)],
    *[("flux-fill", [RED], "1 images and no mask"), ("flux-kontext", [BLUE], "takes one")],
    *[
        ("qwen-image-edit", [BLUE], "0 source images"),
        ("qwen-image-edit", [replace(RED, images=(PICTURE,) * 2)], "2 source images"),
    ],
    ("qwen-image-edit", [RED, replace(BLUE, images=(tiny_models.image(0, 24, 32),))], APART),
    (
        "flux-fill",
        [
            replace(RED, mask=Image.new("L", (24, 24))),
            replace(BLUE, images=(tiny_models.image(0, 24, 32),), mask=Image.new("L", (32, 24))),
        ],
        r"task 'a' has 24 x 24, task 'b' has 24 x 32 \(height x width\); set policy\.model\.size \(in Python: size=;",
    ),
]


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_that_the_model_cannot_read_raises(models, name):
    (text, message), model = PROMPTS[name], models(name)
    with pytest.raises(ValueError, match=message):
        model.encode(FAMILIES[name].tasks(text))
    if name not in ("sd3", "flux"):
        with pytest.raises(ValueError, match=SPECIAL):
            model.encode(FAMILIES[name].tasks("red<|im_end|>"))
        if FAMILIES[name].sources == 0:
            assert [accepts_prompt(model, each) for each in ("red", text, "red<|im_end|>")] == [True, False, False]


@pytest.mark.parametrize(("name", "height", "width", "message"), SIZES)
def test_a_size_that_the_model_cannot_make_raises(folders, name, height, width, message):
    with pytest.raises(ValueError, match=message):
        FAMILIES[name].build(folders(name), size=(height, width)).encode(FAMILIES[name].tasks())


@pytest.mark.parametrize(("name", "tasks", "message"), SOURCES)
def test_source_images_that_the_model_cannot_read_raise(folders, name, tasks, message):
    model = FAMILIES[name].build(folders(name), size=None)
    model.source_area = "as_is"
    with pytest.raises(ValueError, match=message):
        model.encode(tasks)


def test_incompatible_weights_settings_and_steps_raise(models, tmp_path):
    folder = tiny_models.save_flux(tmp_path, distilled=False)
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes(b"")
    bare, other_clip = tiny_models.chat_tokenizer(), sd3_parts()
    bare.chat_template = "no words at all"
    other_clip["text_encoders"] = (tiny_models.clip(24, 1), *other_clip["text_encoders"][1:])
    no_clip = {**other_clip, "text_encoders": (None, *other_clip["text_encoders"][1:])}
    dev = {"transformer": tiny_flux2.transformer(guidance_embeds=True), "vae": tiny_flux2.vae(), "text": None}
    for message, call in (
        ("FluxFill gives its transformer 192 channels per token, but this transformer takes 64",
         lambda: FluxFillModel(path=str(folder)).load(folder, device=CPU)),
        ("takes no guidance", lambda: FluxModel(path=str(folder), guidance=3.5).load(folder, device=CPU)),
        ("num_steps is 0; it must be at least 1", lambda: models("z-image").sigmas(0, Conditioning({}, shared={"size": (24, 40)}))),
        ("exactly one placeholder", lambda: ZImageText(tiny_models.qwen3(bare).model, bare)),
        *(("guidance needs a scale above 1", partial(Guided, models("sd3"), scale)) for scale in (1.0, 0.0, -2.0)),
        ("at least one", lambda: SD3(**sd3_parts(leave_out=(0, 1, 2)))),
        ("tokenizers", lambda: SD3(**no_clip)),
        ("pooled", lambda: SD3(**other_clip)),
        (r"takes guidance as an input, as FLUX\.2-dev's does", lambda: Flux2Klein(**dev, scheduler_config={})),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()


# Recipes


class Mine(ImageModel):
    """A user's model with fields."""

    width: int = 8


class Halved(DiffusersModel):
    """A user's model family."""

    adapter = "nowhere:Adapter"
    pipeline = "FluxPipeline"
    strength: float


class Plain(DenoisingModel):
    """An adapter that is no section."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.module = torch.nn.Identity()


def policy(**model: Any) -> DenoisingPolicyKeys:
    return DenoisingPolicyKeys.model_validate_json(json.dumps({"kind": "denoising", "model": model, "train": {"kind": "full"}}))


@pytest.mark.parametrize("kind", [kind for kind in IMAGE_MODELS if kind not in ("import", "pipeline")])
def test_each_kind_declares_its_attributes_and_is_parsed_to_its_class_and_serialised_back(kind: str) -> None:
    section = IMAGE_MODELS.load(kind)
    assert section is not None
    assert issubclass(section, DiffusersModel)
    assert kinds_of(section) == ("kind", (kind,)) == ("kind", get_args(section.model_fields["kind"].annotation))
    assert section.lora_targets
    assert section.pipeline in dir(diffusers)
    assert isinstance(section.takes, TaskInputs)
    assert callable(section.adapter_class().from_pretrained)
    if kind.startswith("qwen-image-edit"):
        assert section.takes.images == (1, section.adapter_class().MOST_SOURCES)
    document = {"kind": kind, "path": "some/where", "size": [32, 48], "dtype": "float16"}
    made = policy(**document)
    assert type(made.model) is section
    assert list(made.model_dump(mode="json")["model"].items()) == list(document.items())
    assert made.model == section(path="some/where", size=(32, 48), dtype="float16")


def test_imported_model_section_is_parsed_with_its_own_fields() -> None:
    args = {"path": "a/b", "size": [512, 512], "dtype": "float32", "strength": 0.5}
    document = {"kind": "import", "class": f"{__name__}:Halved", "args": args}
    made = policy(**document)
    assert made.model == Halved(path="a/b", dtype="float32", strength=0.5)
    assert made.model_dump(mode="json")["model"] == document
    assert policy(kind="import", **{"class": f"{__name__}:Mine"}).model == Mine()
    with pytest.raises(ValueError, match="strength"):
        policy(kind="import", **{"class": f"{__name__}:Halved", "args": {"path": "a/b"}})
    assert made.model.published() is None
    made = policy(kind="import", **{"class": f"{__name__}:Plain", "args": {"width": 3}})
    assert isinstance(made.model, ImportedModel)
    built: Any = made.model.build(device=CPU)
    assert built.width == 3
    assert isinstance(policy(kind="import", **{"class": "nowhere:Mine"}).model, ImportedModel)


def test_an_area_smaller_than_the_smallest_size_is_refused() -> None:
    for recipe, key in (("qwen-image-2/flow-grpo", "policy.model.source_area"), ("sd3/prompt-enhancer", "policy.model.area")):
        load(f"recipes/{recipe}.jsonnet", [f"{key}={32 * 32}"])
        with pytest.raises(ValueError, match=rf"{key}: should be greater than or equal to 1024, not 1023"):
            load(f"recipes/{recipe}.jsonnet", [f"{key}={32 * 32 - 1}"])


def tiny_section(name: str, folder: Path | None = None, **changes: Any) -> dict[str, Any]:
    """The section of the tiny model in the folder, or of a published one."""
    family = FAMILIES[name]
    path = "nowhere/published" if folder is None else str(folder)
    return {"kind": family.kind, "path": path, "size": list(family.size), "dtype": "float32", **changes}


@pytest.mark.parametrize("name", ["flux2", "qwen-image-2", "z-image"])
def test_unsupported_model_settings_raise_when_the_recipe_is_parsed(name: str, tmp_path: Path) -> None:
    kind = FAMILIES[name].kind
    own = f"only .*'flux' .* has it, and this is '{kind}'"
    with pytest.raises(ValueError, match=rf"policy\.model\.guidance: unknown key; {own}"):
        parse(small_recipe(tiny_section(name, guidance=3.5), tmp_path))
    made = small_recipe(tiny_section(name), tmp_path)
    made["policy"]["train"] = {"kind": "ip-adapter", "encoder": "playground"}
    with pytest.raises(ValueError, match=f"is for models of Flux and Qwen-Image, not for {kind}"):
        parse(made)


def test_guidance_key_is_optional_and_reaches_the_model(folders, tmp_path: Path) -> None:
    told = small_recipe(tiny_section("flux", folders("flux")), tmp_path)
    assert "guidance" not in parse(told).document()["policy"]["model"]
    told["policy"]["model"]["guidance"] = 12.0
    recipe = parse(told)
    assert recipe.document()["policy"]["model"]["guidance"] == 12.0
    assert parse(recipe.document()) == recipe
    assert recipe.policy.model.build(device=CPU).guidance == 12.0
    assert FAMILIES["flux-fill"].build(folders("flux-fill")).guidance == 30.0


def test_lora_targets_are_all_linear_layers_of_the_blocks_that_can_have_an_adapter(models) -> None:
    apart = {"flux2": [f"single_transformer_blocks.{k}.attn.to_out" for k in range(2)], "qwen-image-2": []}
    for name, left_out in apart.items():
        module, targets = models(name).module, FAMILIES[name].section.lora_targets
        linear = [
            path for path, layer in module.named_modules() if isinstance(layer, torch.nn.Linear) and "transformer_blocks" in path
        ]
        assert linear
        assert [path for path in linear if not path.endswith(targets)] == left_out


RECIPES = {"flux2": "recipes/flux2-klein/ocr-grpo.jsonnet", "qwen-image-2": "recipes/qwen-image-2/flow-grpo.jsonnet"}


@pytest.mark.parametrize("name", RECIPES)
def test_playground_twin_keeps_the_algorithm_settings_of_the_full_recipe(name: str) -> None:
    same = ("objective", "advantage", "optimizer", "minibatches", "epochs", "policy.train", "rollout.transition")
    same += ("rollout.window", "rollout.reduction", "rollout.shared_noise")
    changed = differing_paths(RECIPES[name], RECIPES[name].replace(".jsonnet", "-playground.jsonnet"))
    assert not {path for path in changed if path.startswith(same)}


@pytest.mark.usefixtures("short_inputs")
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_of_a_family_takes_a_step(folders, name: str, tmp_path: Path) -> None:
    small = {"steps": 1, "tasks_per_step": 2, "group_size": 2, "ranks": "null", "out": tmp_path, "device": "cpu", "minibatches": 1}
    small |= {"policy.model.path": folders(name), "policy.model.size": list(FAMILIES[name].size), "policy.model.dtype": "float32"}
    small |= {"data.held_out": 1, "eval.tasks": 1, "trackers": []}
    if name == "flux2":
        prompts = tmp_path / "words.txt"
        prompts.write_text('a sign that says "open"\na door with "push" on it\na shop called "Azir"\n')
        judge = {"kind": "share", "channel": "red", "combine": {"share": 1}}
        small |= {"data.path": prompts, "eval.num_steps": 2, "rollout.num_steps": 3, "reward": json.dumps(judge)}
    else:
        judge = {"kind": "photos", "colour": [200, 60, 40], "combine": {"reward": 1}}  # needs no weights
        small |= {"data.path": write_edits(tmp_path), "eval.num_steps": 6, "rollout.num_steps": 6, "reward": json.dumps(judge)}
        small |= {"eval.batch": 1, "policy.model.source_area": 64**2}
    recipe = load(RECIPES[name], [f"{key}={value}" for key, value in small.items()])
    assert run(recipe, fresh=False) == 0
    assert RunFolder(recipe.folder).read_metrics()[0]["policy/ratio_max_first"] <= 1e-5


@pytest.fixture
def short_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pad inputs to fewer tokens than 512 and keep source images small; tiny models would spend all their time on them."""
    for text, length in ((FluxText, 30), (Flux2Text, 96)):
        monkeypatch.setattr(text, "__init__", partialmethod(text.__init__, max_sequence_length=length))
    monkeypatch.setattr(FluxKontext, "source_as_is", True)


@pytest.mark.usefixtures("short_inputs")
@pytest.mark.parametrize("name", slow_after(2, ["flux-fill", "flux2", "qwen-image-2", "z-image", "flux", "flux-kontext"]))
def test_diffusers_loads_a_trained_adapter_and_computes_equal_velocities(folders, name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    rate = 0.1 if name in RECIPES else 1e-2
    made = small_recipe(tiny_section(name, folders(name)), tmp_path, steps=1, minibatches=2, learning_rate=rate)
    if family.sources:
        data = tiny_flux_runs.make_triplets(tmp_path / "triplets", {3: "red", 11: "blue-ish", 17: "green"})
        made["data"] = {"kind": "triplets", "path": str(data), "held_out": 1, "allow_test_sets": True}
    if not name.startswith("flux-"):
        made["policy"]["gradient_checkpointing"] = True
        made["rollout"]["guidance_scale"] = 2.0
    recipe = parse(made)
    assert run(recipe, fresh=False) == 0
    (line,) = RunFolder(recipe.folder).read_metrics()
    assert line["policy/ratio_max_first"] <= 1e-5 < line["policy/ratio_max"]
    export_target(str(recipe.folder), to=tmp_path / "out")
    parts, step = open_recipe(*read_target(str(recipe.folder)), trained=True)
    parts.judge.close()
    assert step == 1
    model, pipe = parts.model, family.pipeline(folders(name))
    conditioning = model.encode(family.tasks())
    x, sigma = model.initial_noise(conditioning, tiny_models.generators(2)), torch.tensor([0.8, 0.4])
    with torch.no_grad():
        mine, untrained = (model.velocity(module, x, sigma, conditioning) for module in (model.module, pipe.transformer))
        pipe.load_lora_weights(tmp_path / "out")
        theirs = model.velocity(pipe.transformer, x, sigma, conditioning)
    assert torch.equal(mine, theirs)
    assert not torch.equal(theirs, untrained)
    if name == "flux-fill":
        given = {"image": data / "test3_source.png", "mask": data / "test3_mask.png", "seed": 0}
        draw = partial(sample_target, str(recipe.folder), out=tmp_path / "a.png")
        first, other = (draw(instruction=text, **given).image for text in ("blue", "green"))
        assert first.size == family.size[::-1]
        assert first.tobytes() != other.tobytes()
        with pytest.raises(ValueError, match="fills the masked part of an image; give a mask with --mask"):
            draw(instruction="blue", **{**given, "mask": None})


def test_missing_mask_in_a_data_folder_raises_before_the_model_is_loaded(tmp_path: Path) -> None:
    made = small_recipe(tiny_section("flux-fill"), tmp_path)
    made["data"] = {"kind": "folder", "path": str(write_edits(tmp_path))}
    with pytest.raises(
        ValueError, match=r"metadata\.jsonl:1: error: flux-fill takes one image and a mask, and this row has no mask"
    ):
        run(parse(made), fresh=False)


def test_step_distilled_weights_sample_without_guidance_and_raise_with_it(tmp_path: Path) -> None:
    weights = tiny_flux2.save(tmp_path / "distilled", distilled=True)
    made = small_recipe(tiny_section("flux2", weights), tmp_path, steps=1)
    made["rollout"]["guidance_scale"] = 2.0
    with pytest.raises(ValueError, match="step-distilled weights sample without guidance"):
        run(parse(made), fresh=False)
    assert ours(FAMILIES["flux2"].build(weights), FAMILIES["flux2"].tasks("blue")).isfinite().all()


# Stable Diffusion 3


def sd3_parts(*, leave_out=()):
    parts = {
        "transformer": tiny_models.sd3_transformer(),
        "vae": tiny_models.sd3_vae(),
        "text_encoders": (tiny_models.clip(16, 1), tiny_models.clip(24, 2), tiny_models.t5(48, 3)),
        "tokenizers": [tiny_models.clip_tokenizer(), tiny_models.clip_tokenizer(), tiny_models.t5_tokenizer()],
    }
    for name in ("text_encoders", "tokenizers"):
        parts[name] = tuple(None if k in leave_out else each for k, each in enumerate(parts[name]))
    return {**parts, "scheduler_config": {"shift": 3.0, "num_train_timesteps": 1000}, "max_sequence_length": 20}


@pytest.mark.parametrize("left_out", [0, 1])
def test_an_omitted_clip_encoder_gives_zero_embeddings(left_out):
    tasks = FAMILIES["sd3"].tasks()
    full, less = (SD3(**sd3_parts(leave_out=gone)).encode(tasks).tensors for gone in ((), (left_out,)))
    gone = slice(0, 16) if left_out == 0 else slice(16, 40)
    assert full["embeds"][:, :77, gone].abs().max() > 0
    for name in full:
        expected = full[name].clone()
        (expected[:, :77, gone] if name == "embeds" else expected[:, gone]).zero_()
        torch.testing.assert_close(less[name], expected, atol=0, rtol=0)


def test_a_pipeline_without_t5_is_loaded_without_an_option(tmp_path):
    pipe, tasks = tiny_pipelines.sd3(), FAMILIES["sd3"].tasks()
    pipe.register_modules(text_encoder_3=None, tokenizer_3=None)
    pipe.save_pretrained(tmp_path)
    expected = SD3(**sd3_parts(leave_out=(2,)) | {"max_sequence_length": 256}).encode(tasks).tensors
    loaded = SD3Model(path="loaded", dtype="float32", size=(32, 32)).load(pipe, device=CPU)
    for model in (loaded, SD3Model(path=str(tmp_path), dtype="float32", size=(32, 32)).build(device=CPU)):
        for name, tensor in model.encode(tasks).tensors.items():
            torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=0)


def test_embedded_prompts_give_the_text_encoders_gradients_and_encode_does_not():
    model, tasks = SD3(**sd3_parts()), FAMILIES["sd3"].tasks()
    assert not model.encode(tasks).tensors["embeds"].requires_grad
    conditioning = model.conditioning(model.embed_prompts([task.instruction for task in tasks], ()), size=model.size)
    x = model.initial_noise(conditioning, tiny_models.generators(2))
    model.velocity(model.module, x, torch.tensor([0.5, 0.2]), conditioning).square().mean().backward()
    for encoder in model.text.encoders:
        assert any(weight.grad is not None and weight.grad.any() for weight in encoder.parameters())


# FLUX


def test_packed_mask_of_fill_is_bitwise_equal_to_the_pipeline(folders, models):
    family, model = FAMILIES["flux-fill"], models("flux-fill")
    masks = [family.tasks("a", sizes=((24, 40),))[0].mask, Image.new("L", (40, 24), 255)]
    mask = torch.stack([model.latents.mask([each], (24, 40))[0] for each in masks])
    theirs, _ = family.pipeline(folders("flux-fill")).prepare_mask_latents(
        mask, torch.zeros(2, 3, 24, 40), 2, 16, 1, 24, 40, torch.float32, CPU, tiny_models.generators(1)[0]
    )
    assert torch.equal(model.latents.pack_mask(mask), theirs)
    assert set(mask.unique().tolist()) == {0.0, 1.0}


def test_conditioning_of_fill_does_not_depend_on_pixels_under_the_mask(models):
    (task,) = FAMILIES["flux-fill"].tasks("blue", sizes=((24, 40),))
    changed = task.images[0].copy()
    changed.paste((1, 2, 3), (5, 3, 22, 15))
    both = models("flux-fill").encode([task, replace(task, images=(changed,))]).tensors["source"]
    assert torch.equal(both[0], both[1])


def test_kontext_fits_sources_to_a_training_resolution(folders):
    model = FAMILIES["flux-kontext"].build(folders("flux-kontext"))
    model.source_as_is = False
    assert model.fit(tiny_models.image(0, 300, 200)) == (1248, 832)
    assert model.fit(tiny_models.image(0, 64, 64)) == (1024, 1024)


@pytest.mark.parametrize("size", [(64, 96), (512, 640)])  # below and above 4300 tokens, from which num_steps has no influence
@pytest.mark.parametrize("num_steps", [1, 4, 50])
def test_sigmas_of_flux2_match_the_pipeline(folders, models, size, num_steps):
    scheduler = FAMILIES["flux2"].pipeline(folders("flux2")).scheduler
    start = torch.linspace(1, 1 / num_steps, num_steps, dtype=torch.float64).tolist()
    scheduler.set_timesteps(sigmas=start, mu=compute_empirical_mu(size[0] * size[1] // 8**2, num_steps))
    found = models("flux2").sigmas(num_steps, Conditioning({}, shared={"size": size}))
    torch.testing.assert_close(found, scheduler.sigmas, atol=1e-7, rtol=0)


def test_rows_of_flux2_with_different_source_images_are_independent(models):
    model = models("flux2")
    tasks = [tiny_models.task(str(k), "red", tiny_models.image(k, 72, 80)) for k in range(2)]
    together = model.encode(tasks)
    x, sigma = model.initial_noise(together, tiny_models.generators(1)).expand(2, -1, -1), torch.tensor([0.6, 0.6])
    first, second = model.velocity(model.module, x, sigma, together)
    alone = model.velocity(model.module, x[:1], sigma[:1], model.encode(tasks[:1]))
    torch.testing.assert_close(first, alone[0], atol=3e-6, rtol=0)
    assert (first - second).abs().max() > 1e-3


@pytest.mark.parametrize(("height", "width"), [(70, 81), (1100, 1001), (400, 3000)])
def test_reference_images_of_flux2_are_preprocessed_bitwise_as_in_the_pipeline(folders, models, height, width):
    model, image = models("flux2"), tiny_models.image(3, height, width)
    smaller = Flux2ImageProcessor._resize_to_target_area(image) if height * width > 1024 * 1024 else image
    sides = {"height": smaller.height // 8 * 8, "width": smaller.width // 8 * 8}
    theirs = FAMILIES["flux2"].pipeline(folders("flux2")).image_processor.preprocess(smaller, **sides, resize_mode="crop")
    mine = model.latents.reference(image)
    assert torch.equal(model.latents.pixels([mine], (mine.height, mine.width)), theirs)


@pytest.mark.parametrize("size", [(72, 80), (76, 84)])
def test_a_target_like_the_source_has_the_size_of_the_output_of_flux2(folders, size):
    model, image = FAMILIES["flux2"].build(folders("flux2"), size=None), tiny_models.image(0, *size)
    with torch.no_grad():
        x = model.initial_noise(model.encode([tiny_models.task("a", "red", image)]), tiny_models.generators(1))
        assert model.encode_images([image]).shape == x.shape


# Qwen-Image-2.1 and Z-Image


def test_sampled_latents_of_qwen_image_2_match_the_pipeline_with_kv_cache_and_in_batches(folders, models):
    """In the pipeline's own batch only the longest prompt matches: padding moves the image positions of the others."""
    family, model = FAMILIES["qwen-image-2"], models("qwen-image-2")
    pipe, tasks = family.pipeline(folders("qwen-image-2")), family.tasks(sources=2, sizes=IMAGES)
    cached = family.theirs(pipe, tasks[:1], use_kv_cache=True)
    torch.testing.assert_close(ours(model, tasks[:1]), cached, atol=1e-5, rtol=0)
    tasks = family.tasks()
    batch, mine = family.theirs(pipe, tasks), ours(model, tasks)
    draws = tiny_models.generators(2)
    alone = torch.cat([family.theirs(pipe, [task], generator=[draw]) for task, draw in zip(tasks, draws, strict=True)])
    torch.testing.assert_close(mine[0], batch[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(mine, alone, atol=1e-5, rtol=0)
    assert (batch[1] - alone[1]).abs().max() > 1e-3


def test_sample_sigmas_of_the_weights_are_used_if_num_steps_matches(tmp_path):
    given, family = [1.0, 0.8, 0.5], FAMILIES["qwen-image-2"]
    options = {"sample_sigmas": given, "scheduler": {"use_dynamic_shifting": False, "shift": 1.0}}
    model, tasks = family.build(tiny_qwen_image_2.save(tmp_path, **options)), family.tasks("blue")
    conditioning = model.encode(tasks)
    assert model.sigmas(3, conditioning).tolist() == pytest.approx([*given, 0.0])
    assert model.sigmas(4, conditioning).tolist() == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])
    theirs = family.theirs(tiny_qwen_image_2.pipeline(**options), tasks, num_inference_steps=40)
    assert torch.equal(ours(model, tasks, num_steps=3), theirs)


def test_a_target_like_the_source_is_demonstrated_and_one_of_another_shape_raises(folders):
    model = FAMILIES["qwen-image-2"].build(folders("qwen-image-2"), size=None)
    images = [tiny_models.image(0, 72, 80), tiny_models.image(1, 40, 120)]
    copies = WeightCopies(model.module)
    policy = DenoisingPolicy(model, sampling=tiny_policies.sampling(), eval_steps=2, microbatch=2, copies=copies)

    def demonstrate(*sources, target):
        example = [replace(tiny_models.task("a", "blue", *sources), target=target)]
        return policy.demonstrate(tiny_policies.batch(1, 1, tasks=lambda count: example))

    assert demonstrate(*images, target=images[1]).outputs.shape[1] == 32 * 96 // 16**2
    with pytest.raises(ValueError, match=r"the target of task .* \(120 x 40 px\) becomes \(12, 8\)"):
        demonstrate(images[0], target=images[1])
    with pytest.raises(ValueError, match=r"the output of the task is \(4096, 8\); set policy\.model\.size"):
        demonstrate(target=images[1])


def test_latents_of_z_image_with_a_shift_by_size_match_the_pipeline(folders, tmp_path):
    family = FAMILIES["z-image"]
    family.save(tmp_path)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_shift=0.9)
    scheduler.save_pretrained(tmp_path / "scheduler")
    mine, theirs = ours(family.build(tmp_path), family.tasks()), family.theirs(family.pipeline(tmp_path), family.tasks())
    torch.testing.assert_close(mine, pack(theirs), atol=5e-6, rtol=0)


def test_the_embeddings_of_padding_of_z_image_are_zero(models):
    tensors = models("z-image").encode(FAMILIES["z-image"].tasks()).tensors
    assert not tensors["mask"].all()
    assert not tensors["embeds"][~tensors["mask"]].any()


@pytest.mark.parametrize("head", [True, False])
def test_the_text_encoder_of_a_folder_may_have_the_head_of_a_language_model(tmp_path, head):
    model = FAMILIES["z-image"].build(tiny_models.save_z_image(tmp_path, head=head))
    saved = tiny_models.qwen3(tiny_models.chat_tokenizer()).model
    assert all(torch.equal(weight, saved.get_parameter(name)) for name, weight in model.text.encoder.named_parameters())
