"""Missing and damaged files of a model are reported before anything is loaded; sizes of the published models."""

import json
import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest
from huggingface_hub import constants

import family_runs
import tiny_models
import tiny_writer_runs
from retouch import cli
from retouch.models.base import packaged_config
from retouch.models.pretrained import MODEL, TOKENIZER, IncompleteWeights, fetch_weights, find_weights
from retouch.recipe.recipe import parse
from retouch.run.session import run
from retouch_models.flux2 import Flux2KleinModel
from retouch_models.language import QwenLanguageModel
from retouch_models.qwen_image_2 import QwenImage2Model
from retouch_plan.models import parameter_count, stored_count

# ``complete``

TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"


def cut(name: str, size: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:size])

    return damage


def written(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def shards(folder: Path) -> None:
    """The index names two shards; only one of them exists."""
    (folder / TRANSFORMER).rename(folder / "transformer" / "part-1.safetensors")
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    (folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "half of a file": (cut(TRANSFORMER, 20_000), rf"{TRANSFORMER} has 20000 of \d+ bytes"),
    "half of a header": (cut(TRANSFORMER, 50), rf"{TRANSFORMER} has 50 bytes and needs more than \d+"),
    "an empty file": (cut(TRANSFORMER, 0), rf"{TRANSFORMER} is not a safetensors file \(0 bytes\)"),
    "a page of HTML": (written(TRANSFORMER, "<!DOCTYPE html>" * 9), "is not a safetensors file"),
    "a header that is no JSON": (
        lambda folder: (folder / TRANSFORMER).write_bytes(b"\2" + bytes(7) + b"x{"),
        "has a damaged header",
    ),
    "a pointer": (written("vae/diffusion_pytorch_model.safetensors", "version https://git-lfs"), "vae/.* is a Git LFS pointer"),
    "a part": (lambda folder: shutil.rmtree(folder / "vae"), "vae is missing"),
    "a tokenizer": (lambda folder: shutil.rmtree(folder / "tokenizer_2"), "tokenizer_2 is missing"),
    "a configuration": (lambda folder: (folder / "vae" / "config.json").unlink(), "vae has no configuration"),
    "weights": (lambda folder: (folder / "text_encoder" / "model.safetensors").unlink(), "text_encoder has no safetensors file"),
    "a shard": (shards, "transformer/part-2.safetensors is missing"),
    "half of a configuration": (cut("transformer/config.json", 30), "transformer/config.json is not valid JSON"),
    "half of an index": (cut("model_index.json", 30), "model_index.json is not valid JSON"),
    "a tokenizer that is no JSON": (
        lambda folder: (folder / "tokenizer/tokenizer.json").write_bytes(b'{"\xe9'),
        "is not valid JSON",
    ),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_flux(tmp_path_factory.mktemp("whole") / "flux")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "flux"))


@pytest.mark.parametrize("fault", FAULTS)
def test_missing_or_damaged_files_raise_with_their_names(folder: Path, fault: str) -> None:
    damage, text = FAULTS[fault]
    damage(folder)
    with pytest.raises(IncompleteWeights, match=rf"^policy\.model\.path: .*flux is incomplete: .*{text}") as error:
        fetch_weights(str(folder))
    assert error.value.command == f"hf download ID --local-dir {folder}"


def test_null_and_optional_parts_can_be_missing(folder: Path) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"text_encoder_3": ["transformers", "T5EncoderModel"], "processor": [None, None], "safety_checker": ["a", "B"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    assert fetch_weights(str(folder)) == folder


def test_incomplete_weights_stop_the_run_and_doctor_suggests_the_download(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(folder / "vae")
    recipe = family_runs.small_recipe({"kind": "flux", "path": str(folder), "size": [32, 32]}, tmp_path, device="cpu")
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(recipe))
    with pytest.raises(IncompleteWeights, match="vae is missing"):
        run(parse(recipe), fresh=False)
    assert cli.main(["doctor", str(file)]) == 1
    printed = capsys.readouterr().out
    assert "FAILED  weights" in printed
    assert f"next: hf download ID --local-dir {folder}" in printed


def test_a_writer_without_complete_weights_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "writer"
    tiny_writer_runs.save_writer(folder)
    model = QwenLanguageModel(kind="qwen", path=str(folder))
    assert model.fetch_weights() == folder
    (weights,) = folder.glob("*.safetensors")
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    with pytest.raises(IncompleteWeights, match=rf"model.safetensors has {len(content) - 1} of {len(content)} bytes"):
        model.fetch_weights()
    weights.unlink()
    with pytest.raises(ValueError, match="has no safetensors file; other weight formats are not read"):
        model.fetch_weights()


@pytest.fixture
def cached(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cached copy of the Hub id ``me/flux``."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    root = tmp_path / "models--me--flux"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("abc")
    return Path(shutil.copytree(whole, root / "snapshots" / "abc"))


def test_an_interrupted_download_is_continued(cached: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_weights("me/flux") == cached
    (cached / TRANSFORMER).unlink()
    assert find_weights("me/flux") is None

    def download(path: str, *, local_files_only: bool = False, **options: object) -> str:
        if not local_files_only:
            shutil.copy(whole / TRANSFORMER, cached / TRANSFORMER)
        return str(cached)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert fetch_weights("me/flux") == cached
    assert find_weights("me/flux") == cached


def test_fetch_tokenizer_does_not_require_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    assert fetch_weights(str(tmp_path), TOKENIZER) == find_weights(str(tmp_path), TOKENIZER) == tmp_path
    with pytest.raises(IncompleteWeights, match=r"model-1\.safetensors is missing"):
        fetch_weights(str(tmp_path), MODEL)


# Sizes of the published models, against published figures, counts by hand, and real tiny models

TINY = [tiny_models.qwen_transformer, tiny_models.sd3_transformer, tiny_models.flux_transformer, tiny_models.z_image_transformer]


def parts(name):
    """The described parts of a published model, from the configuration in the folder of its family."""
    (file,) = (
        file for package in ("retouch_models", "retouch.models") for file in Path(str(files(package))).glob(f"*/{name}.json")
    )
    return json.loads(file.read_text(encoding="utf-8"))["parts"]


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


@pytest.mark.parametrize("make", TINY)
def test_parameter_counts_equal_those_of_real_models(make):
    module = make()
    config = {key: value for key, value in module.config.items() if not key.startswith("_")}
    part = {"class": type(module).__name__, "config": config}
    assert parameter_count(part) == module.num_parameters()
    assert stored_count(part) == sum(tensor.numel() for tensor in module.state_dict().values())
    with pytest.raises(ValueError, match="the size of class 'Other' is not known"):
        parameter_count({"class": "Other", "config": {}})


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("openai/clip-vit-base-patch32", 151_277_313),
        ("yuvalkirstain/PickScore_v1", 986_109_441),
        ("facebook/dinov2-base", 86_580_480),
    ],
)
def test_reward_models_have_their_known_sizes(name, count):
    assert stored_count(packaged_config("judges", name) or packaged_config("writers", name)) == count


@pytest.mark.parametrize(
    ("path", "transformer", "text_encoder"),
    [("FLUX.2-klein-base-4B", 3_875_544_576, 4.02e9), ("FLUX.2-klein-9B", 9_078_581_248, 7.57e9)],
)
def test_parameter_counts_of_flux2_match_the_published_models(path, transformer, text_encoder):
    parts = Flux2KleinModel(path=path).published()
    assert parameter_count(parts["transformer"]) == transformer
    assert parameter_count(parts["text_encoder"]) == pytest.approx(text_encoder, rel=0.002)
    assert parameter_count(parts["vae"]) == 84_046_115
    assert stored_count(parts["vae"]) == 84_046_115 + 2 * 128 + 1, "the running statistics are part of the weights"
    assert Flux2KleinModel(path="somebody/else").published() is None


def test_parameter_counts_of_qwen_image_2_equal_counts_by_hand():
    """Transformer: computed by hand. Text encoder (Qwen3-VL-8B): the known count without the head of 0.62 billion."""
    parts = QwenImage2Model(path="Qwen/Qwen-Image-2.1").published()
    assert parts is not None
    width, text, latents = 4096, 4096, 64
    block = 4 * width**2 + 3 * 3 * width**2 + 2 * 128  # no biases; norms of queries and keys have weights, and no others
    ends = 2 * latents * width + (text + width) * width + text  # tokens in and out, and the text with its norm
    time = (256 + width) * width + (4 + 1) * width**2  # its embedding, and the modulation of all blocks and of the last norm
    assert parameter_count(parts["transformer"]) == 32 * block + ends + time == 7_115_124_736
    assert parameter_count(parts["text_encoder"]) == pytest.approx(8.77e9 - 151_936 * width, rel=0.002)
    assert parameter_count(parts["vae"]) == 337_740_404
