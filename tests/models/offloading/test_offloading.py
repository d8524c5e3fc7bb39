"""Prompt embeddings that are kept, and parts of a policy in CPU memory: they give the same images."""

import json
import logging
import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import tiny_editing
import tiny_models
import tiny_recipes
from families import FAMILIES
from image_levels import ROUNDING, max_level_difference
from retouch.models.offloading import CachedPrompts, EmbeddingStore, describe
from retouch.recipe.derived_facts import differences
from retouch.recipe.recipe import parse
from retouch.run.session import run
from retouch.types import Conditioning, Task
from retouch_models.flux.model import FluxFill, FluxKontext
from retouch_models.qwen_image import model as qwen_model
from retouch_models.qwen_image.model import QwenImageEdit
from retouch_models.qwen_image_2.model import QwenImage2
from retouch_plan.checks import check_prompt_embeddings
from slow_params import slow_except
from warm_python import run_python

# Cached prompt embeddings equal those of the text encoders, and are computed again if anything differs

TEXTS = ["a red circle it", "blue", "a red circle", "make it"]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _prefix_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qwen_model, "OFFICIAL_PREFIX", {})


def model_of(family: str, folder: Path) -> Any:
    FAMILIES[family].save(folder / "model")
    return FAMILIES[family].build(folder / "model")


def tasks(model: Any, texts: Sequence[str] = TEXTS) -> list[Task]:
    """One task for each text, with a different image each, and a mask, if the model needs them."""
    side = 64 if isinstance(model, QwenImage2) else 24
    edits = isinstance(model, QwenImageEdit | QwenImage2 | FluxKontext | FluxFill)
    images = [(tiny_models.image(number, side, side),) if edits else () for number in range(len(texts))]
    mask = Image.new("L", (side, side), 255) if isinstance(model, FluxFill) else None
    rows = enumerate(zip(texts, images, strict=True))
    return [replace(tiny_models.task(f"{number}", text, *row), mask=mask) for number, (text, row) in rows]


def cached(model: Any, folder: Path, *, limit: int = 10**9) -> Any:
    """The model with embeddings kept in ``folder``."""
    model.prompt_embeddings = CachedPrompts(model, EmbeddingStore(folder, limit=limit), device=CPU)
    return model


def encodings(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts that the text encoders read from now on."""
    read: list[str] = []
    own = type(model).embed_prompts

    def counted(self: Any, prompts: Sequence[str], images: Any) -> dict[str, Tensor]:
        read.extend(prompts)
        return own(self, prompts, images)

    monkeypatch.setattr(type(model), "embed_prompts", counted)
    return read


def assert_equal(one: Conditioning, other: Conditioning) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    assert (one.padded, one.shared) == (other.padded, other.shared)
    for name, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[name].dtype
        assert torch.equal(tensor, other.tensors[name]), name


@pytest.mark.parametrize("family", slow_except({*FAMILIES} - {"qwen-image-2", "flux-fill", "flux-kontext"}, FAMILIES))
def test_cached_embeddings_are_bitwise_equal_to_the_text_encoders(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(family, tmp_path)
    alone = [(model.encode([task]), model.encode_negative([task])) for task in tasks(model)]
    together = model.encode(tasks(model))
    cached(model, tmp_path / "kept")
    computed = encodings(model, monkeypatch)
    for task, (positive, negative) in zip(tasks(model), alone, strict=True):
        assert_equal(model.encode([task]), positive)
        assert_equal(model.encode_negative([task]), negative)
    first = len(computed)
    batch = model.encode(tasks(model))
    assert_equal(cached(model, tmp_path / "kept").encode(tasks(model)), batch)
    assert len(computed) == first > 0
    for name, tensor in together.tensors.items():
        if name != "embeds" or family != "flux2":  # its encoder does not define the embeddings of padding
            torch.testing.assert_close(batch.tensors[name], tensor, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_embeddings_are_stored_as_bfloat16_if_that_is_lossless(dtype: torch.dtype, tmp_path: Path) -> None:
    store = EmbeddingStore(tmp_path, limit=10**9)
    torch.manual_seed(0)
    tensors = {
        "embeds": torch.randn(40, 64).to(dtype).float(),
        "mask": torch.ones(40, dtype=torch.bool),
        "pooled": torch.randn(8),
        "states": torch.randn(3, 5).to(dtype),
    }
    store.write("entry", tensors)
    found = store.read("entry")
    assert found is not None
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert (store.usage()[1] < 7000) == (dtype == torch.bfloat16)


def test_cache_entry_depends_on_prompt_image_and_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = cached(model_of("qwen-image-edit", tmp_path), tmp_path / "kept")
    computed = encodings(model, monkeypatch)
    task = tiny_models.task("a", "make it red", tiny_models.image(0))
    model.encode([task])
    assert computed == ["make it red"]
    model.encode([task, tiny_models.task("another id", "make it red", tiny_models.image(0))])
    assert len(computed) == 1
    model.encode([tiny_models.task("a", "make it red ", tiny_models.image(0))])
    assert len(computed) == 2
    model.encode([tiny_models.task("a", "make it red", tiny_models.image(1))])
    assert len(computed) == 3
    with torch.no_grad():
        next(model.text.encoder.parameters())[0, 0] += 1e-3
    changed = cached(model, tmp_path / "kept").encode([task])
    assert len(computed) == 4
    model.prompt_embeddings = None
    assert_equal(changed, model.encode([task]))


CHANGES: dict[str, Callable[[Any], None]] = {
    "template": lambda text: setattr(text.template, "tail", text.template.tail + " "),
    "prefix": lambda text: setattr(text, "prefix", text.prefix + 1),
    "attention": lambda text: text.encoder.set_attn_implementation("eager"),
    "dtype": lambda text: text.encoder.bfloat16(),
    "vocabulary": lambda text: text.tokenizer.add_tokens(["redder"]),
    "image processor": lambda text: setattr(text.image_processor, "max_pixels", 32 * 32),
}


@pytest.mark.parametrize("change", CHANGES)
def test_cache_key_depends_on_the_encoder_settings(change: str) -> None:
    text = tiny_editing.editor(tiny_editing.parts()).text
    before = describe(text)
    assert describe(tiny_editing.editor(tiny_editing.parts()).text) == before
    text.template.tokenise(["make it red"], [[tiny_models.image(0)]])
    assert describe(text) == before, "use must not change it"
    CHANGES[change](text)
    assert describe(text) != before


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "a bit": lambda content: content[:-3] + bytes([content[-3] ^ 4]) + content[-2:],
    "no safetensors": lambda content: b"\x80\x04." * 50,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_reported_and_computed_again(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = cached(model_of("sd3", tmp_path), tmp_path / "kept")
    made = model.encode(tasks(model, ["blue"]))
    (file,) = (tmp_path / "kept").iterdir()
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    computed = encodings(model, monkeypatch)
    with caplog.at_level(logging.WARNING, "retouch"):
        assert_equal(model.encode(tasks(model, ["blue"])), made)
    assert computed == ["blue"]
    assert f"{file} are damaged" in caplog.text
    assert_equal(model.encode(tasks(model, ["blue"])), made)
    assert computed == ["blue"]


def test_least_recently_used_entries_are_deleted_above_the_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    entry = {"embeds": torch.zeros(1000, dtype=torch.uint8)}
    store = EmbeddingStore(tmp_path, limit=8 * 1200)
    for number in range(7):
        store.write(f"{number}", entry)
        os.utime(tmp_path / f"{number}.safetensors", (number, number))
    assert store.usage()[0] == 7
    assert store.read("0") is not None
    with caplog.at_level(logging.WARNING, "retouch"):
        for number in range(7, 12):
            store.write(f"{number}", entry)
    assert store.usage()[1] <= 8 * 1200
    assert "RETOUCH_PROMPT_CACHE_GB" in caplog.text
    assert [store.read(key) is not None for key in ("0", "1", "2", "11")] == [True, False, False, True]


def write_often(folder: Path) -> None:
    store = EmbeddingStore(folder, limit=10**9)
    for _ in range(40):
        store.write("entry", {"embeds": torch.arange(5000, dtype=torch.float32) / 3})
        assert store.read("entry") is not None


def test_several_processes_write_the_same_entry(tmp_path: Path) -> None:
    """A temporary file of a process that was killed is removed after a day."""
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_often, args=(tmp_path,), daemon=True) for _ in range(3)]
    for process in writers:
        process.start()
    for process in writers:
        process.join(60)
    assert [process.exitcode for process in writers] == [0, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["entry.safetensors"]
    (tmp_path / "entry.safetensors").unlink()
    new, old = tmp_path / ".tmp-a", tmp_path / ".tmp-b"
    for file in (new, old):
        file.write_bytes(b"x")
    os.utime(old, (0, 0))
    assert EmbeddingStore(tmp_path, limit=1).usage() == (0, 0)
    assert (new.exists(), old.exists()) == (True, False)


def test_cache_folder_and_limit_come_from_environment_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RETOUCH_PROMPT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert EmbeddingStore.of_user().folder == tmp_path / "retouch" / "prompt-embeddings"
    assert EmbeddingStore.of_user().limit == 100 * 10**9
    monkeypatch.setenv("RETOUCH_PROMPT_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("RETOUCH_PROMPT_CACHE_GB", "0.5")
    assert EmbeddingStore.of_user().folder == tmp_path / "own"
    assert EmbeddingStore.of_user().limit == 5 * 10**8
    for limit in ("0", "-3", "nan", "inf", "much"):
        monkeypatch.setenv("RETOUCH_PROMPT_CACHE_GB", limit)
        with pytest.raises(ValueError, match="RETOUCH_PROMPT_CACHE_GB is"):
            EmbeddingStore.of_user()


# Parts of a denoising policy in CPU memory

SUPPORT = Path(__file__).parents[2] / "support"
CACHED = {"policy": {**tiny_recipes.SMALL["policy"], "prompt_embeddings": "cached"}}
OFFLOADED = {"devices": {"offload": True}}
WAYS: dict[str, dict[str, Any]] = {"live": {}, "cached": CACHED, "offloaded": OFFLOADED, "both": {**CACHED, **OFFLOADED}}
SWAPPED = {"policy": {**tiny_recipes.SMALL["policy"], "gradient_checkpointing": True}, "devices": {"swap_blocks": 1}}


@pytest.fixture(autouse=True)
def prompt_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of prompt embeddings."""
    monkeypatch.setenv("RETOUCH_PROMPT_CACHE", str(tmp_path / "prompts"))
    return tmp_path / "prompts"


def small(folder: Path, way: str, **changes: Any) -> dict[str, Any]:
    recipe = {**tiny_recipes.SMALL, "out": str(folder), "device": "cpu", "trackers": []}
    # One task per step, so that a batch is one prompt, which is how the cache encodes prompts.
    recipe |= {"tasks_per_step": 1, "group_size": 4, "data": {"kind": "playground", "complexity": [1], "count": 4}}
    recipe |= {"eval": {"tasks": 1}, "rollout": {**tiny_recipes.SMALL["rollout"], "guidance_scale": 2.0}}
    return {**recipe, **WAYS[way], **changes}


def step(tmp_path: Path, way: str, device: str) -> dict[str, Any]:
    """Two rollouts of one step and its loss, in a process of its own."""
    file = tmp_path / f"{way}.json"
    recipe = small(tmp_path, "live", **SWAPPED) if way == "swapped" else small(tmp_path, way)
    offload = recipe.get("devices") == OFFLOADED["devices"]
    file.write_text(
        json.dumps({key: value for key, value in recipe.items() if key != "device" and not (offload and key == "devices")})
    )
    printed = run_python(SUPPORT / "placed_denoising.py", file, device, str(offload).lower(), search=[SUPPORT])
    found: dict[str, Any] = json.loads(printed)
    return found


@pytest.fixture(scope="module")
def cpu_step(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The step with all parts on the CPU."""
    return step(tmp_path_factory.mktemp("cpu_step"), "live", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["cached", "offloaded", "swapped"])
def test_frozen_parts_are_on_the_device_only_while_they_are_used(cpu_step: dict[str, Any], tmp_path: Path, way: str) -> None:
    there = step(tmp_path, way, "pretend:0")
    assert max_level_difference(there["images"], cpu_step["images"]) <= ROUNDING
    assert there["loss"] == pytest.approx(cpu_step["loss"], abs=1e-6)
    assert there["used"] == {part: ["pretend:0"] for part in ("transformer", "text encoder", "autoencoder")}
    there["waits"]["transformer"].remove("pretend:0")  # the swapped blocks are in CPU memory too
    swapped, cpu, device = way == "swapped", ["cpu"], ["pretend:0"]
    assert there["waits"]["transformer"] == (cpu if swapped else [])
    assert there["waits"]["text encoder"] == (device if swapped else cpu)
    assert there["waits"]["autoencoder"] == (cpu if way == "offloaded" else device)
    assert there["calls"] == [0, 0] if way == "cached" else all(there["calls"])  # cached prompts are encoded before the first step


def metrics(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "small" / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in lines]


@pytest.mark.slow
def test_cached_and_offloaded_runs_give_bitwise_equal_metrics(tmp_path: Path, prompt_cache: Path) -> None:
    found = {}
    for name, way in [("live", "live"), ("cold", "cached"), ("warm", "both")]:
        assert run(parse(small(tmp_path / name, way)), fresh=False) == 0
        found[name] = metrics(tmp_path / name)
        assert len(found[name]) == 2
    assert len(list(prompt_cache.iterdir())) > 2
    assert all(each == found["live"] for each in found.values())


def test_cache_and_offload_settings_do_not_count_as_recipe_differences(tmp_path: Path) -> None:
    recipes = [parse(small(tmp_path, way)) for way in WAYS]
    assert [differences(recipes[0], other) for other in recipes] == [[]] * 4
    assert "prompt_embeddings" not in json.dumps(recipes[0].document())


@pytest.mark.parametrize("way", ["cached", "offloaded"])
def test_imported_model_with_cached_prompts_or_offloading_raises(way: str, tmp_path: Path) -> None:
    document = json.loads(json.dumps(small(tmp_path, way)))
    document["policy"]["model"] = {"kind": "import", "class": "tiny_models:Anything"}
    key = "policy.prompt_embeddings" if way == "cached" else "devices.offload"
    with pytest.raises(ValueError, match=f"{key}: .*only for models in the layout of a diffusers pipeline"):
        parse(document)


def test_doctor_reports_the_kept_embeddings(tmp_path: Path, prompt_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(check_prompt_embeddings(parse(small(tmp_path, "live")))) == []
    (found,) = check_prompt_embeddings(parse(small(tmp_path, "cached")))
    assert f"0 stored prompt embeddings, 0.00 GB of at most 100.00 GB, in {prompt_cache}" in found.text
    prompt_cache.mkdir()
    (prompt_cache / "one.safetensors").write_bytes(bytes(2 * 10**7))
    monkeypatch.setenv("RETOUCH_PROMPT_CACHE_GB", "1e9")
    (found,) = check_prompt_embeddings(parse(small(tmp_path, "cached")))
    assert "1 stored prompt embeddings, 0.02 GB of at most" in found.text
    assert "are free there, less than the embeddings may take" in found.text
    monkeypatch.setenv("RETOUCH_PROMPT_CACHE_GB", "none")
    (found,) = check_prompt_embeddings(parse(small(tmp_path, "cached")))
    assert (found.status, found.fix) == ("FAILED", "export RETOUCH_PROMPT_CACHE_GB=100")
