"""Placement of a run's parts, the memory of its devices, and the settings of their numerics."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tiny_emu3
import tiny_writer_runs
from image_levels import ROUNDING, encode, max_level_difference
from retouch.distributed.ranks import (
    DeviceMemory,
    Placement,
    Ranks,
    gpus_per_rank,
    init_distributed_from_recipe,
    limit_memory,
    peak_bytes,
    plan_placement,
    resolve_device,
    set_numerics,
)
from retouch.models.offloading import on_device, parts_of
from retouch.recipe.keys import Devices
from retouch.recipe.recipe import parse
from retouch.renderers.base import RendererInContext
from retouch.run.build import assemble, copies_in_cpu_memory
from retouch_models.emu3 import Emu3ImageTokenizer, without_tf32
from retouch_worlds.playground import playground_weights
from tiny_models import image
from tiny_recipes import SMALL
from warm_python import run_python

# Placement of a run's parts

SUPPORT = Path(__file__).parents[1] / "support"
CPU = torch.device("cpu")
REWARD = {"kind": "import", "class": "placed_run:RecordsDevice", "combine": {"share": 1}}


def step(tmp_path: Path, writer: Path, where: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Make a step with its parts on these devices, in a separate process."""
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(tiny_writer_runs.recipe(tmp_path, writer, reward=REWARD, **changes)))
    found: dict[str, Any] = json.loads(run_python(SUPPORT / "placed_run.py", file, json.dumps(where), search=[SUPPORT]))
    return found


ON_CPU = {"policy": "cpu", "renderer": "cpu", "reward": "cpu"}
ON_THREE_DEVICES = {"policy": "pretend:0", "renderer": "pretend:1", "reward": "pretend:2"}


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ["frozen", "policy"])
def test_parts_on_separate_devices_match_parts_on_one_device(tmp_path: Path, writer: Path, encoder: str) -> None:
    changes = {"renderer__encoder": encoder, "renderer__guidance_scale": 2.0}
    alone = step(tmp_path, writer, ON_CPU, **changes)
    apart = step(tmp_path, writer, ON_THREE_DEVICES, **changes)
    assert apart["written"] == alone["written"]
    assert max_level_difference(apart["encoded_images"], alone["encoded_images"]) <= ROUNDING
    assert apart["loss"] == pytest.approx(alone["loss"], abs=1e-6)
    assert apart["gradient"] == pytest.approx(alone["gradient"], rel=1e-4)
    assert len(alone["encoded_images"]) == 8
    assert alone["gradient"] > 0
    places = {name: apart[name] for name in ("policy", "gradients", "renderer", "drawn_on", "reward")}
    policy, renderer = ["pretend:0"], ["pretend:1"]
    assert places == {"policy": policy, "gradients": policy, "renderer": renderer, "drawn_on": renderer, "reward": "pretend:2"}


@pytest.mark.slow
def test_offloaded_renderer_runs_on_the_policy_device_and_returns_to_the_cpu(tmp_path: Path, writer: Path) -> None:
    shared = step(tmp_path, writer, {**dict.fromkeys(ON_CPU, "pretend:0"), "offload": True})
    assert shared["renderer"] == ["cpu"]
    assert shared["drawn_on"] == ["pretend:0"]
    assert max_level_difference(shared["encoded_images"], step(tmp_path, writer, ON_CPU)["encoded_images"]) <= ROUNDING


def test_on_device_restores_the_original_tensors_after_an_exception() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    module.append(module[0])
    before = dict([*module.named_parameters(), *module.named_buffers()])

    def used() -> None:
        with on_device(torch.device("meta"), [module]):
            assert {tensor.device.type for tensor in [*module.parameters(), *module.buffers()]} == {"meta"}
            assert module[0].weight is module[2].weight
            raise KeyError

    with pytest.raises(KeyError):
        used()
    after = dict([*module.named_parameters(), *module.named_buffers()])
    assert after.keys() == before.keys()
    assert all(after[name] is tensor for name, tensor in before.items())


def test_devices_offload_applies_to_the_image_model_and_not_to_the_policy(tmp_path: Path, writer: Path) -> None:
    document = tiny_writer_runs.recipe(tmp_path, writer, devices={"offload": True}, renderer__encoder="policy")
    parts = assemble(parse(document), Ranks())
    renderer = parts.renderer()
    assert isinstance(renderer, RendererInContext)
    _, waiting = renderer.context.args  # type: ignore[attr-defined]
    assert parts.model.module not in waiting
    assert len(waiting) == 2
    parts.judge.close()
    with pytest.raises(ValueError, match=r"devices\.offload.*SimpleNamespace"):
        parts_of(SimpleNamespace())  # type: ignore[arg-type]


def editor_of(writer: Path, tmp_path: Path) -> Path:
    """A folder with the playground's editor, whose text encoder has the writer's weights."""
    editor = Path(shutil.copytree(playground_weights(), tmp_path / "editor"))
    for file in ("model.safetensors", "config.json"):
        shutil.copy(writer / file, editor / "text_encoder" / file)
    return editor


def test_frozen_encoder_with_the_writers_weights_is_shared_only_with_lora(tmp_path: Path, writer: Path) -> None:
    """The editor's text encoder is saved with the writer's weights; the images match those with two copies of the weights."""
    editor = editor_of(writer, tmp_path)
    encoded_images = []
    for train in ({"kind": "lora", "rank": 4, "alpha": 8}, {"kind": "full"}):
        changes = {"renderer__model": {"kind": "playground", "path": str(editor)}, "policy__train": train}
        parts = assemble(parse(tiny_writer_runs.recipe(tmp_path, writer, **changes)), Ranks())
        once = parts.image_model.text.encoder is parts.model.module  # type: ignore[attr-defined]
        assert once == (train["kind"] == "lora")  # if all weights are trained, the frozen encoder needs its own
        assert "reference" in parts.copies.copies
        run, phase = parts.phase(0, stepper=parts.stepper(), judge=parts.judge)  # type: ignore[arg-type]
        batch = phase.batch(0)
        trajectory = run.policy.rollout(batch)
        with torch.no_grad():
            for parameter in parts.copies.parameters.values():
                parameter.add_(0.3)
        drawn = run.renderer([batch.tasks[k] for k in batch.group], trajectory)
        encoded_images.append(encode(drawn))
        parts.judge.close()
    assert len(encoded_images[0]) == 8
    assert max_level_difference(*encoded_images) <= ROUNDING


@pytest.mark.parametrize("encoder", ["policy", "frozen"])
def test_shared_encoder_weights_use_one_storage(tmp_path: Path, writer: Path, encoder: str) -> None:
    editor = editor_of(writer, tmp_path)
    changes = {"renderer__model": {"kind": "playground", "path": str(editor)}, "renderer__encoder": encoder}
    parts = assemble(parse(tiny_writer_runs.recipe(tmp_path, writer, **changes)), Ranks())
    image_model: Any = parts.image_model
    written, drawn = parts.model.module, [image_model.module, image_model.latents.vae]
    assert bytes_of([written, *parts_of(image_model)]) == bytes_of([written, *drawn]) == bytes_of([written]) + bytes_of(drawn)
    parts.judge.close()


def bytes_of(modules: list[nn.Module]) -> int:
    """Bytes of the storages of all their weights, each once."""
    storages = [weight.untyped_storage() for module in modules for weight in module.parameters()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_device_names_are_resolved_relative_to_the_gpus_of_a_rank() -> None:
    three = Devices(policy="cuda:0", renderer="cuda:1", reward="cuda:2")
    assert gpus_per_rank(three) == 3
    assert [str(resolve_device(name, three, local_rank=2)) for name in three.named.values()] == ["cuda:6", "cuda:7", "cuda:8"]
    assert gpus_per_rank(Devices(offload=True)) == gpus_per_rank(Devices(reward="cpu")) == 1
    assert resolve_device("cpu", three, local_rank=2) == CPU


def test_parts_without_a_device_are_placed_with_the_policy(tmp_path: Path, writer: Path) -> None:
    ranks = Ranks(device=torch.device("cuda:5"))
    assert plan_placement(parse(tiny_writer_runs.recipe(tmp_path, writer)), ranks) == Placement(*[torch.device("cuda:5")] * 3)
    some = parse(tiny_writer_runs.recipe(tmp_path, writer, devices={"reward": "cpu", "offload": True}))
    assert plan_placement(some, ranks) == Placement(torch.device("cuda:5"), torch.device("cuda:5"), CPU, True)
    kl = tiny_writer_runs.recipe(tmp_path, writer, devices={"reference": "cpu"})
    kl["policy"]["train"] = {"kind": "full"}
    assert copies_in_cpu_memory(parse(kl)) == {"reference"}


def test_missing_cuda_device_raises_with_its_key(tmp_path: Path, writer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "1")
    recipe = parse(tiny_writer_runs.recipe(tmp_path, writer, devices={"renderer": "cuda:1", "reward": "cuda:2"}))
    with pytest.raises(ValueError, match=r"devices\.renderer: cuda:1 of this rank is cuda:4.* has 4 CUDA devices.*uses 3"):
        init_distributed_from_recipe(recipe)


# The memory of a run's devices

THREE = Placement(*(torch.device("cuda", index) for index in range(3)))


class Gpus:
    """Replaces the functions of torch.cuda that are called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.peaks = {index: 10**9 * (index + 1) for index in range(3)}
        self.emptied: list[None] = []
        self.limits: dict[int, float] = {}
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peaks[device.index])
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: self.peaks.update({device.index: 0}))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: self.emptied.append(None))
        limit = "set_per_process_memory_fraction"
        monkeypatch.setattr(torch.cuda, limit, lambda share, device: self.limits.update({device.index: share}))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(monkeypatch)


def test_peak_memory_is_reported_per_device_and_step(gpus: Gpus) -> None:
    memory = DeviceMemory(Ranks(), THREE, Devices())
    assert memory.after_step(1) == {"memory/peak_gb/policy": 1.0, "memory/peak_gb/renderer": 2.0, "memory/peak_gb/reward": 3.0}
    gpus.peaks[1] = 5 * 10**8
    assert memory.after_step(2) == {"memory/peak_gb/policy": 0.0, "memory/peak_gb/renderer": 0.5, "memory/peak_gb/reward": 0.0}


def test_single_device_reports_one_peak() -> None:
    found = DeviceMemory(Ranks(), Placement(CPU, CPU, CPU), None).after_step(1)
    assert list(found) == ["memory/peak_gb"]
    assert found["memory/peak_gb"] == pytest.approx(peak_bytes(CPU) / 1e9, rel=0.05)
    assert found["memory/peak_gb"] > 0.05  # torch alone takes that


def test_cache_is_emptied_at_the_interval_of_the_recipe_and_never_by_default(gpus: Gpus) -> None:
    for every, times in ((None, 0), (5, 2), (3, 4)):
        gpus.emptied.clear()
        memory = DeviceMemory(Ranks(), THREE, Devices(empty_cache_every=every))
        for done in range(1, 13):
            memory.after_step(done)
        assert len(gpus.emptied) == times


def test_memory_fraction_limits_every_gpu_of_the_rank_and_is_off_by_default(gpus: Gpus) -> None:
    limit_memory(None, THREE)
    limit_memory(Devices(), THREE)
    assert gpus.limits == {}
    limit_memory(Devices(memory_fraction=0.85), Placement(THREE.policy, THREE.renderer, CPU))
    assert gpus.limits == {0: 0.85, 1: 0.85}


# The recipe's settings for GPU numerics


def allowed() -> list[bool]:
    return [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32]


def record_settings(forward: Callable[..., Any], seen: list[list[bool]]) -> Callable[..., Any]:
    def noted(*inputs: Any, **options: Any) -> Any:
        seen.append(allowed())
        return forward(*inputs, **options)

    return noted


@pytest.mark.slow
def test_deterministic_algorithms_are_chosen_and_change_nothing_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
        monkeypatch.delenv(name, raising=False)
    printed = run_python(SUPPORT / "numerics_run.py", tmp_path, search=[SUPPORT])
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    off = {
        **{"deterministic": False, "warns": False, "workspace": None, "flash_attention": None},
        **{"cudnn_attention": False, "tf32": [False, False]},
    }
    assert found["plain"]["settings"] == off
    on = {**off, "deterministic": True, "workspace": ":4096:8", "flash_attention": "1"}
    assert found["exact"]["settings"] == on
    assert len(found["plain"]["metrics"]) == 2
    assert found["exact"]["metrics"] == found["plain"]["metrics"]


def test_segments_of_the_allocator_can_grow_unless_the_user_chose_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (own := "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")
        set_numerics(parse(SMALL))
        assert os.environ[name] == ""
        monkeypatch.delenv(name)
    monkeypatch.delenv(own, raising=False)
    set_numerics(parse(SMALL))
    assert os.environ[own] == "expandable_segments:True"


def test_tf32_follows_the_recipe_and_is_off_in_the_image_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        set_numerics(parse(SMALL))
        assert allowed() == [False, False]
        set_numerics(parse({**SMALL, "tf32": True}))
        assert allowed() == [True, True]
        with without_tf32():
            assert allowed() == [False, False]
        seen: list[list[bool]] = []
        vq = tiny_emu3.module().model.vqmodel
        monkeypatch.setattr(vq.encoder, "forward", record_settings(vq.encoder.forward, seen))
        Emu3ImageTokenizer(vq, tiny_emu3.SIZE).encode([image(0, *tiny_emu3.SIZE)])
        assert seen == [[False, False]]
        assert allowed() == [True, True]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
