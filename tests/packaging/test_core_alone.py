"""The core trains without the libraries that only extras install."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXTRAS = ("fastapi", "uvicorn", "httpx", "openai", "prometheus_client", "tensorboard", "rapidocr", "onnxruntime", "trl")
TRAIN = f"""
import sys
sys.modules |= dict.fromkeys({EXTRAS!r})  # so that an import of one of them fails
from importlib import util
found = util.find_spec
util.find_spec = lambda name, *more: None if name in {EXTRAS!r} else found(name, *more)
from retouch.cli import main
sys.exit(main(["train", *sys.argv[1:]]))
"""


def test_a_recipe_with_a_local_reward_trains_without_the_libraries_of_extras(tmp_path):
    changes = ["steps=1", "tasks_per_step=2", "group_size=2", "microbatch=4", "rollout.chunk=4", "eval.tasks=3", "eval.best_of_k=0"]
    changes += ["samples.tasks=1", 'reward={"kind":"share","combine":{"share":1.0}}', "eval.column=share", f"out={tmp_path}"]
    words = [word for change in changes for word in ("--set", change)]
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, "quickstart", *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "quickstart"
    assert json.loads((run / "metrics.jsonl").read_text())["step"] == 1
    assert (run / "report.html").is_file()
    assert not (run / "tensorboard").exists()
    assert "no curves for TensorBoard" in (run / "train.log").read_text()


def test_a_recipe_with_a_judge_says_which_extra_it_needs(tmp_path):
    judge = '{"kind":"endpoint","model":"m","base_url":"http://127.0.0.1:9/v1","key":null}'
    words = ["--set", f'reward={{"kind":"yes","judge":{judge},"combine":{{"yes":1.0}}}}', "--set", "eval.column=yes"]
    words += ["--set", f"out={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, "quickstart", *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 2, done.stderr
    assert "asking a judge needs the openai package: pip install 'retouch[judge]'" in done.stderr
    assert "Traceback" not in done.stderr
