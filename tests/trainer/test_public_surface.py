"""What ``retouch`` offers from Python: these names, each with an example that runs, and nothing that is slow to import."""

import doctest
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageStat

import retouch
import retouch_worlds.testing
import tiny_pipelines
from retouch.models.kinds import IMAGE_MODELS, LANGUAGE_MODELS
from retouch.rewards.parts import PARTS
from retouch.trainer.loaded_run import LoadedPolicy, LoadedRun

NAMES = {
    "AWM", "BatchAdvantage", "BestAdvantage", "CISPO", "CPSTransition", "CRD", "Callback", "CrossEntropy", "DGPO", "DPO", "DPPO",
    "DRaFT", "ExponentialAdvantage", "FullWeights", "GAEAdvantage", "GDPOAdvantage", "GRPO", "GSPO", "GroupAdvantage",
    "IpAdapter", "Kl", "Lora", "NFT", "ODETransition", "OPD", "PolicyGradient", "REINFORCE", "ReFL", "Recipe", "SDETransition",
    "Supervised", "Teacher", "Trainer", "benchmarks", "core", "judge_audit", "load_run", "models", "open_writer", "reward",
    "rewards", "sample", "score", "serve", "testing",
}  # fmt: skip
CORE = {
    "advantages", "approx_kl", "batch_relative", "best_of_group", "check_reward_range", "cispo", "clip_fraction",
    "clipped_surrogate", "clipped_value_loss", "decoupled", "discounted_returns", "dppo", "equal_groups", "explained_variance",
    "exponential_weights", "gae", "group_relative", "importance_weights", "reinforce", "rescale_rewards", "sequence_log_ratio",
    "surrogates", "turn_returns", "whiten", "zero_std_groups",
}  # fmt: skip


def public():
    """Every public function and class, by its name."""
    found = {f"retouch.{name}": getattr(retouch, name) for name in retouch.__all__}
    found |= {f"retouch.core.{name}": getattr(retouch.core, name) for name in retouch.core.__all__}
    found |= {f"retouch.testing.{name}": getattr(retouch_worlds.testing, name) for name in retouch_worlds.testing.__all__}
    found["retouch.rewards.load"] = retouch.rewards.load
    for path in PARTS.paths.values():
        name = path.partition(":")[2]
        found[f"retouch.rewards.{name}"] = getattr(retouch.rewards, name)
    found["retouch.core.gae.gae"] = retouch.core.gae.gae
    return {name: value for name, value in found.items() if not inspect.ismodule(value)}


def test_public_names_equal_the_expected_lists():
    assert set(retouch.__all__) == NAMES
    assert set(retouch.core.__all__) == CORE
    assert set(dir(retouch)) >= NAMES
    for name, hint in (("Trianer", "did you mean retouch.Trainer"), ("PPO", "GAEAdvantage"), ("RLOO", "leave_one_out")):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'; .*{hint}"):
            getattr(retouch, name)
    for hint in retouch._OTHER_NAMES.values():
        assert all(hasattr(retouch, name) for name in re.findall(r"retouch\.(\w+)", hint))
    with pytest.raises(AttributeError, match="no attribute 'grpo'"):
        retouch.core.grpo  # noqa: B018


def test_dir_lists_the_names_that_a_package_imports_on_use():
    expected = {
        "benchmarks": {"Suite", "compare", "run"},
        "core": CORE,
        "models": {"SD3", "SD3Model", "QwenImage", "QwenLanguage", "Janus"},
        "rewards": {"load", "Ocr", "OcrReward", "PickScore", "PickScoreReward", "VieScore"},
    }
    for package, names in expected.items():
        module = getattr(retouch, package)
        assert set(dir(module)) >= names, package
        assert not [name for name in dir(module) if not hasattr(module, name)], package


def test_the_import_is_fast_and_imports_no_torch():
    code = (
        "import time; start = time.process_time(); import retouch, sys; print(time.process_time() - start, 'torch' in sys.modules)"
    )
    lines = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout for _ in range(3)]
    assert all(line.split()[1] == "False" for line in lines)
    assert min(float(line.split()[0]) for line in lines) < 0.2


@retouch.reward(low=0, high=1)
def brightness(images, **kwargs):
    return [ImageStat.Stat(image.convert("L")).mean[0] / 255 for image in images]


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """The variables that the examples use."""
    image = Image.new("RGB", (8, 8), "red")
    root = tmp_path_factory.mktemp("examples")
    (root / "prompts.txt").write_text("".join(f"prompt {number}\n" for number in range(12)))
    names = {"retouch": retouch, "torch": torch, "Image": Image, "ImageStat": ImageStat, "image": image, "brightness": brightness}
    return {**names, "make_pipe": tiny_pipelines.sd3, "root": root}


@pytest.fixture(scope="module")
def playground():
    return retouch.testing.playground_policy()


@pytest.fixture(scope="module")
def trained(objects):
    """The folder of a run of one step."""
    made = retouch.Trainer(
        **{"model": objects["make_pipe"](), "reward_funcs": brightness, "train_dataset": [{"prompt": "blue"}, {"prompt": "green"}]},
        **{"peft_config": retouch.Lora(rank=2, alpha=2), "size": 32, "steps": 1, "group_size": 2, "tasks_per_step": 1},
        **{"rollout": {"num_steps": 2, "transition": {"kind": "sde", "noise_level": 0.7}}, "device": "cpu", "trackers": ()},
        **{"output_dir": objects["root"], "progress": False},
    )
    made.train()
    return made.folder


def run_examples(value, name, names):
    """Run the examples in an object's docstring; returns how many lines there are."""
    (test,) = doctest.DocTestFinder(recurse=False).find(value, name, globs=names)
    report: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append)
    assert not report, "".join(report)
    return len(test.examples)


def test_the_models_page_constructs_every_model_class():
    """tests/docs/test_blocks.py runs this code."""
    page = (Path(__file__).parents[2] / "docs" / "api" / "models.md").read_text(encoding="utf-8")
    for path in {*IMAGE_MODELS.paths.values(), *LANGUAGE_MODELS.paths.values()}:
        name = path.partition(":")[2]
        assert f"retouch.models.{name}(" in page or f"retouch.models.{name.removesuffix('Model')}(" in page, name


USE_A_RUN: dict[str, Callable[..., Any]] = {"LoadedRun.pipeline": LoadedRun.pipeline, "LoadedPolicy.sample": LoadedPolicy.sample}


@pytest.mark.parametrize("name", [*public(), *USE_A_RUN])
def test_the_docstring_example_of_every_public_name_runs(name, objects, request, monkeypatch):
    monkeypatch.chdir(objects["root"])
    names = dict(objects)
    if name in ("retouch.Trainer", "retouch.sample", "retouch.load_run", *USE_A_RUN):
        names["pipe"] = objects["make_pipe"]()
    if name in ("retouch.load_run", *USE_A_RUN):
        names["folder"] = request.getfixturevalue("trained")
        names["run"] = retouch.load_run(names["folder"], model=names["pipe"])
    if name.startswith("retouch.testing.check_"):
        names["policy"], names["batch"] = request.getfixturevalue("playground")
    assert run_examples({**public(), **USE_A_RUN}[name], name, names) >= 1, f"{name} has no example"
    assert os.getcwd() == str(objects["root"])
