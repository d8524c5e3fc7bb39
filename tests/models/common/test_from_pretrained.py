"""Loading the folders that diffusers' pipelines save."""

from dataclasses import replace

import pytest
import torch
from PIL import Image

import tiny_models
import tiny_pipelines
from retouch.models.flux.model import Flux, FluxFill, FluxKontext
from retouch.models.qwen_image import model as qwen_text
from retouch.models.qwen_image.model import QwenImage, QwenImageEdit, QwenImageEditPlus
from retouch.models.sd3.model import SD3
from retouch.models.z_image.model import ZImage


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    tiny_pipelines.qwen_image().save_pretrained(folder)
    tiny_models.qwen_image_processor().save_pretrained(folder / "processor")
    return folder


@pytest.mark.parametrize("cls", [QwenImage, QwenImageEdit, QwenImageEditPlus])
def test_qwen_image_models_load_from_a_pipeline_folder(qwen_folder, monkeypatch, cls):
    monkeypatch.setattr(qwen_text, "OFFICIAL_PREFIX", {})  # the folder's tokenizer knows bytes only
    model = cls.from_pretrained(qwen_folder, dtype=torch.bfloat16, device="cpu", size=(32, 48))
    assert model.module.dtype == model.latents.vae.dtype == model.text.encoder.dtype == torch.bfloat16
    assert not any(weight.requires_grad for part in (model.latents.vae, model.text.encoder) for weight in part.parameters())
    assert all(weight.requires_grad for weight in model.module.parameters())
    assert model.scheduler.config["shift_terminal"] == 0.02
    if cls is not QwenImage:
        assert model.text.image_processor.merge_size == 2
        assert model.text.image_processor.patch_size == 8
        model.condition_area = model.source_area = 32 * 32
    conditioning = model.encode([tiny_models.task("a", "red", tiny_models.image(0))])
    x = model.initial_noise(conditioning, tiny_models.generators(1))
    assert (x.shape, x.dtype) == ((1, 24, 64), torch.float32)
    velocity = model.velocity(model.module, x, torch.tensor([0.5]), conditioning)
    assert (velocity.shape, velocity.dtype) == (x.shape, torch.float32)
    assert model.decode(x, conditioning)[0].size == (48, 32)
    assert model.encode_images([tiny_models.image(1)]).dtype == torch.float32


@pytest.mark.parametrize("t5", [True, False])
def test_sd3_loads_from_a_pipeline_folder(tmp_path, t5):
    tiny_pipelines.sd3().save_pretrained(tmp_path)
    model = SD3.from_pretrained(tmp_path, dtype=torch.bfloat16, device="cpu", t5=t5)
    assert (model.text.t5 is not None) == t5
    assert not any(weight.requires_grad for part in (model.latents.vae, *model.text.encoders) for weight in part.parameters())
    conditioning = model.encode([tiny_models.task("a", "red")])
    x = model.initial_noise(conditioning, tiny_models.generators(1))
    assert model.velocity(model.module, x, torch.tensor([0.5]), conditioning).dtype == torch.float32
    assert model.decode(x, conditioning)[0].size == (32, 32)
    assert model.sigmas(3, conditioning).tolist()[0] == 1


@pytest.mark.parametrize("cls", [Flux, FluxFill, FluxKontext])
def test_flux_models_load_from_a_pipeline_folder(tmp_path, cls):
    folder = tiny_models.save_flux(tmp_path, fills=cls is FluxFill)
    model = cls.from_pretrained(folder, dtype=torch.bfloat16, device="cpu", size=(24, 40), guidance=2.5)
    model.text.max_sequence_length = 20
    if cls is FluxKontext:
        model.source_as_is = True
    assert model.module.dtype == model.latents.vae.dtype == model.text.t5.dtype == model.text.clip.dtype == torch.bfloat16
    assert not any(weight.requires_grad for part in (model.latents.vae, *model.text.encoders) for weight in part.parameters())
    assert (model.guidance, model.scheduler.config["max_image_seq_len"]) == (2.5, 8192)
    task = tiny_models.task("a", "red", tiny_models.image(0, 24, 40))
    conditioning = model.encode([replace(task, mask=Image.new("L", (40, 24), 255))])
    x = model.initial_noise(conditioning, tiny_models.generators(1))
    assert (x.shape, x.dtype) == ((1, 3 * 5, 64), torch.float32)
    velocity = model.velocity(model.module, x, torch.tensor([0.5]), conditioning)
    assert (velocity.shape, velocity.dtype) == (x.shape, torch.float32)
    assert model.decode(x, conditioning)[0].size == (40, 24)


@pytest.mark.parametrize("head", [True, False])
def test_z_image_loads_from_a_pipeline_folder(tmp_path, head):
    folder = tiny_models.save_z_image(tmp_path, head=head)
    model = ZImage.from_pretrained(folder, dtype=torch.bfloat16, device="cpu", size=(24, 40))
    assert model.module.dtype == model.latents.vae.dtype == model.text.encoder.dtype == torch.bfloat16
    assert not any(weight.requires_grad for part in (model.latents.vae, model.text.encoder) for weight in part.parameters())
    assert all(weight.requires_grad for weight in model.module.parameters())
    assert model.scheduler.config["shift"] == 3.0
    saved = tiny_models.qwen3(tiny_models.chat_tokenizer()).model.bfloat16()
    assert all(torch.equal(weight, saved.get_parameter(name)) for name, weight in model.text.encoder.named_parameters())
    conditioning = model.encode([tiny_models.task("a", "red")])
    x = model.initial_noise(conditioning, tiny_models.generators(1))
    assert (x.shape, x.dtype) == ((1, 3 * 5, 64), torch.float32)
    velocity = model.velocity(model.module, x, torch.tensor([0.5]), conditioning)
    assert (velocity.shape, velocity.dtype) == (x.shape, torch.float32)
    assert model.decode(x, conditioning)[0].size == (40, 24)


def test_incompatible_flux_config_raises_before_weights_are_read(tmp_path):
    folder = tiny_models.save_flux(tmp_path, distilled=False)
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(ValueError, match="FluxFill gives its transformer 192 channels per token, but this transformer takes 64"):
        FluxFill.from_pretrained(folder, dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match="takes no guidance"):
        Flux.from_pretrained(folder, dtype=torch.float32, device="cpu", guidance=3.5)


@pytest.mark.parametrize("cls", [QwenImage, QwenImageEdit, SD3, ZImage, FluxFill])
def test_folder_without_model_index_raises(tmp_path, cls):
    with pytest.raises(ValueError, match=r"no model_index\.json"):
        cls.from_pretrained(tmp_path, dtype=torch.float32, device="cpu")
