"""docs/machines.md compares every full-size recipe with the recipe without its improvements of speed and memory."""

import importlib
import json
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import tiny_policies as tiny
import tiny_writing
from dry_run_scripts import call_in_new_process, script
from retouch.models.pipeline import Guided
from retouch.policies.decoding import CachedDecoding
from retouch.recipe.document import value_at
from retouch.types import Needs, Slice
from retouch_models.causal import PreallocatedCacheLayer
from slow_params import slow_after
from warm_python import run_python

BEFORE_AFTER, IMPROVEMENTS, TABLE = script("before_after"), script("improvements"), script("table")
KEPT: dict[str, dict[str, Any]] = BEFORE_AFTER.kept()
REHEARSED: dict[str, dict[str, Any]] = TABLE.kept()
ROOT = Path(__file__).parents[2]
NOT_COMPARED = (
    *("devices.offload", "devices.weights", "optimizer.moments", "policy.attention", "rollout.engine"),
    *("policy.model.vae_tiling", "renderer.model.vae_tiling", "renderer.model.vae_slicing"),
)
"""Keys that docs/machines.md says no full-size recipe sets."""


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    for variable, value in TABLE.VARIABLES.items():
        monkeypatch.setenv(variable, value)


def test_the_machines_page_contains_the_stored_tables():
    assert BEFORE_AFTER.tables(KEPT, REHEARSED) in (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
    assert list(KEPT) == list(REHEARSED), "every row of the table of recipes is compared"
    assert {each for row in KEPT.values() for each in row["off"]} == IMPROVEMENTS.IMPROVEMENTS.keys()


@pytest.mark.parametrize("name", slow_after(6, REHEARSED))
def test_the_kept_figures_are_for_the_present_recipe_without_all_its_improvements(name):
    recipe = TABLE.recipe_of(name)
    assert KEPT[name]["digest"] == BEFORE_AFTER.digest(name)
    assert KEPT[name]["off"] == IMPROVEMENTS.improvements_of(recipe)
    found = recipe.document()
    set_keys = [key for key in NOT_COMPARED if value_at(found, key)]
    assert not set_keys, "add an improvement, or change the sentence of docs/machines.md"
    assert found.get("sharding") in (None, "zero2")


@pytest.mark.parametrize("name", slow_after(6, REHEARSED))
def test_turning_off_the_improvements_of_a_recipe_changes_the_recipe(name):
    recipe = TABLE.recipe_of(name)
    found = IMPROVEMENTS.improvements_of(recipe)
    assert found
    for each in found:
        improvement = IMPROVEMENTS.IMPROVEMENTS[each]
        assert bool(improvement.off) != bool(improvement.patch)
        with IMPROVEMENTS.turned_off(recipe, [each]) as without:
            changed = without.document() != recipe.document()
            assert changed == bool(improvement.off)
            assert improvement.applies(without) != changed, "the setting does not turn the improvement off"
    with IMPROVEMENTS.turned_off(recipe, found) as without:
        left = IMPROVEMENTS.improvements_of(without)
    assert left == [each for each in found if IMPROVEMENTS.IMPROVEMENTS[each].patch]


@pytest.mark.parametrize("joint", [False, True])
def test_joint_guidance_computes_both_branches_in_one_forward_pass(joint):
    model = tiny.edit_model()
    model.module.to(torch.bfloat16)
    guided, tasks, order, sigma = Guided(model, 3.5), tiny.tasks(4)[3:], torch.tensor([0, 0]), torch.tensor([0.9, 0.4])
    conditioning = guided.encode(tasks).take(order)
    x = guided.initial_noise(conditioning, [torch.Generator().manual_seed(k) for k in range(2)])
    branches = [
        model.velocity(model.module, x, sigma, encode(tasks).take(order)) for encode in (model.encode, model.encode_negative)
    ]
    rows: list[int] = []
    model.module.register_forward_pre_hook(lambda module, args, kwargs: rows.append(len(kwargs["hidden_states"])), with_kwargs=True)
    with IMPROVEMENTS.joint_guidance() if joint else nullcontext():
        found = guided.velocity(guided.module, x, sigma, conditioning)
    assert rows == ([4] if joint else [2, 2])
    expected = model.combine(*branches, 3.5)
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_prompts_per_row_changes_the_rows_that_are_read_and_no_completion():
    def sampled():
        policy, batch = tiny_writing.policy(), tiny_writing.batch(group_size=3)
        read: list[int] = []
        own = policy.model.prefill

        def prefill(module, prompts):
            read.append(len(prompts))
            return own(module, prompts)

        with patch.object(policy.model, "prefill", prefill):
            made = policy.rollout(batch)
            rows, actions = made.mask.shape
            found = policy.evaluate(made, Slice(slice(0, rows), slice(0, actions)), Needs()).log_probs
        return read, made.ids, found

    tasks = len(tiny_writing.batch().tasks)
    read, ids, log_probs = sampled()
    with IMPROVEMENTS.prompts_per_row():
        read_per_row, same_ids, same_log_probs = sampled()
    assert read == [tasks, tasks]  # of the rollout and of the evaluation
    assert read_per_row == [3 * tasks]  # the evaluation computes whole rows, without a cache
    assert torch.equal(ids, same_ids)
    assert torch.allclose(log_probs, same_log_probs, atol=1e-5)
    assert CachedDecoding._prefill.__module__ == "retouch.policies.decoding"


def test_concatenated_cache_copies_all_tokens_and_keeps_their_values():
    def filled():
        layer = PreallocatedCacheLayer()
        with torch.no_grad():
            for first, tokens in ((0, 3), (3, 1), (4, 1)):
                states = torch.arange(first, first + tokens, dtype=torch.float32).view(1, 1, -1, 1)
                layer.update(states, -states)
        return layer

    def room(layer):
        return layer.keys.untyped_storage().nbytes() // layer.keys.element_size() - layer.keys.numel()

    preallocated = filled()
    with IMPROVEMENTS.concatenated_cache():
        concatenated = filled()
    assert room(preallocated) > 0
    assert room(concatenated) == 0
    assert concatenated.keys.flatten().tolist() == preallocated.keys.flatten().tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(concatenated.values, preallocated.values)


def test_own_text_encoder_keeps_the_encoder_of_the_editor():
    encoder = importlib.import_module("retouch_models.qwen_image.responses")
    editor, writer = tiny.edit_model(), nn.Linear(1, 1)
    text = editor.text.encoder
    with IMPROVEMENTS.own_text_encoder():
        encoder.share_encoder(editor, writer, policy_encodes=True, base_frozen=True, device=torch.device("cpu"))
        assert editor.text.encoder is text
    encoder.share_encoder(editor, writer, policy_encodes=True, base_frozen=True, device=torch.device("cpu"))
    assert editor.text.encoder is writer


@pytest.mark.slow
def test_kept_rows_are_made_again_only_if_the_digest_changes(tmp_path, monkeypatch):
    name = "emu3/sft_s"
    calls: list[list[str]] = []

    def made(function, called, off):
        calls.append(off)
        return {each: KEPT[called][each] for each in BEFORE_AFTER.FIGURES}

    page = tmp_path / "page.md"
    page.write_text(f"above\n{BEFORE_AFTER.MARK}\n{BEFORE_AFTER.MARK}\nbelow\n")
    for attribute, value in {"KEPT": tmp_path / "kept.json", "PAGE": page, "in_own_process": made}.items():
        monkeypatch.setattr(BEFORE_AFTER, attribute, value)
    monkeypatch.setattr(logging, "disable", lambda level: None)
    for _ in range(2):
        BEFORE_AFTER.main([name])
        assert calls == [KEPT[name]["off"]]
    assert BEFORE_AFTER.kept() == {name: KEPT[name]}
    tables = BEFORE_AFTER.tables({name: KEPT[name]}, REHEARSED)
    assert page.read_text() == f"above\n{BEFORE_AFTER.MARK}\n\n{tables}\n\n{BEFORE_AFTER.MARK}\nbelow\n"
    BEFORE_AFTER.KEPT.write_text(json.dumps({name: {**KEPT[name], "digest": "of another recipe"}}))
    BEFORE_AFTER.main([name])
    assert len(calls) == 2
    assert BEFORE_AFTER.kept() == {name: KEPT[name]}


@pytest.mark.slow
@pytest.mark.parametrize("name", REHEARSED)
def test_a_new_dry_run_without_the_improvements_matches_the_table(name):
    code = call_in_new_process("before_after", "rehearse_one", name, KEPT[name]["off"])
    printed = run_python("-c", code, timeout=1800)
    found, kept = json.loads(printed.splitlines()[-1]), KEPT[name]
    assert found["in"] == kept["in"]
    assert (found["peak"], found["modelled"]) == pytest.approx((kept["peak"], kept["modelled"]), rel=0.01)
    assert found["flops"] == pytest.approx(kept["flops"], rel=0.01)
