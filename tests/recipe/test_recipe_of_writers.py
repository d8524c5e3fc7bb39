"""Recipes of prompt-writing policies: accepted values, rejected values and their messages."""

from functools import partial
from typing import Any

import pytest

import changed_recipes
import retouch
from retouch.recipe.derived_facts import differences
from retouch.recipe.recipe import parse

BASE: dict[str, Any] = {
    "name": "try", "steps": 10, "tasks_per_step": 4, "group_size": 6, "learning_rate": 1e-4,
    "policy": {"kind": "autoregressive", "model": {"kind": "playground-writer"}},
    "rollout": {"kind": "tokens", "max_new_tokens": 20},
    "renderer": {"kind": "response", "model": {"kind": "playground"}, "encoder": "frozen", "num_steps": 6},
    "data": {"kind": "playground", "complexity": [2, 3], "count": 100},
    "reward": {"kind": "playground", "combine": {"overall": 1}},
    "objective": {"kind": "policy_gradient", "clip_low": 0.2, "clip_high": 0.2, "kl": {"kind": "k3", "weight": 0.01}},
}  # fmt: skip
PROMPT = {
    "policy__model": {"kind": "qwen", "path": "qwen"},
    "renderer": {"kind": "prompt", "model": {"kind": "sd3", "path": "sd3", "size": [64, 64]}, "num_steps": 6},
    "data": {"kind": "prompts", "path": "prompts.txt"},
    "reward": {"kind": "share", "combine": {"share": 1}},
}
SCENES = {
    "policy__model": {"kind": "playground-enhancer"},
    "renderer": {"kind": "prompt", "model": {"kind": "playground-text-to-image"}, "num_steps": 6},
    "data": {"kind": "playground-scenes", "complexity": [1, 2], "count": 100},
    "reward": {"kind": "playground-scenes", "combine": {"overall": 1}},
}
DENOISING = {"kind": "denoising", "model": {"kind": "playground"}, "train": {"kind": "full"}}
CHAIN = {"num_steps": 6, "transition": {"kind": "cps", "noise_level": 0.7}, "window": {"mode": "window", "size": 2}}

changed, raised = partial(changed_recipes.changed, BASE), partial(changed_recipes.raised, BASE)


def test_point_2_5_alpha_is_twice_the_rank_unless_it_is_given():
    assert retouch.Lora(rank=4) == retouch.Lora(rank=4, alpha=8)
    writer = parse(changed(policy__train={"kind": "lora", "rank": 8})).policy.train.lora
    assert (writer.rank, writer.alpha) == (8, 16)
    assert parse(changed(policy__train={"kind": "lora", "alpha": 8.0})).policy.train.lora.alpha == 8
    image_model = {"policy": {**DENOISING, "train": {"kind": "lora", "rank": 2}}, "rollout": CHAIN, "objective": {"kind": "nft"}}
    recipe = parse({**{key: value for key, value in BASE.items() if key != "renderer"}, **image_model})
    assert recipe.document()["policy"]["train"]["alpha"] == 4
    with pytest.raises(ValueError, match=r"^Lora: rank: should be greater than or equal to 1, not 0$"):
        retouch.Lora(rank=0)
    assert raised(policy__train={"kind": "lora", "rank": 0}) == ["policy.train.rank: should be greater than or equal to 1, not 0"]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"renderer": {**BASE["renderer"], "encoder": None}}, "renderer.encoder: None is not 'policy' or 'frozen'"),
        ({"rollout__kind": "token"}, "rollout.kind: 'token' is not one of '(no kind)', 'tokens'; did you mean 'tokens'?"),
        ({"rollout__num_steps": 3}, "rollout.num_steps: unknown key; there is renderer.num_steps or eval.num_steps"),
        ({"rollout__top_p": 1.5}, "rollout.top_p: should be less than or equal to 1, not 1.5"),
        ({"rollout__max_new_token": 3}, "rollout.max_new_token: unknown key; did you mean rollout.max_new_tokens?"),
        ({"policy__model__attention": "flash"},
         "policy.model.attention: 'flash' is not 'sdpa', 'flash_attention_2', 'flash_attention_3' or 'eager'"),
        ({"rollout": {**CHAIN, "temperature": 0.7}},
         "rollout.temperature: unknown key; only 'tokens' has it, and this has no kind"),
    ],
)  # fmt: skip
def test_invalid_keys_and_values_are_reported_with_their_full_path(changes, line):
    assert any(found.startswith(line) for found in raised(**changes)), raised(**changes)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"renderer": None}, "renderer"), ({"rollout": CHAIN}, "rollout.kind"),
        ({"steps": None, "phases": [{"name": "a", "steps": 2, "rollout": CHAIN}]}, "phases.0.rollout.kind"),
        ({"policy": DENOISING}, "renderer"), ({"policy": DENOISING, "renderer": None}, "rollout.kind"),
        ({"objective__kl__kind": "velocity"}, "objective.kl.kind"), ({"objective__kl__kind": "closed"}, "objective.kl.kind"),
        ({"objective__ratio_norm": True}, "objective.ratio_norm"), ({"objective": {"kind": "nft"}}, "objective.kind"),
        ({"objective": {"kind": "supervised"}}, "objective.kind"),
        ({"objective__clip_low": None}, "objective.clip_low, objective.clip_high"),
        ({"policy": DENOISING, "renderer": None, "rollout": CHAIN}, "objective.kl.kind"),
        ({"policy": DENOISING, "renderer": None, "rollout": CHAIN, "objective": {"kind": "sft"}}, "objective.kind"),
        ({"renderer__model": {"kind": "sd3", "path": "x", "size": [64, 64]}}, "renderer.model.kind"),
        ({"policy__model": {"kind": "qwen", "path": "x"}}, "policy.model.kind"),
        ({"policy__model": {"kind": "qwen-vl", "path": "x", "system": "write"}}, "policy.model.system, policy.model.area"),
        ({**PROMPT, "policy__model": {"kind": "playground-writer"}}, "policy.model.kind"),
        ({"samples": {"states": True}}, "samples.states"),
        ({**PROMPT, "renderer__model": {"kind": "playground"}}, "data.kind"),
        ({**PROMPT, "objective": {"kind": "sft"}}, "data"),
        ({"data": {"kind": "prompts", "path": "x"}, "reward": PROMPT["reward"]}, "data.kind"),
        ({"data": SCENES["data"], "reward": SCENES["reward"]}, "data.kind"), ({**SCENES, "reward": BASE["reward"]}, "reward.kind"),
        ({**SCENES, "data": BASE["data"]}, "reward.kind"),
        ({**SCENES, "renderer__kind": "response", "renderer__encoder": "frozen"}, "policy.model.kind"),
        ({"policy__model": SCENES["policy__model"]}, "policy.model.kind"), ({"group_size": 1}, "group_size"),
        ({"device": "cpu", "devices": {"policy": "cuda:0"}}, "device, devices.policy"),
        ({"policy": DENOISING, "renderer": None, "devices": {"renderer": "cuda:1"}}, "devices.renderer"),
        ({"policy__model": {"kind": "janus", "path": "x"}, "renderer": {"kind": "codes"}, "devices": {"offload": True}},
         "devices.offload"),
        ({"policy__train": {"kind": "lora"}, "devices": {"reference": "cpu"}}, "devices.reference"),
        ({"policy__train": {"kind": "full"}, "devices": {"reference": "cpu"}, "sharding": "fsdp2"}, "devices.reference"),
        ({"devices": {"weights": "cpu"}}, "devices.weights"),
        ({"devices": {"weights": "cpu"}, "sharding": "zero2"}, "devices.weights"),
        ({"policy__train": {"kind": "lora", "dropout": 0.1}}, "policy.train.dropout"),
    ],
)  # fmt: skip
def test_incompatible_values_are_rejected_with_an_explanation(changes, key):
    found = [line for line in raised(**changes) if line.startswith(f"{key}: ")]
    assert found, raised(**changes)
    assert len(found[0].removeprefix(key)) > 30


@pytest.mark.parametrize(
    "changes",
    [
        {}, PROMPT, SCENES, {**SCENES, "data__incomplete": 0.8, "objective": {"kind": "sft"}, "group_size": 1},
        {"objective": {"kind": "sft"}, "group_size": 1},
        {"objective": {"kind": "policy_gradient", "surrogate": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}, "microbatch": 1},
        {"policy__model": {"kind": "qwen-vl", "path": "x"}, "renderer__model": {"kind": "qwen-image-edit", "path": "y"}},
        {"renderer__encoder": "policy", "renderer__guidance_scale": 4.0, "policy__train": {"kind": "full"}},
    ],
)  # fmt: skip
def test_compatible_values_are_accepted(changes):
    assert parse(changed(**changes)).name == "try"


def test_a_run_can_resume_on_other_devices_but_not_with_another_encoder():
    old = parse(BASE)
    assert differences(old, parse(changed(devices={"renderer": "cuda:1", "offload": True}))) == []
    assert differences(old, parse(changed(devices={"weights": "cpu"}, sharding="fsdp2"))) == []
    assert differences(old, parse(changed(renderer__encoder="policy"))) != []


def test_held_out_tasks_of_playground_scenes_have_no_incomplete_completions():
    recipe = parse(changed(**SCENES, data__incomplete=0.8, eval__tasks=7, eval__complexity=[3], eval__seed=5))
    held_out = recipe.eval_data()
    assert (held_out.kind, held_out.count, held_out.seed, held_out.split) == ("playground-scenes", 7, 5, "test")
    assert (held_out.complexity, held_out.incomplete) == ({3: 1.0}, 0)
    assert parse(recipe.document()) == recipe
