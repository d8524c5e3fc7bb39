"""Placement of a run's parts: on separate devices, in turn on one device, and how ranks resolve the device names of a recipe."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tiny_writer_runs
from image_levels import ROUNDING, encode, max_level_difference
from retouch.distributed.ranks import Placement, Ranks, gpus_per_rank, init_distributed_from_recipe, plan_placement, resolve_device
from retouch.models.offloading import on_device, parts_of
from retouch.recipe.keys import Devices
from retouch.recipe.recipe import parse
from retouch.renderers.base import RendererInContext
from retouch.run.build import assemble, copies_in_cpu_memory
from retouch_worlds.playground import playground_weights
from warm_python import python

SUPPORT = Path(__file__).parents[1] / "support"
CPU = torch.device("cpu")
REWARD = {"kind": "import", "class": "placed_run:RecordsDevice", "combine": {"share": 1}}


def step(tmp_path: Path, writer: Path, where: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Make a step with its parts on these devices, in a separate process."""
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(tiny_writer_runs.recipe(tmp_path, writer, reward=REWARD, **changes)))
    command = [python(), str(SUPPORT / "placed_run.py"), str(file), json.dumps(where)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    made = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-3000:]
    found: dict[str, Any] = json.loads(made.stdout)
    return found


ON_CPU = {"policy": "cpu", "renderer": "cpu", "reward": "cpu"}
ON_THREE_DEVICES = {"policy": "pretend:0", "renderer": "pretend:1", "reward": "pretend:2"}


@pytest.mark.parametrize("encoder", ["frozen", pytest.param("policy", marks=pytest.mark.slow)])
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
    places = {name: apart[name] for name in ("policy", "renderer", "drawn_on", "reward", "gradients")}
    assert places == {
        "policy": ["pretend:0"],
        "renderer": ["pretend:1"],
        "drawn_on": ["pretend:1"],
        "reward": "pretend:2",
        "gradients": ["pretend:0"],
    }


@pytest.mark.slow
def test_offloaded_renderer_runs_on_the_policy_device_and_returns_to_the_cpu(tmp_path: Path, writer: Path) -> None:
    shared = step(tmp_path, writer, {**dict.fromkeys(ON_CPU, "pretend:0"), "offload": True})
    assert shared["renderer"] == ["cpu"]
    assert shared["drawn_on"] == ["pretend:0"]
    assert max_level_difference(shared["encoded_images"], step(tmp_path, writer, ON_CPU)["encoded_images"]) <= ROUNDING


# Offloaded weights


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


def test_offload_of_a_model_with_unknown_parts_raises() -> None:
    with pytest.raises(ValueError, match=r"devices\.offload.*SimpleNamespace"):
        parts_of(SimpleNamespace())  # type: ignore[arg-type]


# Shared weights


def test_frozen_encoder_with_the_writers_weights_is_shared_only_with_lora(tmp_path: Path, writer: Path) -> None:
    """The editor's text encoder is saved with the writer's weights; the images match those with two copies of the weights."""
    editor = tmp_path / "editor"
    shutil.copytree(playground_weights(), editor)
    for file in ("model.safetensors", "config.json"):
        shutil.copy(writer / file, editor / "text_encoder" / file)
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
    editor = tmp_path / "editor"
    shutil.copytree(playground_weights(), editor)
    for file in ("model.safetensors", "config.json"):
        shutil.copy(writer / file, editor / "text_encoder" / file)
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


# Names in a recipe


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
