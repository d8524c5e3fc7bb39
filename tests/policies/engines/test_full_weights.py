"""All weights of a policy in a vLLM server, against the double: reloads, versions, restarts and failures."""

import copy
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import served_models
import tiny_emu3
import tiny_models
import tiny_writers
import tiny_writing
import vllm_runner
from retouch.distributed.ranks import Ranks
from retouch.policies.engine import EngineFault
from retouch.policies.rollout import EngineContext
from retouch.recipe.recipe import load, parse
from retouch.run.build import assemble
from retouch_plan.checks import check_engines
from retouch_serve.engines.sections import VllmEngine
from vllm_double import GENERATE, Double, at_first, serving


@contextmanager
def served(folder, kind="qwen2.5", *, patience=0.2, **double):
    """A policy whose weights all train, and the double behind it."""
    writer = tiny_writers.writer(kind, train="full", stop=tiny_writing.STOPS)
    twin = Double(copy.deepcopy(writer.module), dev_mode=True, **double)
    with serving(twin) as url:
        yield served_models.policy(writer, url, folder, patience=patience, max_mismatch=1e-3), twin


def batch(step=0):
    return tiny_writing.batch(tiny_writers.tasks(with_images=False), 4, step=step)


def gap(trajectory):
    return (trajectory.log_probs - trajectory.behaviour_log_probs)[trajectory.mask].abs().max()


def test_every_update_is_reloaded_before_the_next_rollout(tmp_path):
    with served(tmp_path) as (policy, twin):
        for step in range(3):
            assert gap(policy.rollout(batch(step))) < 1e-4
            assert gap(policy.rollout(batch(step).take(slice(4, 8)))) < 1e-4
            assert [folder.name for folder in (tmp_path / "adapters").iterdir()] == [twin.weight_version]
            tiny_writers.perturb(policy.module, key=step)
        assert len(twin.reloaded) == len(set(twin.reloaded)) == 3
        assert all(asked.model is None for asked in twin.asked)
        policy.engine.close()
        assert not (tmp_path / "adapters").exists()
        assert gap(policy.rollout(batch())) < 1e-4


def test_a_restarted_server_gets_the_weights_again(tmp_path):
    """After its restart it answers with its initial weights, and reports their version."""
    with served(tmp_path) as (policy, twin):
        tiny_writers.perturb(policy.module)
        start = copy.deepcopy(twin.base.state_dict())
        wanted = policy.rollout(batch())
        twin.base.load_state_dict(start)
        twin.weight_version = "default"
        again = policy.rollout(batch())
        assert torch.equal(again.ids, wanted.ids)
        assert gap(again) < 1e-4
        assert twin.reloaded == twin.reloaded[:1] * 2


def test_a_server_that_loses_the_weights_after_each_load_stops_the_run(tmp_path):
    with served(tmp_path) as (policy, twin):
        policy.rollout(batch())

        def forget(path):
            if path == GENERATE:
                twin.weight_version = "default"

        twin.fault = forget
        with pytest.raises(EngineFault, match="lost the weights again as soon as they were loaded"):
            policy.rollout(batch())


def test_a_failed_reload_raises_and_is_repeated_at_the_next_rollout(tmp_path):
    with served(tmp_path) as (policy, twin):
        policy.rollout(batch())
        save, policy.engine._weights._save = policy.engine._weights._save, lambda folder: None
        tiny_writers.perturb(policy.module)
        with pytest.raises(EngineFault, match=r"did not load the weights .*VLLM_SERVER_DEV_MODE=1"):
            policy.rollout(batch())
        assert twin.weight_version.startswith("loading-retouch-")
        policy.engine._weights._save = save
        assert gap(policy.rollout(batch())) < 1e-4


def test_a_server_that_does_not_clear_its_prefix_cache_stops_the_run(tmp_path):
    with served(tmp_path, clears_cache=False) as (policy, _), pytest.raises(EngineFault, match="did not clear its prefix cache"):
        policy.rollout(batch())


def test_missing_development_endpoints_fail_in_the_doctor_and_in_the_rollout(tmp_path, make):
    with served(tmp_path) as (policy, twin):
        recipe = parse(make(rollout__engine={"kind": "vllm", "url": policy.limits.url}, policy__train={"kind": "full"}))
        assert not [finding.text for finding in check_engines(recipe) if finding.status == "FAILED"]
        twin.dev_mode = False
        (failed,) = (finding for finding in check_engines(recipe) if finding.status == "FAILED")
        assert "VLLM_SERVER_DEV_MODE=1" in failed.text
        with pytest.raises(EngineFault, match="VLLM_SERVER_DEV_MODE=1"):
            policy.rollout(batch())


def test_temporary_faults_of_a_server_with_full_weights_are_retried(tmp_path):
    with served(tmp_path, patience=60.0) as (policy, twin):
        twin.fault = at_first("503", "reset")
        assert gap(policy.rollout(batch())) < 1e-4
        assert twin.fault(GENERATE) is None


def test_image_tokens_are_sampled_with_full_weights_and_the_plugin(tmp_path, monkeypatch):
    editor = tiny_emu3.editor(train="full")
    height, width = editor.grid
    longest = len(editor.words.header(height, width)) + height * (width + 1) + 3
    twin = Double(copy.deepcopy(editor.module), processor=vllm_runner.install_plugin(monkeypatch), dev_mode=True)
    task = tiny_models.task("one", "make it red", tiny_models.image(0, *tiny_emu3.SIZE))
    with serving(twin) as url:
        policy = served_models.policy(editor, url, tmp_path, patience=0.2, sampling={"max_new_tokens": longest})
        for step in range(2):
            trajectory = policy.rollout(tiny_writing.batch((task,), step=step))
            assert gap(trajectory) < 1e-4
            assert all(editor.codes_in(written.ids) is not None for written in trajectory.outputs)
            tiny_writers.perturb(policy.module, size=0.05, key=step)
    assert len(twin.reloaded) == 2


RECIPES = sorted(path.name for path in (Path(__file__).parents[3] / "recipes" / "emu3").glob("*__rl_*.jsonnet"))


@pytest.mark.parametrize("name", [name for name in RECIPES if "playground" not in name])
def test_full_weight_recipes_accept_a_vllm_server(name):
    engine = 'rollout.engine={"kind": "vllm", "url": "http://127.0.0.1:8000"}'
    recipe = load(Path(__file__).parents[3] / "recipes" / "emu3" / name, [engine])
    assert (recipe.policy.train.kind, recipe.sharding) == ("full", "zero2")
    assert len(RECIPES) == 21


def test_sharded_weights_are_refused(tmp_path):
    writer = tiny_writers.writer("qwen2.5", train="full")
    context = EngineContext(weights={}, save=lambda folder: None, folder=tmp_path, full_weights=True, in_step=True)
    with pytest.raises(ValueError, match="use sharding zero2 or none"):
        VllmEngine(url="http://127.0.0.1:9").build(writer, context)


def test_a_full_weight_recipe_builds_a_full_weight_publisher(make):
    recipe = parse(make(rollout__engine={"kind": "vllm", "url": "http://127.0.0.1:9"}, policy__train={"kind": "full"}))
    parts = assemble(recipe, Ranks())
    run, _ = parts.phase(0, stepper=parts.stepper(), judge=parts.judge)
    assert type(run.policy.engine._weights).__name__ == "FullWeightPublisher"
