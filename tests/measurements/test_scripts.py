"""Every script of measurements/ is run with small arguments, in a copy of the folders that it may write to."""

import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from warm_python import python

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "measurements"
FAST = {
    "judging/votes.py": "table", "league/quickstart_trials.py": "--repeat 5", "pipelines/table.py": "StableDiffusionXLPipeline",
    "playground/edit_by_edit.py": "--tasks 6", "playground/exploration.py": "s --tasks 4", "structure/shape.py": "--static",
}  # fmt: skip
SLOW = {
    "data/streams.py": "kills --rows 2048 --kills 0 --folder rows", "league/scaling.py": "--minutes 0",
    "speed/run.py": "--only trl --trl-steps 3 --trl-settings 9·image·tokens,·40·new --threads 1",
    "engines/image_tokens.py": "--rounds 1", "engines/text.py": "--rounds 1",
    "judging/gamed_judge.py": "--steps 5 --runs honest", "judging/judge_faults.py": "--steps 2 --seeds 0",
    "judging/quota.py": "--seconds 20 --processes 2", "league/league.py": "--page",
    "pipelines/learning.py": "runs --only pix2pix --pretraining 2 --steps 1 --tasks 4",
    "playground/pairs.py": "--tasks 8 --group 4 --steps 1 --pairs-per-step 2",
    "playground/references.py": "flux-fill/ip-adapter-grpo-playground",
    "quantized/learning.py": "runs --recipes playground/grpo --steps 1 --seeds 0", "quantized/peak.py": "--width 8",
    "rehearsal/before_after.py": "sd3/ocr-grpo", "rehearsal/cards.py": "sd3/one-gpu --cards 80gb",
    "rehearsal/speedup.py": "guidance", "rehearsal/table.py": "sd3/ocr-grpo", "robustness/archives.py": "--every 20",
    "robustness/exhaustion.py": "--every 18", "robustness/links.py": "--every 12", "robustness/payloads.py": "--requests 50",
    "robustness/ranks.py": "--only nothing", "robustness/replies.py": "", "robustness/soak.py": "--minutes 0.01",
    "serving/chaos.py": "--samples 100", "serving/dead_judges.py": "--deadline 5 --ranks 1",
    "serving/throughput.py": "--only sending --rounds 1", "speed/ledger_cost.py": "--rounds 1",
    "speed/compiled_start.py": "--layers 2 --backend eager",
    "view/overhead.py": "--steps 24 --block 6", "view/pages.py": "--runs 2 --samples 1000",
}  # fmt: skip
NEEDS = {"league/league.py": "optuna", "view/overhead.py": "playwright", "view/pages.py": "playwright"}
"""Modules that are not in every environment of the tests."""
NOT_RUN_HERE = {
    "engines/served.py": "needs the environment of vLLM (make engines); tests/engines_real runs its model, server and engine",
    "gpu/run.py": "test_gpu_checks.py makes its dry run",
    "gpu/steps.py": "test_gpu_checks.py compares the dry run of one of its cases; all cases take many minutes",
    "gpu/worker.py": "is started by gpu/run.py",
    "playground/photograph_folds.py": "trains five runs on the photographs of photographs.py",
    "playground/photographs.py": "copies photographs of scikit-image and scikit-learn, which no environment of the project has",
    "playground/picture.py": "draws a finished run",
    "results/results.py": "makes runs of many minutes; test_results.py tests its parts",
    "robustness/folders.py": "tests/run/test_damaged_folders.py runs it",
    "robustness/hostile.py": "starts the other scripts of its folder, all of which are run",
    "robustness/kills.py": "tests/run/test_resume.py runs it",
    "serving/bad_proxy.py": "is started by serving/chaos.py and robustness/soak.py",
    "serving/plain_server.py": "is started by serving/throughput.py",
    "structure/kill_matrix.py": "collects the whole suite; test_kill_matrix.py tests its parts",
    "structure/shape_probe.py": "is started by structure/shape.py",
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """The project with copies of the folders into which scripts write their results."""
    made = tmp_path_factory.mktemp("project")
    for name in ("measurements", "docs", "recipes"):
        shutil.copytree(ROOT / name, made / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("src", "tests", "examples", "README.md", "pyproject.toml"):
        (made / name).symlink_to(ROOT / name)
    return made


@pytest.mark.parametrize("script", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_point_2_2_a_script_runs_small(script, tree):
    module = NEEDS.get(script)
    if module is not None and (find_spec(module) is None or (module == "playwright" and shutil.which("chromium") is None)):
        pytest.skip(f"needs {module}")
    words = [word.replace("·", " ") for word in {**FAST, **SLOW}[script].split()]
    command = [python(), "-W", "ignore", str(tree / "measurements" / script), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False, timeout=840)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
    assert done.stdout


def test_point_2_2_every_script_is_in_one_table():
    scripts = [path for path in FOLDER.rglob("*.py") if '__name__ == "__main__"' in path.read_text(encoding="utf-8")]
    found = sorted(path.relative_to(FOLDER).as_posix() for path in scripts)
    assert sorted([*FAST, *SLOW, *NOT_RUN_HERE]) == found
