"""`make gpu` without a GPU: checks that fail, hang or are killed do not affect the others, and all run on tiny models."""

import importlib
import json
import math
import os
import runpy
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from retouch.core.transitions import transition
from retouch_plan.dry_run import host_seconds
from retouch_plan.machines import MACHINES, find_machine
from retouch_plan.meter import Work
from warm_python import python, run_python

FOLDER = Path(__file__).parents[2] / "measurements" / "gpu"
SUPPORT = Path(__file__).parents[1] / "support"
FAULTY = """
import os
import signal
import time

from findings import NotRun, at_most, measured


def fails(target):
    yield measured("before", 1)
    yield at_most("too large", 2, 1)


def raises(target):
    yield measured("before", 1)
    raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")


def hangs(target):
    yield measured("before", 1)
    time.sleep(600)


def is_killed(target):
    yield measured("before", 1)
    os.kill(os.getpid(), signal.SIGKILL)


def cannot_run(target):
    raise NotRun("this GPU has 24 GB")
    yield


def passes(target):
    yield at_most("small", 1, 2)
"""


@pytest.fixture
def module(monkeypatch):
    """Imports a module of the folder. Its modules have common names, so they are forgotten after the test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in {path.stem for path in FOLDER.glob("*.py")} - before:
        sys.modules.pop(name, None)


@pytest.fixture
def suite(module):
    return module("suite")


@pytest.mark.slow
def test_a_check_that_fails_hangs_or_is_killed_does_not_affect_the_others(suite, tmp_path, monkeypatch, capsys):
    (tmp_path / "faulty.py").write_text(FAULTY, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    limits = {"fails": 120, "raises": 120, "hangs": 20, "is_killed": 120, "cannot_run": 120, "absent": 120, "passes": 120}
    checks = [suite.Check(name, f"faulty:{name}", limit) for name, limit in limits.items()]
    results = suite.run_suite(checks, tmp_path / "out", seconds=600, dry_run=True)
    found = {result.check: result for result in results}
    assert {name: result.status for name, result in found.items()} == {
        **dict.fromkeys(("fails", "raises", "hangs", "is_killed", "absent"), "fail"),
        "cannot_run": "not run",
        "passes": "pass",
    }
    assert found["fails"].why == "too large is 2, at most 1"
    assert found["raises"].why.startswith("RuntimeError: CUDA out of memory. Tried to allocate 20.00 GiB (at faulty.py:")
    assert found["hangs"].why == "stopped after its limit of 20 s"
    assert found["is_killed"].why == "killed by SIGKILL, for lack of memory?"
    assert found["absent"].why.startswith("AttributeError")
    assert found["cannot_run"].why == "this GPU has 24 GB"
    for name in ("fails", "raises", "hangs", "is_killed"):  # findings before the failure are kept
        assert found[name].findings[0].name == "before"
    written = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["check"] for line in written] == list(limits)
    assert printed == written
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| **hangs** | 20 s | | **fail**: stopped after its limit of 20 s |" in table
    assert "| too large | 2 | at most 1 | fail |" in table
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["log.txt", "results.jsonl", "table.md"]


@pytest.mark.parametrize(("seconds", "needed"), [(1, 0), (60, 56)])
def test_checks_that_exceed_the_remaining_time_are_not_run(suite, tmp_path, seconds, needed):
    results = suite.run_suite([suite.Check("late", "none:late", 60, needed)], tmp_path, seconds=seconds, dry_run=True)
    assert [(result.status, result.why) for result in results] == [("not run", "the time was over")]


def test_the_checks_fit_9_minutes_and_the_most_important_ones_4(suite):
    run = runpy.run_path(str(FOLDER / "run.py"))
    checks = run["CHECKS"]
    assert sum(check.seconds for check in checks) <= 60 * run["MINUTES"] - suite.RESERVED_SECONDS
    assert all(check.limit >= 1.2 * check.seconds for check in checks)
    assert {check.name for check in checks[:4]} == {"environment", "sd3-step", "writer", "qwen-image"}
    assert sum(check.seconds for check in checks[:4]) <= 60 * 4 - suite.RESERVED_SECONDS


def test_only_takes_groups_and_checks(suite, monkeypatch, tmp_path):
    main, chosen = runpy.run_path(str(FOLDER / "run.py"))["main"], []
    monkeypatch.setitem(main.__globals__, "run_suite", lambda checks, *_, **__: chosen.extend(check.name for check in checks) or [])
    monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(tmp_path), "--only", "memory", "parity"])
    main()
    assert chosen == ["sd3-step", "qwen-image", "parity", "qwen-step", "flux-fill", "qwen-image-2"]


def test_qwen_image_has_the_settings_that_verl_omni_publishes(module, tmp_path):
    recipe = module("cases").QWEN_IMAGE.load(tmp_path, tiny=False)
    rollout, window, train = recipe.rollout, recipe.rollout.window, recipe.policy.train
    assert (recipe.group_size, recipe.minibatches, recipe.microbatch) == (16, 2, 16)
    assert (rollout.num_steps, rollout.guidance_scale, rollout.transition.noise_level) == (10, 4.0, 1.2)
    assert (window.size, window.low, window.high) == (2, 0, 5)
    assert (train.rank, train.alpha, recipe.policy.model.dtype, recipe.image_size) == (64, 128, "bfloat16", (512, 512))


def test_the_plain_loop_computes_the_same_sde_steps_as_the_library():
    sys.path.insert(0, str(FOLDER))
    try:
        plain = importlib.import_module("plain_loops")
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("plain_loops", None)
    sigmas = torch.tensor([1.0, 0.9, 0.6, 0.0])
    settings = SimpleNamespace(sigmas=sigmas, noise_level=0.7)
    x, velocity, following = torch.randn(3, 3, 4, 5, 5, generator=torch.Generator().manual_seed(0)).unbind()
    before, after = sigmas[[0, 1, 1]], sigmas[[1, 2, 2]]
    mean, std = plain.PlainLoop.transition(SimpleNamespace(settings=settings), x, velocity, before, after)
    expected = transition("sde", x, velocity, before, after, noise_level=0.7, sigma_max=sigmas[1], reduction="mean", next=following)
    torch.testing.assert_close(mean, expected.mean)
    torch.testing.assert_close(std.flatten(), expected.step_std)
    constant = expected.log_prob - plain.log_density(following, mean, std)  # cancels in every ratio
    torch.testing.assert_close(constant, torch.full((3,), -0.5 * math.log(2 * math.pi)))


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "was restarted"),
        ("", "killed-True: the run ended with exit code 0, and was not killed"),
        ("raise SystemExit(3)", "killed-True: the run ended with exit code 3, and was not killed"),
    ],
)
def test_point_2_4_a_run_that_ends_before_it_is_killed_fails_the_check(module, tmp_path, monkeypatch, program, expected):
    resume = module("resume")
    monkeypatch.setattr(resume, "DIES", program)
    training = resume.Training(tmp_path / "killed-True", ("", ()), dies_after=2)
    monkeypatch.setattr(training, "_start", lambda _: pytest.fail("was restarted"))
    with pytest.raises((RuntimeError, pytest.fail.Exception), match=expected):
        training.restart()


def test_the_sglang_check_is_not_run_if_sglang_is_not_installed(module, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(module("findings").NotRun, match="there is no sglang command: pip install"):
        next(module("image_server").run(SimpleNamespace(tiny=False)))


CHECKS = (
    *("environment", "parity", "sd3-step", "sd3-ratios", "sd3-loops"),
    *("resume", "qwen-step", "flux-fill", "qwen-ratios", "fsdp", "writer", "sglang", "qwen-image", "learns", "qwen-image-2"),
)
FAST = ("environment", "sd3-step", "sglang", "qwen-image")


def lines_by_check(text):
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {line["check"]: line for line in lines}


def failures(results, checks):
    """The lines of the checks that do not pass or were not run."""
    passed = {name for name, line in results.items() if (line["status"], line["why"]) == ("pass", "")}
    return {name: results.get(name, "not run") for name in {*checks, *results} if name not in passed or name not in checks}


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """Some of the checks on tiny models, in one process."""
    out = tmp_path_factory.mktemp("gpu")
    command = [python(), str(SUPPORT / "gpu_in_one_process.py"), str(out), *FAST]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    return {"log": done.stderr, "out": out, "results": lines_by_check(done.stdout)}


@pytest.mark.slow
def test_a_dry_run_passes_every_check(tmp_path):
    command = [python(), str(FOLDER / "run.py"), "--dry-run", "--out", str(tmp_path), "--minutes", "20"]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    results = lines_by_check((tmp_path / "results.jsonl").read_text())
    assert failures(results, CHECKS) == {}, (tmp_path / "log.txt").read_text()[-3000:]
    assert done.returncode == 0
    assert "| check | value | bound | verdict |" in done.stdout
    names = {check: [each["name"] for each in line["findings"]] for check, line in results.items()}
    assert {"library over bare", "library over that loop"} <= set(names["sd3-loops"])
    assert any("different shapes" in name for name in names["sd3-ratios"])
    assert len(names["parity"]) == 11
    writer = {each["name"]: each for each in results["writer"]["findings"]}
    for cache in ("growing", "static"):
        assert f"{cache} cache, 8 rows: time of a token" in writer
        assert 100 < writer[f"{cache} cache: kernels of a token"]["value"] < 2000  # two layers; operations, on a CPU
    assert writer["growing cache: host waits of a token"]["value"] >= 1  # the CPU checks after every token
    static = writer["static cache: host waits of a token"]
    assert static["value"] == pytest.approx(1 / 16)  # one check in 17 tokens
    assert static["ok"] is True
    assert writer["tokens that differ with a graph"]["ok"] is True


@pytest.mark.slow
def test_checks_report_stage_times_kernels_and_adapter_distances(dry_run):
    names = [each["name"] for each in dry_run["results"]["sd3-step"]["findings"]]
    for stage in ("rollout", "render", "update", "preflight"):
        assert f"{stage}: time" in names
    assert (dry_run["out"] / "sd3-kernels.txt").stat().st_size > 0
    findings = {each["name"]: each["value"] for each in dry_run["results"]["qwen-image"]["findings"]}
    for side in (512, 384):
        stages = sum(findings[f"{side} px, {stage}: time"] for stage in ("rollout", "render", "update"))
        per_image = next(value for name, value in findings.items() if name.startswith(f"{side} px: GPU-seconds per image"))
        assert per_image == pytest.approx(stages / 4, rel=0.05)  # four images, and a judge that takes no time
    distances = {each["name"]: each["value"] for each in dry_run["results"]["sglang"]["findings"] if "distance" in each["name"]}
    assert len(distances) == 3
    without = distances.pop("distance, adapter switched off in the policy")  # 0.07; the others are rounding, 0 and 0.01
    assert without > 0.03 > max(distances.values())


@pytest.mark.slow
def test_a_dry_run_reads_the_measured_rates(dry_run):
    path = dry_run["out"] / "profile.json"
    found = find_machine(str(path))
    assert found.half == json.loads(path.read_text())["half"]
    assert found.measured.startswith("measured by make gpu on")


@pytest.mark.slow
def test_no_check_mixes_devices(tmp_path):
    printed = run_python(SUPPORT / "gpu_on_fake.py", tmp_path, search=[SUPPORT], OMP_NUM_THREADS="1")
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert len(lines) == 10
    assert [line for line in lines if "error" in line or not line["values"]] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd3", "qwen-image-512"])
def test_the_stored_figures_match_a_dry_run(name):
    code = f"import json, steps; print(json.dumps(steps.rehearse_case({name!r})))"
    printed = run_python("-c", code, search=[FOLDER], OMP_NUM_THREADS="1")
    found = json.loads(printed.splitlines()[-1])
    kept = json.loads((FOLDER / "rehearsed.json").read_text())[name]
    for stage, figures in kept.items():
        for key in ("peak", "flops"):
            assert found[stage][key] == pytest.approx(figures[key], rel=0.01), f"{stage}, {key}: run measurements/gpu/steps.py"


def test_the_modelled_times_are_within_15_percent_of_those_that_an_h100_measured(module):
    measured, kept = (json.loads((FOLDER / name).read_text()) for name in ("measured.json", "rehearsed.json"))
    modelled = {(case, stage): kept[case][stage]["modelled"] for case, stages in measured["seconds"].items() for stage in stages}
    taken = {(case, stage): value for case, stages in measured["seconds"].items() for stage, value in stages.items()}
    assert len(taken) == 7
    assert modelled == pytest.approx(taken, rel=0.15)
    machine = replace(MACHINES["h100"], **measured["profile"])
    kernels = module("writer").REHEARSED_KERNELS
    for cache, seconds in measured["token"].items():
        work = Work(counts=Counter(kernels=kernels[f"{cache} cache"]))
        assert host_seconds(work, machine) == pytest.approx(seconds, rel=0.15)


@pytest.mark.parametrize(("name", "images"), [("qwen-image-512", 16), ("qwen-image-384", 16), ("qwen-image-2", 8)])
def test_the_speed_page_has_the_modelled_seconds(name, images):
    stages = json.loads((FOLDER / "rehearsed.json").read_text())[name]
    seconds = sum(stages[stage]["modelled"] for stage in ("rollout", "render", "update")) / images
    assert f"| {seconds:.2f}, modelled, not measured |" in (FOLDER.parents[1] / "docs" / "speed.md").read_text()
