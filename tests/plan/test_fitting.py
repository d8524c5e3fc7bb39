"""The keys that ``retouch_plan.fitting.fit`` chooses, on a made-up model: 20 GB of weights, and an encoder of 10 GB."""

from collections import Counter
from dataclasses import replace

import pytest

from retouch.recipe.recipe import load
from retouch_plan import fitting
from retouch_plan.dry_run import DryRun
from retouch_plan.machines import MACHINES
from retouch_plan.meter import Stage

GB = 10**9
BLOCKS = [GB] * 20


def made_up(recipe, machine, **_):
    """A dry run whose step needs 5 GB of activations for each row, and 1 GB with gradient checkpointing."""
    policy, devices = recipe.policy, recipe.devices
    swapped = 0 if devices is None else devices.swap_blocks
    weights = {"weights: transformer": sum(BLOCKS) - (swapped - 2) * GB if swapped else sum(BLOCKS)}
    encoders = {"weights: text_encoder": {None: 10, "8bit": 6, "4bit": 3}[policy.base and policy.base.text_encoders] * GB}
    encoder = {} if policy.prompt_embeddings == "cached" else encoders
    row = {False: 5, True: 1, "cpu": 0.6}[policy.gradient_checkpointing]
    held = {
        "build": encoders,
        "rollout": {**weights, **encoder, "activations": recipe.rollout.chunk * GB // 10},
        "update": {**weights, **encoder, "activations": int(recipe.microbatch * row * GB)},
    }
    stages = {name: Stage(most={(0, ("mm", GB, False)): (sum(each.values()), Counter(each))}) for name, each in held.items()}
    return DryRun(stages=stages, world=1, phases=(), evaluations=1, checkpoint=GB, host_peak=GB, units={})


@pytest.fixture(autouse=True)
def _made_up(monkeypatch):
    monkeypatch.setattr(fitting, "dry_run", made_up)
    monkeypatch.setattr(fitting, "block_bytes", lambda model: BLOCKS)


@pytest.mark.parametrize(
    ("card", "keys"),
    [
        ("h200", {}),
        ("80gb", {"microbatch": 8}),
        ("48gb", {"microbatch": 2}),
        ("24gb", {"policy.gradient_checkpointing": True, "policy.prompt_embeddings": "cached", "microbatch": 2}),
        (
            "16gb",
            {
                **{"policy.gradient_checkpointing": True, "policy.prompt_embeddings": "cached", "microbatch": 4},
                **{"devices.swap_blocks": 11},
            },
        ),
    ],
)
def test_the_cheapest_keys_with_which_a_recipe_fits(card, keys):
    recipe = load("recipes/sd3/ocr-grpo.jsonnet", ["ranks=1", "microbatch=16", "rollout.chunk=4", "group_size=16"])
    assert fitting.fit(recipe, MACHINES[card])[0] == keys


@pytest.mark.parametrize(("memory", "bits"), [(12, None), (11, "8bit"), (6, "4bit")])
def test_text_encoders_that_do_not_fit_alone_are_quantised_in_as_many_bits_as_fit(memory, bits):
    """Encoded prompts are cached, so the encoders are on the device before the transformer is."""
    recipe = load("recipes/sd3/ocr-grpo.jsonnet", ["ranks=1", "policy.compile=null", "rollout.chunk=1"])
    keys, _ = fitting.fit(recipe, replace(MACHINES["12gb"], memory=memory * GB))
    assert keys["policy.prompt_embeddings"] == "cached"
    assert keys.get("policy.base.text_encoders") == bits


def test_a_recipe_that_fits_with_no_key_is_refused_with_what_holds_the_memory():
    recipe = load("recipes/sd3/ocr-grpo.jsonnet", ["ranks=1", "policy.compile=null"])
    with pytest.raises(
        ValueError, match=r"sd3-ocr-grpo needs 3.0 GB in build \(3.0 GB weights: text_encoder\), and a tenth of the"
    ):
        fitting.fit(recipe, replace(MACHINES["12gb"], memory=3 * GB))
