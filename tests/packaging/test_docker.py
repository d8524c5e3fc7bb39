"""The Dockerfile's steps run in a new environment, which is as near to `docker build` as a machine without its daemon comes."""

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEFAULTS = {"TORCH_INDEX": "https://pypi.org/simple", "EXTRAS": "judge,serve"}


@pytest.mark.slow
def test_the_steps_of_the_dockerfile_install_a_retouch_that_is_ready(tmp_path):
    text = (ROOT / "Dockerfile").read_text()
    assert re.findall(r"^ARG (\w+)=", text, re.MULTILINE) == list(DEFAULTS)
    steps = [line.removeprefix("RUN ") for line in text.splitlines() if line.startswith("RUN ") and "apt-get" not in line]
    assert len(steps) == 2
    venv.create(tmp_path / "python", with_pip=True)
    ignored = [line for line in (ROOT / ".dockerignore").read_text().split() if "/" not in line]
    shutil.copytree(ROOT, tmp_path / "source", ignore=shutil.ignore_patterns(*ignored, "__pycache__"))
    path = f"{tmp_path / 'python' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **DEFAULTS, "PATH": path}
    environment.pop("PYTHONPATH", None)
    for step in steps:
        done = subprocess.run(["sh", "-c", step], cwd=tmp_path / "source", env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
    (words,) = re.findall(r'^CMD \["(\w+)"\]$', text, re.MULTILINE)
    done = subprocess.run(["retouch", words], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.rstrip().splitlines()[-2] == "ready", done.stdout + done.stderr
    assert sys.prefix not in done.stdout
