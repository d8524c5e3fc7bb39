"""Blocks and activations that wait in CPU memory: a run has the same bits, also after resuming."""

import json
from pathlib import Path
from typing import Any

import pytest

import tiny_recipes
from retouch.distributed.ranks import Ranks
from retouch.models.offloading import SwappedBlocks
from retouch.models.parts import repeated_blocks
from retouch.recipe.recipe import parse
from retouch.run.build import assemble_policy
from retouch.run.session import run
from slow_params import slow_except

WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "blocks": {"devices": {"swap_blocks": 2}},
    "all blocks": {"devices": {"swap_blocks": 4}},
    "activations": {"policy": {"gradient_checkpointing": "cpu"}},
    "both": {"devices": {"swap_blocks": 2, "offload": True}, "policy": {"gradient_checkpointing": "cpu"}},
}


def small(folder: Path, way: str, *, steps: int = 2, **policy: Any) -> dict[str, Any]:
    changes = WAYS[way]
    keys = {**tiny_recipes.SMALL["policy"], "gradient_checkpointing": True, **changes.get("policy", {}), **policy}
    made = {**tiny_recipes.SMALL, "out": str(folder), "device": "cpu", "trackers": [], "steps": steps, "policy": keys}
    return made | ({"devices": changes["devices"]} if "devices" in changes else {})


def result(folder: Path) -> list[Any]:
    lines = [json.loads(line) for line in (folder / "small" / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in lines]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("plain")
    assert run(parse(small(folder, "none")), fresh=False) == 0
    return result(folder)


@pytest.mark.parametrize("way", slow_except(["both"], ["blocks", "all blocks", "activations", "both"]))
def test_a_run_has_the_same_bits_if_blocks_or_activations_wait_in_cpu_memory(tmp_path: Path, way: str, plain: list[Any]) -> None:
    assert run(parse(small(tmp_path, way, steps=1)), fresh=False) == 0
    assert run(parse(small(tmp_path, way)), fresh=False) == 0  # resumed
    assert result(tmp_path) == plain


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": {"gradient_checkpointing": False}}, "set policy.gradient_checkpointing to true"),
        ({"policy": {"train": {"kind": "full"}}}, "only frozen weights can wait; use policy.train.kind lora"),
        ({"policy": {"compile": "regional"}}, "set policy.compile to null"),
        (
            {"policy": {"model": {"kind": "import", "class": "tiny_models:Anything"}}},
            "only for models in the layout of a diffusers",
        ),
        ({"sharding": "fsdp2"}, "it does not go with sharding fsdp2; set sharding to null"),
        ({"sharding": "zero2"}, "it does not go with sharding zero2; set sharding to null"),
    ],
)
def test_blocks_that_cannot_wait_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    document = small(tmp_path, "blocks", **changes.get("policy", {}))
    with pytest.raises(ValueError, match=f"devices.swap_blocks: .*{message}"):
        parse(document | {key: value for key, value in changes.items() if key != "policy"})


def test_more_blocks_than_the_model_has_are_refused_before_training(tmp_path: Path) -> None:
    recipe = parse({**small(tmp_path, "blocks"), "devices": {"swap_blocks": 99}})
    with pytest.raises(ValueError, match=r"devices.swap_blocks: 99, and the transformer has \d+ blocks; set at most"):
        assemble_policy(recipe, Ranks())


def test_only_the_last_blocks_wait_and_trained_weights_do_not(tmp_path: Path) -> None:
    """Each block's weights are replaced while it computes, and are the same tensors afterwards."""
    module: Any = assemble_policy(parse(small(tmp_path, "blocks")), Ranks()).model.module
    blocks, seen = repeated_blocks(module), []
    swapped: SwappedBlocks = blocks[-1].forward.func.__self__
    before = dict(module.named_parameters())
    waiting = {id(tensor) for part in swapped.frozen for _, _, tensor in part}
    assert waiting == {id(each) for block in blocks[-2:] for each in block.parameters() if not each.requires_grad}
    swapped.compute(2, lambda: seen.extend(blocks[-1].parameters()))
    assert {id(each) for each in seen if each.requires_grad} == {id(each) for each in blocks[-1].parameters() if each.requires_grad}
    assert not {id(each) for each in seen} & waiting
    assert all(module.get_parameter(name) is each for name, each in before.items())
