"""What all families of image models do: they load their pipeline's folder, pass the contract checks, and refuse wrong inputs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

import retouch
import tiny_flux2
import tiny_models
import tiny_pipelines
import tiny_qwen_image_2
from family_runs import check_gradient_checkpointing
from retouch.models.base import DiffusersModel
from retouch.models.flux import FluxFillModel, FluxKontextModel, FluxModel
from retouch.models.flux2 import Flux2KleinModel
from retouch.models.pipeline import accepts_prompt
from retouch.models.qwen_image import QwenImageEditModel, QwenImageEditPlusModel, QwenImageModel
from retouch.models.qwen_image import model as qwen_model
from retouch.models.qwen_image_2 import QwenImage2Model
from retouch.models.sd3 import SD3Model
from retouch.models.z_image import ZImageModel
from retouch.protocols import DenoisingModel
from retouch.types import Conditioning, Task

TEXTS = ("a red circle", "blue")
CPU = torch.device("cpu")


def save_qwen_image(folder: Path) -> None:
    tiny_pipelines.qwen_image().save_pretrained(folder)
    tiny_models.qwen_image_processor().save_pretrained(folder / "processor")


@dataclass(frozen=True)
class Family:
    """A kind of model, and ``save``, which writes a tiny one. ``sources``: source images of a task."""

    section: type[DiffusersModel]
    save: Callable[[Path], object]
    size: tuple[int, int] = (24, 40)
    sources: int = 0

    def build(self, folder: Path, dtype: str = "float32", **changes: Any) -> Any:
        """The model of the folder, with short texts and small source images, on which tiny models would spend all their time."""
        settings = {"size": self.size, "dtype": dtype, **changes}
        model: Any = self.section(path=str(folder), **settings).build(device=CPU)
        for name, value in {"source_as_is": True, "condition_area": 32 * 32, "source_area": 64 * 64}.items():
            if hasattr(model, name):
                setattr(model, name, value)
        if self.section in (FluxModel, FluxFillModel, FluxKontextModel):
            model.text.max_sequence_length = 20
        if self.section is Flux2KleinModel:
            model.text.max_sequence_length = 96
        return model

    def tasks(self, *texts: str) -> list[Task]:
        sources = tuple(tiny_models.image(k, 32, 32) for k in range(self.sources))
        mask = Image.new("L", (32, 32), 255) if self.section is FluxFillModel else None
        return [Task(id=text, instruction=text, images=sources, mask=mask) for text in texts or TEXTS]


FAMILIES = {
    "sd3": Family(SD3Model, lambda folder: tiny_pipelines.sd3().save_pretrained(folder)),
    "flux": Family(FluxModel, tiny_models.save_flux),
    "flux-fill": Family(FluxFillModel, partial(tiny_models.save_flux, fills=True), sources=1),
    "flux-kontext": Family(FluxKontextModel, tiny_models.save_flux, sources=1),
    "flux2": Family(Flux2KleinModel, tiny_flux2.save, size=(64, 96)),
    "qwen-image": Family(QwenImageModel, save_qwen_image),
    "qwen-image-edit": Family(QwenImageEditModel, save_qwen_image, sources=1),
    "qwen-image-edit-plus": Family(QwenImageEditPlusModel, save_qwen_image, sources=2),
    "qwen-image-2": Family(QwenImage2Model, tiny_qwen_image_2.save, size=(64, 96)),
    "z-image": Family(ZImageModel, tiny_models.save_z_image),
}


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


@pytest.mark.parametrize(
    ("name", "sources"), [*((name, family.sources) for name, family in FAMILIES.items()), ("flux2", 2), ("qwen-image-2", 2)]
)
def test_a_model_passes_the_contract_checks(models, name, sources):
    model = models(name)
    assert isinstance(model, DenoisingModel)
    retouch.testing.check_model(model, replace(FAMILIES[name], sources=sources).tasks())


@pytest.mark.parametrize(("name", "trained"), [("flux2", "single_transformer"), ("qwen-image-2", "txt_in"), ("z-image", "context")])
def test_gradient_checkpointing_gives_the_same_gradients(folders, name, trained):
    model = FAMILIES[name].build(folders(name))
    check_gradient_checkpointing(model, model.encode(FAMILIES[name].tasks()), trained=trained)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "qwen-image-2"])  # its images are RGBA
def test_an_image_round_trip_matches_the_autoencoder(models, name):
    model, (height, width) = models(name), FAMILIES[name].size
    pictures = [tiny_models.image(k, height, width) for k in range(2)]
    ours = model.decode(model.encode_images(pictures), model.encode(FAMILIES[name].tasks()))
    processor = VaeImageProcessor(vae_scale_factor=8)
    pixels = processor.preprocess(pictures)
    with torch.no_grad():
        frames = name.startswith("qwen")
        decoded = model.latents.vae(pixels.unsqueeze(2)).sample[:, :, 0] if frames else model.latents.vae(pixels).sample
    for mine, theirs in zip(ours, processor.postprocess(decoded), strict=True):
        difference = torch.tensor(list(mine.tobytes())).int() - torch.tensor(list(theirs.tobytes())).int()
        assert mine.size == (width, height)
        assert difference.abs().max() <= 1  # one level, where a value is at the boundary of two levels


@every_family
def test_lora_targets_are_linear_layers_of_the_transformer(models, name):
    linear = [path for path, layer in models(name).module.named_modules() if isinstance(layer, torch.nn.Linear)]
    for target in FAMILIES[name].section.lora_targets:
        assert any(path.endswith(f".{target}") for path in linear), target


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
SIZES = {
    "sd3": [(24, 25, "multiples of 8 px, up to 96"), (104, 24, "multiples of 8 px, up to 96")],
    "flux": [(20, 40, r"does not divide into tokens of 8 px; set policy\.model\.size")],
    "flux2": [(20, 40, "does not divide into tokens of 8 px")],
    "qwen-image": [(24, 30, "does not divide into tokens of 8 px")],
    "qwen-image-2": [(48, 96, r"48 x 96 px .* multiples of 32 px")],
    "z-image": [(20, 40, "does not divide into tokens of 8 px"), (24, 136, "at most 128 x 128 px")],
}


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


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in SIZES.items() for case in cases])
def test_a_size_that_the_model_cannot_make_raises(folders, name, case):
    height, width, message = case
    with pytest.raises(ValueError, match=message):
        FAMILIES[name].build(folders(name), size=(height, width)).encode(FAMILIES[name].tasks())


@pytest.mark.parametrize("name", ["flux2", "qwen-image-2"])
def test_different_numbers_of_source_images_in_one_batch_raise(models, name):
    with pytest.raises(ValueError, match=r"source images in one batch: task 'a' has 1, task 'b' has 0; give all"):
        models(name).encode([tiny_models.task("a", "red", tiny_models.image(0)), tiny_models.task("b", "blue")])


def test_a_schedule_without_steps_raises(models):
    with pytest.raises(ValueError, match="num_steps is 0; it must be at least 1"):
        models("z-image").sigmas(0, Conditioning({}, shared={"size": (24, 40)}))


@pytest.mark.parametrize("head", [True, False])
def test_the_text_encoder_of_a_folder_may_have_the_head_of_a_language_model(tmp_path, head):
    model = FAMILIES["z-image"].build(tiny_models.save_z_image(tmp_path, head=head))
    saved = tiny_models.qwen3(tiny_models.chat_tokenizer()).model
    assert all(torch.equal(weight, saved.get_parameter(name)) for name, weight in model.text.encoder.named_parameters())


def test_incompatible_flux_weights_raise_before_they_are_read(tmp_path):
    folder = tiny_models.save_flux(tmp_path, distilled=False)
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="FluxFill gives its transformer 192 channels per token, but this transformer takes 64"):
        FluxFillModel(path=str(folder)).load(folder, device=CPU)
    with pytest.raises(ValueError, match="takes no guidance"):
        FluxModel(path=str(folder), guidance=3.5).load(folder, device=CPU)


@every_family
def test_a_folder_without_a_model_index_raises(tmp_path, name):
    with pytest.raises(ValueError, match=r"no model_index\.json"):
        FAMILIES[name].section(path=str(tmp_path)).build(device=CPU)
