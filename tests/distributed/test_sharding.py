"""Sharded training with DeepSpeed's ZeRO-2 and with FSDP2: the same steps as replicated ranks, checkpoints, and settings."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessorPil

import tiny_writer_runs
from rank_commands import SUPPORT, on_ranks
from retouch.config.packaged import packaged_recipes
from retouch.distributed import fsdp
from retouch.distributed.launching import rank_environments
from retouch.distributed.optimizer import ReplicatedStepper
from retouch.distributed.ranks import Ranks, check_sharding
from retouch.recipe.recipe import Recipe, parse
from retouch.records.folder import RunFolder
from retouch.run import checkpoint
from retouch.run.build import assemble
from retouch_plan.checks import check_sharding_settings
from retouch_worlds.playground import playground_weights
from tiny_recipes import SMALL
from vllm_double import Double, serving

# Sharded training with DeepSpeed's ZeRO-2 and with FSDP2

NO_DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
SHARED = [pytest.param("zero2", marks=NO_DEEPSPEED), "fsdp2"]
STEPPED = [
    *(pytest.param(("zero2", train), marks=NO_DEEPSPEED) for train in ("lora", "full")),
    ("fsdp2", "full"),
    *(pytest.param((f"fsdp2{kept}", "lora"), marks=pytest.mark.slow) for kept in ("", "-moments", "-weights")),
    *(pytest.param((f"fsdp2{kept}", "full"), marks=pytest.mark.slow) for kept in ("-moments", "-weights")),
]


@pytest.fixture(scope="module", params=STEPPED, ids="-".join)
def stepped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What ``sharded_ranks`` found on each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(2, [str(SUPPORT / "sharded_ranks.py"), *request.param, str(folder)], folder / "logs")
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def test_sharded_steps_match_replicated_steps(stepped: list[dict[str, Any]]) -> None:
    for found in stepped:
        assert found["begun_apart"] == 0
        assert found["empty_state"] == {}
        for plain, shared in found["norms"]:
            assert shared == pytest.approx(plain, rel=1e-4)
            assert plain > 0.05  # so it was clipped
        assert found["moved"] > 1e-2
        assert found["distance"] < 1e-4
        assert found["same_state_names"]
        assert found["state_apart"] < 1e-4
        assert found["refused"], "a loss that is NaN on one rank raises on all, and changes nothing"
        assert found["untouched"]
        assert found["stepped"]
        assert found["undone"], "from the snapshot of each rank"
        assert found["resumed"]
        assert found["renewed"]
        shared, plain, distance = found["handed_over"]
        assert plain == pytest.approx(shared, rel=1e-4)
        assert distance < 1e-4
        assert found["reference_apart"] == 0
        assert found["swapped_back"]
        assert found["blend_apart"] < 1e-6


class Blocks(nn.Sequential):
    _no_split_modules = ("Linear",)


def assert_equal_checkpoints(one: RunFolder, other: RunFolder) -> None:
    """Those of step 3, to the bit."""
    first, second = (checkpoint.load(folder.checkpoints / "step-000003").tensors for folder in (one, other))
    assert {group: tensors.keys() for group, tensors in first.items()} == {k: v.keys() for k, v in second.items()}
    for group, tensors in first.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor.nan_to_num(), second[group][name].nan_to_num()), f"{group}/{name}"


def assert_close_metrics(one: RunFolder, other: RunFolder, *names: str, rel: float = 1e-3) -> None:
    for wanted, found in zip(one.read_metrics(), other.read_metrics(), strict=False):
        for name in names:
            assert found[name] == pytest.approx(wanted[name], rel=rel, abs=1e-5), name


@pytest.mark.parametrize(("device", "page_locked"), [("cuda:0", True), ("cpu", False)])
def test_offloaded_fsdp_weights_are_pinned_and_synchronized_only_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, page_locked: bool
) -> None:
    given, synchronized = [], []
    monkeypatch.setattr(fsdp, "init_device_mesh", lambda kind, shape: kind)
    monkeypatch.setattr(fsdp, "fully_shard", lambda module, **options: given.append((type(module), options["offload_policy"])))
    monkeypatch.setattr(torch.cuda, "synchronize", synchronized.append)
    ranks = Ranks(world=2, device=torch.device(device))
    network = Blocks(nn.Linear(2, 2))
    fsdp.shard(network, ranks, weights_on_cpu=True)
    assert given == [(kind, CPUOffloadPolicy(pin_memory=page_locked)) for kind in (nn.Linear, Blocks)]
    network(torch.ones(1, 2))
    assert synchronized == [ranks.device] * page_locked
    fsdp.shard(Blocks(nn.Linear(2, 2)), ranks)
    assert not any(isinstance(policy, CPUOffloadPolicy) for _, policy in given[2:])


def train(out: Path, writer: Path, name: str, **changes: Any) -> RunFolder:
    """Train on two ranks, with the policy as the editor's text encoder, with guidance, an EMA and a KL."""
    settings: dict[str, Any] = {
        "renderer__encoder": "policy",
        "renderer__guidance_scale": 2.0,
        "policy__ema": {"decay": 0.5},
        "eval": {"tasks": 3, "complexity": [1]},
        "checkpoints": {"every": 1, "keep": 9},
    }
    file = out / f"{name}.json"
    file.write_text(json.dumps({**tiny_writer_runs.recipe(out, writer, **(settings | changes)), "name": name}))
    on_ranks(2, ["-m", "retouch.cli", "train", str(file)], out / "logs" / name)
    return RunFolder(out / name)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", SHARED)
def test_sharded_run_matches_a_replicated_run_and_resumes_bitwise(tmp_path: Path, writer: Path, sharding: str) -> None:
    plain = train(tmp_path, writer, "plain", steps=2)
    whole = train(tmp_path, writer, "whole", steps=3, sharding=sharding)
    train(tmp_path, writer, "stopped", steps=2, sharding=sharding)
    resumed = train(tmp_path, writer, "stopped", steps=3, sharding=sharding)
    names = ("policy/grad_norm", "reward/mean", "completion/length", "policy/kl", "policy/ratio_max_first")
    assert_close_metrics(plain, whole, *names)
    assert whole.read_metrics() == resumed.read_metrics()
    assert_equal_checkpoints(whole, resumed)


@pytest.mark.slow
def test_run_with_weights_in_cpu_memory_for_one_step_is_bitwise_equal(tmp_path: Path, writer: Path) -> None:
    """On the CPU, offloading does not copy anything, so the results must be bitwise equal."""
    there: dict[str, Any] = {"sharding": "fsdp2"}
    waiting = {**there, "devices": {"weights": "cpu"}}
    whole = train(tmp_path, writer, "whole", steps=3, **there)
    train(tmp_path, writer, "resumed", steps=1, **there)
    train(tmp_path, writer, "resumed", steps=2, **waiting)
    resumed = train(tmp_path, writer, "resumed", steps=3, **there)
    assert "2 ranks with fsdp2, weights wait in CPU memory" in resumed.log(0).read_text()
    assert whole.read_metrics() == resumed.read_metrics()
    assert_equal_checkpoints(whole, resumed)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [None, pytest.param("zero2", marks=NO_DEEPSPEED)])
def test_server_receives_all_weights_in_each_step_with_and_without_zero2(
    tmp_path: Path, writer: Path, sharding: str | None
) -> None:
    base = Qwen2_5_VLForConditionalGeneration.from_pretrained(writer).eval()
    processor = Qwen2VLImageProcessorPil.from_pretrained(writer)
    double = Double(base, image_processor=processor, image_token=base.config.image_token_id, dev_mode=True)
    with serving(double) as url:
        engine = {"kind": "vllm", "url": url, "timeout": 600.0, "max_mismatch": 1e-3, "sleep": True}
        settings = {"rollout__engine": engine, "policy__train": {"kind": "full"}, "renderer__encoder": "frozen", "steps": 3}
        folder = train(tmp_path, writer, "served", **settings, **({"sharding": sharding} if sharding else {}))
    metrics = folder.read_metrics()
    assert [line["engine/mismatch_max"] < 1e-3 for line in metrics] == [True] * 3
    assert all(line["policy/grad_norm"] > 0 for line in metrics)
    assert len(set(double.reloaded)) == 3
    assert [state for state, _ in groupby(double.states)][:6] == ["awake", "generates", "asleep"] * 2
    assert not double.asleep


@pytest.mark.slow
def test_frozen_encoder_shared_with_a_sharded_writer_matches_the_replicated_run(tmp_path: Path, writer: Path) -> None:
    """The editor's text encoder has the writer's weights, so both share one sharded copy."""
    editor = tmp_path / "editor"
    shutil.copytree(playground_weights(), editor)
    for file in ("model.safetensors", "config.json"):
        shutil.copy(writer / file, editor / "text_encoder" / file)
    settings = {"renderer__model": {"kind": "playground", "path": str(editor)}, "renderer__encoder": "frozen", "steps": 2}
    plain = train(tmp_path, writer, "plain", **settings)
    shared = train(tmp_path, writer, "shared", sharding="fsdp2", **settings)
    assert len(plain.read_metrics()) == len(shared.read_metrics()) == 2
    assert_close_metrics(plain, shared, "policy/grad_norm", "reward/mean", "completion/length")


@pytest.mark.slow
@pytest.mark.parametrize("sharding", SHARED)
def test_value_head_with_a_sharded_writer_matches_the_replicated_run(tmp_path: Path, writer: Path, sharding: str) -> None:
    """The gradient of the value loss also reaches the writer's weights."""
    head = {"kind": "gae", "head": {"coefficient": 0.5}}
    settings = {"advantage": head, "reward__combine": {"IP": 1}, "steps": 3}
    plain = train(tmp_path, writer, "plain", **settings)
    shared = train(tmp_path, writer, "shared", sharding=sharding, **settings)
    assert len(plain.read_metrics()) == len(shared.read_metrics()) == 3
    assert_close_metrics(plain, shared, "value/loss", "policy/loss", "policy/grad_norm", "policy/ratio_max_first", rel=2e-3)
    heads = [checkpoint.load(folder.checkpoints / "step-000003").tensors["optimizer"] for folder in (plain, shared)]
    name = "value_head/weights/network.outer.weight"
    torch.testing.assert_close(heads[1][name], heads[0][name], rtol=0, atol=1e-4)
    assert heads[0][name].abs().max() > 1e-3


def test_zero3_raises_with_the_reason_and_alternatives(tmp_path: Path, writer: Path) -> None:
    with pytest.raises(ValueError, match=r"sharding: zero3 gathers the weights in every call.*use zero2, or fsdp2"):
        parse(tiny_writer_runs.recipe(tmp_path, writer, sharding="zero3", renderer__encoder="policy"))


def test_single_rank_uses_the_replicated_stepper(tmp_path: Path, writer: Path) -> None:
    for sharding in ("zero2", "fsdp2"):
        parts = assemble(parse(tiny_writer_runs.recipe(tmp_path, writer, sharding=sharding)), Ranks())
        assert isinstance(parts.stepper(), ReplicatedStepper)
        parts.judge.close()


# Sharding settings of accelerate
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true"}
FSDP = {"ACCELERATE_USE_FSDP": "true"}


def sharded(sharding: str | None) -> Recipe:
    return parse({**SMALL, "sharding": sharding})


ZERO = {**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}


@pytest.mark.parametrize(
    ("sharding", "environment", "why"),
    [
        (None, {}, None),
        ("fsdp2", {"WORLD_SIZE": "2"}, None),
        ("fsdp2", {**FSDP, "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "false"}, None),
        ("zero2", {**ZERO, "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none"}, None),
        (None, {"ACCELERATE_USE_DEEPSPEED": "false"}, None),
        ("zero2", {**ZERO, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, r"zero_stage 3: .*pop from an empty deque.*zero2\.yaml"),
        (None, ZERO, r"has sharding zero2, but the recipe has none"),
        ("fsdp2", ZERO, r"or launch with recipes/accelerate/fsdp2\.yaml"),
        ("zero2", {**ZERO, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}, "zero_stage 1; only 2 is supported"),
        ("zero2", {**DEEPSPEED, "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"}, "a DeepSpeed file, which is ignored"),
        ("zero2", {**ZERO, "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, "offloads DeepSpeed's optimizer"),
        ("fsdp2", {**FSDP, "FSDP_VERSION": "1"}, "fsdp_version 1; only 2 is supported"),
        ("fsdp2", {**FSDP, "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"}, r"offloads FSDP's.*devices\.weights=cpu"),
        ("zero2", {**FSDP, "FSDP_VERSION": "2"}, "has sharding fsdp2, but the recipe has zero2"),
    ],
)
def test_unsupported_or_conflicting_launcher_settings_raise(sharding: str | None, environment: dict[str, str], why: Any) -> None:
    with pytest.raises(ValueError, match=why) if why else nullcontext():
        check_sharding(sharded(sharding), environment)


def test_weights_in_cpu_memory_require_several_sharded_ranks() -> None:
    recipe = parse({**SMALL, "sharding": "fsdp2", "devices": {"weights": "cpu"}})
    offloads = {**FSDP, "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true", "WORLD_SIZE": "2"}
    check_sharding(recipe, offloads)
    check_sharding(recipe, {**offloads, "FSDP_OFFLOAD_PARAMS": "false"})
    with pytest.raises(ValueError, match=r"devices\.weights: a single rank does not shard weights"):
        check_sharding(recipe, {})
    (found,) = check_sharding_settings(recipe, world=1)
    assert (found.status, found.fix) == ("FAILED", "--set devices.weights=null")


def test_missing_deepspeed_is_reported_only_if_several_ranks_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = sharded("zero2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_sharding(recipe, {})  # a single rank shards nothing
    (found,) = check_sharding_settings(recipe, world=2)
    assert (found.status, found.fix) == ("FAILED", "pip install 'retouch[deepspeed]'")
    (alone,) = check_sharding_settings(recipe, world=1)
    assert (alone.status, alone.text) == ("ok", "a single rank shards nothing")


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [pytest.param("zero2", marks=NO_DEEPSPEED), "fsdp2"])
def test_shipped_accelerate_configurations_start_sharded_ranks(tmp_path: Path, sharding: str) -> None:
    tiny_writer_runs.save_writer(tmp_path / "writer")
    document = tiny_writer_runs.recipe(tmp_path, tmp_path / "writer", steps=1, sharding=sharding, eval={"tasks": 2}, ranks=2)
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(document))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path]), "OMP_NUM_THREADS": "1"}
    environment |= {"DS_ACCELERATOR": "cpu"}
    port = rank_environments(2)[0]["MASTER_PORT"]
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    command += ["--config_file", str(packaged_recipes() / "accelerate" / f"{sharding}.yaml")]
    command += ["--num_processes", "2", "--main_process_port", port, "-m", "retouch.cli", "train", str(file)]
    made = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-3000:]
    folder = RunFolder(tmp_path / "written")
    assert f"2 ranks with {sharding}" in folder.log(0).read_text()
    timings = json.loads(folder.timings.read_text().splitlines()[0])
    assert {"memory/peak_gb/rank-0", "memory/peak_gb/rank-1"} <= timings.keys()
    assert folder.summary.exists()


# Checkpoints of sharded state


@pytest.fixture(scope="module", params=[pytest.param("zero2", marks=NO_DEEPSPEED), "fsdp2"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The kind of sharding, and the folder in which two ranks left a checkpoint."""
    folder = tmp_path_factory.mktemp("saved")
    run(2, request.param, folder, "begin")
    return request.param, folder


def run(ranks: int, kind: str, folder: Path, mode: str, dtype: str = "float32") -> dict[str, Tensor]:
    """What ``ranks`` ranks end with."""
    on_ranks(ranks, [str(SUPPORT / "sharded_states.py"), kind, str(folder), mode, dtype], folder / f"logs-{ranks}")
    return load_file(folder / f"{ranks}.safetensors")


@pytest.mark.slow
def test_saving_a_sharded_checkpoint_needs_memory_for_less_than_four_tensors(saved: tuple[str, Path]) -> None:
    found: dict[str, Any] = json.loads((saved[1] / "2.json").read_text())
    assert sum(found["state"].values()) > 60 * found["largest"]
    assert found["held"] < 4 * found["largest"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_sharded_checkpoint_resumes_on_other_numbers_of_ranks(saved: tuple[str, Path], ranks: int) -> None:
    kind, folder = saved
    wanted = load_file(folder / "2.safetensors")
    found = run(ranks, kind if ranks > 1 else "alone", folder, "continue")
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-6, msg=name)
    moved = (wanted["blocks.0.linear.weight"] - wanted["reference/blocks.0.linear.weight"]).abs().max()
    assert moved > 1e-3
    measured: dict[str, Any] = json.loads((folder / f"{ranks}.json").read_text())
    moments = measured["state"]["optimizer"] / ranks  # this rank's share; the weights exist before the checkpoint is read
    assert measured["held"] < moments + measured["largest"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("zero2", marks=NO_DEEPSPEED), "fsdp2"])
def test_master_weights_are_saved_by_two_ranks_and_continued_by_one(tmp_path: Path, kind: str) -> None:
    wanted = run(2, kind, tmp_path, "begin", "bfloat16")
    found = run(1, "alone", tmp_path, "continue", "bfloat16")
    assert found.keys() == wanted.keys()
    masters = [name for name in found if name.endswith("/master")]
    assert len(masters) == 48
    for name in masters:
        # Gradients in bf16 depend on the number of rows that a rank sums, and Adam scales all of them to the learning rate of 1e-3.
        assert (found[name] - wanted[name]).abs().mean() < 2e-5, name
        weight = wanted[name.removesuffix("/master")]
        assert torch.equal(wanted[name].bfloat16(), weight)
        assert weight.numel() == 3 or not torch.equal(wanted[name], weight.float())
