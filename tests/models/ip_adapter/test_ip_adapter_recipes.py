"""The full-size recipes of IP-Adapters: values of system B, differences, memory plans without a download, steps of the twins."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from changed_recipes import differing_paths, values
from retouch.models.pretrained import find_encoder
from retouch.recipe.recipe import check_ranks, load
from retouch.run.session import run
from retouch_worlds.models import tiny_fill as flux_parts
from retouch_worlds.pretraining.words import build_image_encoder, write
from slow_params import slow_except

FILL = "recipes/flux-fill/ip-adapter-{}.jsonnet"
QWEN = "recipes/qwen-image-edit/ip-adapter-grpo.jsonnet"
GRPO, PPO, NFT = (FILL.format(kind) for kind in ("grpo", "ppo", "nft"))
ALL = (GRPO, PPO, NFT, QWEN)


def twin(name: str) -> str:
    return name.replace(".jsonnet", "-playground.jsonnet")


def test_grpo_recipe_has_the_values_of_system_b() -> None:
    recipe = load(GRPO)
    check_ranks(recipe, 8)
    found = values(recipe.document())
    wanted = {
        "policy.model.kind": "flux-fill",
        "policy.model.path": "black-forest-labs/FLUX.1-Fill-dev",
        "policy.model.size": [512, 512],
        "policy.model.dtype": "bfloat16",
        "policy.train.kind": "ip-adapter",
        "policy.train.encoder": "google/siglip-so400m-patch14-384",
        "policy.train.tokens": 128,
        "policy.train.projection": "mlp",
        "policy.train.blocks": "all",
        "policy.train.scale": 1.0,
        "policy.train.dropout": 0.05,
        "policy.train.lora": None,
        "data.kind": "triplets",
        "data.reference": "other",
        "data.allow_test_sets": False,
        "reward.rewards.ocr.kind": "ocr",
        "reward.rewards.ocr.where": "mask",
        "reward.rewards.vlm.kind": "aspects",
        "reward.combine": "0.5 * ocr/correctness + 0.5 * vlm/quality",
        "advantage.kind": "group",
        "objective.kind": "policy_gradient",
        "objective.kl.kind": "velocity",
        "objective.kl.weight": 0.1,
        "rollout.transition.kind": "sde",
        "rollout.transition.noise_level": 0.8,
        "phases.0.objective.kind": "supervised",
        "phases.0.steps": 400,
        "phases.1.name": "rl",
        "phases.1.objective": None,
        "ranks": 8,
    }
    assert {path: found[path] for path in wanted} == wanted
    # The source's clip of 0.2 is for log-probabilities summed over 1024 tokens of 64.
    assert found["objective.clip_high"] == pytest.approx(0.2 / (1024 * 64), rel=0.02)
    assert found["rollout.reduction"] == "mean"


def test_recipes_differ_only_in_the_expected_keys() -> None:
    assert differing_paths(GRPO, PPO) == {"name", "advantage.kind", "advantage.baseline", "advantage.scale"}
    apart = differing_paths(GRPO, NFT)
    for_memory = {"policy.prompt_embeddings", "policy.ema", "policy.ema.decay", "policy.ema.every"}  # NFT has GPUs with more memory
    assert "policy.prompt_embeddings" in apart
    # The microbatch changes time and memory only. NFT does not train three steps of each image, so 3 has no advantage there.
    assert {path.partition(".")[0] for path in apart - for_memory} == {"name", "objective", "rollout", "microbatch"}
    assert load(NFT).objective.kind == "nft"
    assert values(load(NFT).document())["objective.reference_weight"] > 0
    qwen = differing_paths(GRPO, QWEN)
    assert {path.partition(".")[0] for path in qwen} == {"name", "policy", "data", "reward", "rollout", "eval", "microbatch"}
    assert {path for path in qwen if path.startswith("policy.train")} == {"policy.train.blocks"}


def test_published_recipes_have_the_values_of_the_scripts_of_system_b() -> None:
    for name, group_size, warm_up, decay in ((GRPO, 12, 100, 0.9999), (NFT, 4, 1, 0.999)):
        published = name.replace(".jsonnet", "-published.jsonnet")
        recipe = load(published)
        check_ranks(recipe, 8)
        found = values(recipe.document())
        wanted = {
            "group_size": group_size,
            "learning_rate": 1e-5,
            "phases.0.steps": warm_up,
            "rollout.num_steps": 20,
            "policy.model.guidance": 3.5,
            "policy.ema.decay": decay,
            "policy.ema.every": 1,
            "reward.combine": "0.7 * ocr/correctness + 0.3 * vlm/quality",
            "advantage.clip": 5.0,
        }
        assert {path: found[path] for path in wanted} == wanted
        changed = {path.partition(".")[0] for path in differing_paths(name, published)}
        assert changed <= {
            "name",
            "group_size",
            "tasks_per_step",
            "microbatch",
            "phases",
            "rollout",
            "policy",
            "reward",
            "objective",
            "eval",
        }
    assert differing_paths(GRPO, published.replace("nft", "grpo")).isdisjoint({"objective.kl.weight", "objective.clip_high"})
    # Half of the steps, from the first one on.
    window = load(published.replace("nft", "grpo")).rollout.window
    assert window.actions(num_steps=20, seed=0, step=7) == range(10)
    nft = load(published).objective
    # The source multiplies its policy loss by the largest advantage.
    assert (nft.beta, nft.reference_weight) == (0.5, pytest.approx(0.01 / nft.advantage_clip))


@pytest.mark.parametrize("name", ALL)
def test_playground_twin_keeps_the_algorithm_settings_of_the_full_recipe(name: str) -> None:
    same = ("policy.kind", "policy.train.kind", "policy.train.projection", "policy.train.blocks", "policy.train.scale")
    same += ("policy.train.dropout", "advantage", "objective", "optimizer", "rollout.transition", "rollout.window")
    same += ("rollout.guidance_scale", "phases.0.objective", "phases.0.name", "phases.1.name", "epochs", "reward.rewards.ocr.kind")
    assert not {path for path in differing_paths(name, twin(name)) if path.startswith(same)} - {"objective.kl.weight"}


@pytest.fixture(scope="module")
def untrained_image_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The playground's image model for words, untrained."""
    folder = tmp_path_factory.mktemp("untrained_image_model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        write(flux_parts.untrained(flux_parts.autoencoder().eval(), seed=0), folder)
    return folder


@pytest.mark.parametrize("name", slow_except([NFT], ALL))
def test_playground_twin_runs_warm_up_and_rl(name: str, untrained_image_model: Path, tmp_path: Path) -> None:
    small = [
        "tasks_per_step=2",
        "group_size=2",
        "phases.0.steps=1",
        "phases.0.tasks_per_step=2",
        "phases.1.steps=1",
        "rollout.num_steps=6",
    ]
    small += ["eval.tasks=2", "eval.num_steps=2", "samples.tasks=2", "eval.every=0", "trackers=[]", f"out={tmp_path}"]
    if name != QWEN:
        small.append(f"policy.model.path={untrained_image_model}")
    recipe = load(twin(name), small)
    assert run(recipe, fresh=False) == 0
    lines = [json.loads(line) for line in (recipe.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["phase"] for line in lines] == ["warm-up", "rl"]
    assert "reward/ocr/correctness" in lines[1]


def test_rebuilt_playground_encoder_is_the_shipped_one_up_to_rounding(tmp_path: Path) -> None:
    build_image_encoder(tmp_path)
    shipped = find_encoder("playground")
    assert shipped is not None
    assert (tmp_path / "preprocessor_config.json").read_bytes() == (shipped / "preprocessor_config.json").read_bytes()
    assert_close(load_file(tmp_path / "model.safetensors"), load_file(shipped / "model.safetensors"))
    made, kept = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path, shipped))
    assert made | {"transformers_version": kept["transformers_version"]} == kept
