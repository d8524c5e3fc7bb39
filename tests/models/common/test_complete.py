"""``complete``: missing and damaged files in the folder of a model are reported before anything is loaded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

import family_runs
import tiny_models
import tiny_writer_runs
from retouch import cli
from retouch.models import pretrained
from retouch.models.language import QwenLanguageModel
from retouch.models.pretrained import MODEL, TOKENIZER, IncompleteWeights, fetch_weights, find_weights, require_complete
from retouch.recipe.recipe import parse
from retouch.run.session import run

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


def test_error_lists_every_problem_and_suggests_to_download_the_hub_id(folder: Path) -> None:
    cut(TRANSFORMER, 20_000)(folder)
    shutil.rmtree(folder / "vae")
    with pytest.raises(IncompleteWeights, match=r"vae is missing; transformer/.* has 20000 of .*: `hf download me/flux`"):
        require_complete(folder, path="me/flux", key="policy.model.path")


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

    monkeypatch.setattr(pretrained, "snapshot_download", download)
    assert fetch_weights("me/flux") == cached
    assert find_weights("me/flux") == cached


def test_fetch_tokenizer_does_not_require_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    assert fetch_weights(str(tmp_path), TOKENIZER) == find_weights(str(tmp_path), TOKENIZER) == tmp_path
    with pytest.raises(IncompleteWeights, match=r"model-1\.safetensors is missing"):
        fetch_weights(str(tmp_path), MODEL)
