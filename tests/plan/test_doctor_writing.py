"""The doctor's checks of runs with a language model that writes for an image model: data, sharding and engines."""

import pytest
from huggingface_hub import constants

from retouch import cli
from retouch.recipe.recipe import load
from retouch_plan.checks import check_data, check_engines
from retouch_worlds.playground import playground_weights

A = "recipes/qwen-image-edit/writer-grpo.jsonnet"


@pytest.fixture(autouse=True)
def no_weights(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("cache")))


def test_training_on_a_benchmark_fails_before_its_download():
    ((finding, sets),) = check_data(load(A))
    assert (finding.status, sets) == ("FAILED", None)
    assert "Complex-Edit" in finding.text
    assert "GPT-Image-Edit-1.5M" in finding.text
    ((allowed, _),) = check_data(load(A, ["data.allow_test_sets=true"]))
    assert allowed.status == "note"


def test_zero3_is_refused_by_the_doctor(capsys):
    assert cli.main(["doctor", A, "--set", "sharding=zero3", "--device", "h200"]) != 0
    said = "".join(capsys.readouterr())
    assert "pop from an empty deque" in said
    assert "use zero2" in said


@pytest.mark.parametrize(
    ("recipe", "weights"),
    [
        ("recipes/qwen-image-edit/writer-grpo-frozen-playground.jsonnet", "writer"),
        ("recipes/sd3/prompt-enhancer-playground.jsonnet", "enhancer"),
    ],
)
def test_the_engine_of_a_playground_model_is_checked(recipe, weights):
    checked = load(recipe, ['rollout.engine={"kind": "vllm", "url": "http://127.0.0.1:9"}'])
    assert checked.policy.model.base_model == str(playground_weights(weights))
    (found,) = check_engines(checked)
    assert (found.status, found.subject) == ("FAILED", "engine")
    assert "http://127.0.0.1:9" in found.text
