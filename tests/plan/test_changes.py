"""The changes that ``retouch doctor --rehearse`` tries: only those that a recipe allows, the cheapest in speed first."""

from pathlib import Path

import pytest

from retouch.recipe.recipe import load, parse
from retouch_plan.fitting import changes
from slow_params import slow_except

RECIPES = Path(__file__).parents[2] / "recipes"
HELD = {"weights: transformer": 40, "weights: text_encoder_2": 20, "weights: vae": 20, "AdamW's moments": 20}
STAGES = ("build", "preflight", "encode", "rollout", "render", "update", "evaluation")
SD3, EDIT, WRITER, EMU3 = "sd3/ocr-grpo", "qwen-image-edit/flow-grpo", "sd3/prompt-enhancer", "emu3/sft_s"


def tried(name, stage, *options, held=HELD, world=1):
    return list(changes(load(RECIPES / f"{name}.jsonnet", options), stage, held=held, world=world))


def order(found, *keys):
    """Whether these changes are all tried, in this order."""
    return [each for each in found if each in keys] == list(keys)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", slow_except([SD3, EMU3], [SD3, EDIT, WRITER, EMU3, "flux-fill/ip-adapter-nft", "playground/grpo"]))
def test_a_recipe_allows_every_change_that_is_tried(name, stage):
    recipe = load(RECIPES / f"{name}.jsonnet")
    found = [each for each in tried(name, stage, world=8) if not each.startswith("rollout.chunk=")]
    assert found
    for change in found:
        parse(recipe.document(), [change])


def test_changes_of_an_update_are_tried_from_the_cheapest_to_the_slowest():
    found = tried(SD3, "update", "ranks=1", "policy.gradient_checkpointing=false", "microbatch=2")
    assert found == [
        *("optimizer.moments=8bit", "policy.gradient_checkpointing=true", "microbatch=1", "policy.prompt_embeddings=cached"),
        *("optimizer.moments=cpu", "devices.offload=true"),
    ]


def test_the_autoencoder_is_sliced_before_batches_are_halved_and_tiled_after():
    found = tried(SD3, "render", "rollout.chunk=8", "rollout.equal_shapes=false")
    assert order(found, "policy.model.vae_slicing=true", "rollout.chunk=4", "policy.model.vae_tiling=true", "devices.offload=true")
    assert order(tried(WRITER, "render"), "renderer.model.vae_slicing=true", "renderer.model.vae_tiling=true")


def test_parts_that_hold_little_memory_are_left_where_they_are():
    found = tried(SD3, "update", held={**HELD, "weights: transformer": 10**6})
    assert not {each.partition("=")[0] for each in found} & {"optimizer.moments", "policy.prompt_embeddings", "devices.offload"}


def test_settings_that_a_recipe_has_are_not_tried_again():
    options = ("policy.prompt_embeddings=cached", "optimizer.moments=cpu", "devices.offload=true")
    slices = ("policy.model.vae_slicing=true", "policy.model.vae_tiling=true")
    keys = {each.partition("=")[0] for each in tried(EDIT, "evaluation", "ranks=1", *options, *slices)}
    assert not keys & {each.partition("=")[0] for each in (*options, *slices)}


def test_moments_in_cpu_memory_are_tried_after_moments_in_8_bits():
    found = tried(EDIT, "update", "ranks=1", "optimizer.moments=8bit")
    assert [each for each in found if each.startswith("optimizer.moments")] == ["optimizer.moments=cpu"]


def test_small_text_encoders_are_moved_if_they_are_large_together():
    held = {"activations": 990, "weights: text_encoder": 6, "weights: text_encoder_2": 6}
    assert "policy.prompt_embeddings=cached" in tried(SD3, "update", held=held)


@pytest.mark.parametrize(
    ("sharding", "moments"),
    [("null", ["optimizer.moments=8bit", "optimizer.moments=cpu"]), ("fsdp2", ["optimizer.moments=cpu"]), ("zero2", [])],
)
def test_only_the_moments_that_the_sharding_allows_are_tried(sharding, moments):
    found = tried(EDIT, "update", "ranks=8", f"sharding={sharding}", world=8)
    assert [each for each in found if each.startswith("optimizer.moments")] == moments


@pytest.mark.parametrize("name", [WRITER, EMU3])
def test_prompt_embeddings_of_a_language_model_are_not_cached(name):
    assert "policy.prompt_embeddings=cached" not in tried(name, "update")


def test_parts_of_an_imported_model_are_not_moved():
    document = load(RECIPES / "playground/grpo.jsonnet").document()
    document["policy"]["model"] = {"kind": "import", "class": "tiny_models:Anything"}
    recipe = parse(document, allow_imports=["tiny_models"])
    found = set(changes(recipe, "evaluation", held=HELD, world=1))
    assert "optimizer.moments=8bit" in found
    assert not found & {"policy.prompt_embeddings=cached", "devices.offload=true", "policy.model.vae_slicing=true"}
