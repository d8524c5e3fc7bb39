"""Out of memory: the error contains the keys that help in that stage, and the run resumes with them."""

import json
import sys

import pytest
import torch

import tiny_writer_runs
from retouch import cli
from retouch.config.errors import places
from retouch.config.packaged import available
from retouch.policies.denoising import DenoisingPolicy
from retouch.recipe.derived_facts import MEMORY_KEYS, OutOfMemory, differences, suggestions
from retouch.recipe.document import apply
from retouch.recipe.recipe import Recipe, load, parse
from retouch.records.folder import RunFolder
from retouch.renderers.base import LatentRenderer
from retouch.rewards.judging import RewardScorer
from retouch.run import step as loop
from retouch.run.folder import explain_out_of_memory
from retouch.run.metrics import Clock
from retouch.run.session import run
from tiny_recipes import SMALL

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB.\nMore about fragments"


def full_within(monkeypatch, caller, owner, method):
    """Make the method raise an out-of-memory error if a function named ``caller`` is on the call stack."""
    real = getattr(owner, method)

    def scarce(*args, **kwargs):
        frame = sys._getframe()
        while frame := frame.f_back:
            if frame.f_code.co_name == caller:
                raise torch.OutOfMemoryError(CUDA)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, method, scarce)


@pytest.mark.parametrize(
    ("stage", "caller", "owner", "method", "keys"),
    [
        ("loading", "assemble", RewardScorer, "__init__", ["retouch doctor"]),
        ("trial step", "preflight", DenoisingPolicy, "evaluate", ["rollout.chunk=64", "microbatch=16"]),
        ("evaluation", "_heldout", LatentRenderer, "__call__", ["eval.batch=64"]),
        ("rollout", "collect", DenoisingPolicy, "rollout", ["rollout.chunk=64"]),
        ("render", "collect", LatentRenderer, "__call__", ["rollout.chunk=64"]),
        ("update", "update", DenoisingPolicy, "evaluate", ["microbatch=16", "policy.gradient_checkpointing=true"]),
    ],
)
def test_out_of_memory_errors_contain_the_stage_and_the_keys_to_lower(tmp_path, monkeypatch, stage, caller, owner, method, keys):
    full_within(monkeypatch, caller, owner, method)
    with pytest.raises(
        OutOfMemory, match=f"^the {stage} does not fit: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    ) as raised:
        run(parse({**SMALL, "out": str(tmp_path)}), fresh=False)
    assert all(key in str(raised.value) for key in keys)
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)


def test_a_run_that_ran_out_of_memory_resumes_with_the_suggested_changes(tmp_path, monkeypatch, capsys):
    """The run ends at step 2 because of too little memory, and resumes with the changes at the end of its error."""
    recipe = tmp_path / "small.json"
    recipe.write_text(json.dumps({**SMALL, "out": str(tmp_path), "checkpoints": {"every": 1}}))
    with monkeypatch.context() as scarce:
        steps = 0

        def taken(*args, **kwargs):
            nonlocal steps
            steps += 1
            if steps == 2:
                raise torch.OutOfMemoryError(CUDA)
            return update(*args, **kwargs)

        update = loop.accumulate
        scarce.setattr(loop, "accumulate", taken)
        assert cli.main(["train", str(recipe)]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    changes = said.split("memory and time: ")[1].split()
    assert changes == ["--set", "microbatch=16", "--set", "policy.gradient_checkpointing=true"]
    folder = RunFolder(tmp_path / "small")
    assert len(folder.read_metrics()) == 1
    assert cli.main(["train", str(recipe), *changes]) == 0
    assert len(folder.read_metrics()) == 2


@pytest.mark.slow
def test_every_memory_key_exists_and_can_be_lowered_when_a_run_resumes(tmp_path):
    assert {path for paths in places(Recipe).values() for path in paths} >= MEMORY_KEYS
    writer = parse(tiny_writer_runs.recipe(tmp_path, tmp_path, rollout__chunk=64, microbatch=8))
    phased = parse(apply(SMALL, ["steps=null", 'phases=[{"name": "a", "steps": 2}]']))
    for recipe in [writer, phased, *map(load, available())]:
        for stage in ("trial step", "evaluation", "rollout", "render", "update", "encode"):
            lower = parse(apply(recipe.document(), suggestions(recipe, stage)))
            assert differences(recipe, lower) == []
    assert set(suggestions(writer, "update")) == {"microbatch=4", "policy.logits_at_once=128", "policy.gradient_checkpointing=true"}
    assert set(suggestions(writer, "render")) == {"renderer.batch=4", "renderer.encoder_batch=4", "rollout.chunk=32"}


def test_out_of_memory_errors_say_if_no_setting_can_be_lowered():
    recipe = parse(apply(SMALL, ["microbatch=1", "policy.gradient_checkpointing=true"]))
    for stage, says in (
        ("update", "No setting is left that needs less memory"),
        ("judge", "retouch serve"),
        ("watch", "No setting is left that needs less memory"),
    ):
        with pytest.raises(OutOfMemory, match=says), explain_out_of_memory(recipe, lambda stage=stage: stage):
            raise torch.OutOfMemoryError("")


def test_the_clock_keeps_the_stage_that_raised():
    clock = Clock()
    with clock("rollout"):
        assert clock.stage == "rollout"
    assert clock.stage is None
    with pytest.raises(ValueError, match="x"), clock("update"):
        raise ValueError("x")
    assert clock.stage == "update"
    assert set(clock.take()) == {"time/rollout", "time/update"}
