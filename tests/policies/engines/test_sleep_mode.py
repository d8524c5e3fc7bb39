"""A vLLM server that sleeps between rollouts, against the double."""

import copy
from contextlib import contextmanager
from itertools import groupby

import pytest

import served_models
import tiny_writers
import tiny_writing
from retouch.policies.engine import EngineFault
from retouch.recipe.recipe import parse
from retouch_plan.checks import check_engines
from retouch_serve.engines.client import Client
from retouch_serve.engines.vllm import SLEEP, WAKE, SleepMode
from vllm_double import Double, serving


@contextmanager
def served(folder, train="full", **double):
    writer = tiny_writers.writer("qwen2.5", train="none", stop=tiny_writing.STOPS)
    twin = Double(copy.deepcopy(writer.module), **{"dev_mode": True, **double})
    tiny_writers.make_trainable(writer.module, train)
    with serving(twin) as url:
        yield served_models.policy(writer, url, folder, patience=0.2, max_mismatch=1e-3, sleep=True), twin


def batch(step=0):
    return tiny_writing.batch(tiny_writers.tasks(with_images=False), 4, step=step)


def gap(trajectory):
    return (trajectory.log_probs - trajectory.behaviour_log_probs)[trajectory.mask].abs().max()


def states(twin):
    return [state for state, _ in groupby(twin.states)]


@pytest.mark.parametrize("train", ["full", "lora"])
def test_the_server_is_awake_only_during_a_rollout(tmp_path, train):
    with served(tmp_path, train) as (policy, twin):
        for step in range(2):
            assert gap(policy.rollout(batch(step))) < 1e-4
            tiny_writers.perturb(policy.module, key=step)
        assert states(twin) == ["awake", "generates", "asleep"] * 2
        policy.engine.close()
        assert states(twin)[-1] == "awake"
        assert not twin.adapters
        assert not (tmp_path / "adapters").exists()


def test_a_server_without_sleep_mode_stops_the_run(tmp_path):
    wanted = r"refuses rollout\.engine\.sleep.*VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"
    with served(tmp_path, dev_mode=False) as (policy, _), pytest.raises(EngineFault, match=wanted):
        policy.rollout(batch())


@pytest.mark.parametrize(("path", "says"), [(SLEEP, "did not go to sleep"), (WAKE, "did not wake up")])
def test_a_server_that_does_not_sleep_or_wake_up_stops_the_run(tmp_path, path, says):
    with served(tmp_path) as (policy, twin):
        twin.fault = lambda asked: setattr(twin, "asleep", path == WAKE) if asked == "/is_sleeping" else None
        with pytest.raises(EngineFault, match=says):
            policy.rollout(batch())


def test_only_rank_0_sends_sleep_requests_and_its_failure_raises_on_every_rank(tmp_path):
    with served(tmp_path) as (_, twin), serving(twin) as url, Client(url, timeout=5.0, patience=0.0) as client:
        SleepMode(first=False).sleep(client)
        assert twin.states == []
        with pytest.raises(EngineFault, match="rank 0 could not use the vLLM server's sleep mode"):
            SleepMode(first=False, any_rank=lambda flag: True).sleep(client)


def test_doctor_checks_sleep_mode_and_does_not_wake_a_sleeping_server(tmp_path, make):
    with served(tmp_path) as (policy, twin):
        engine = {"kind": "vllm", "url": policy.limits.url, "sleep": True}
        recipe = parse(make(rollout__engine=engine, policy__train={"kind": "full"}))

        def found():
            return [(finding.status, finding.text) for finding in check_engines(recipe)]

        assert any(status == "ok" and "frees its GPU memory between rollouts" in text for status, text in found())
        assert "generates" in twin.states
        twin.states.clear()
        twin.asleep = True
        assert any(status == "note" and "is asleep" in text for status, text in found())
        twin.sleeps = False
        assert any(status == "FAILED" and "without --enable-sleep-mode" in text for status, text in found())
        twin.dev_mode = False
        assert any(status == "FAILED" and "without VLLM_SERVER_DEV_MODE=1" in text for status, text in found())
        assert twin.states == []
