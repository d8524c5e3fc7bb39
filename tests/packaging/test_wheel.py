"""The wheel: which files it contains, and that it works outside of the checkout.

The environment of these tests has only the wheel in its own folder; other libraries come from the environment that runs the tests.
``test_the_quickstart_trains_after_an_install_with_all_dependencies`` installs those as well.
"""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_BYTES = 30_000_000
# README.md's snippet, on a tiny pipeline and for two steps.
TINY = """
import retouch
from retouch_worlds.models.tiny_sd3 import tiny_sd3_pipeline

real = retouch.Trainer.__init__
small = {
    "model": tiny_sd3_pipeline(),
    "steps": 2,
    "rollout": {"num_steps": 3, "transition": {"kind": "sde", "noise_level": 0.7}},
    "device": "cpu",
    "trackers": (),
}
retouch.Trainer.__init__ = lambda self, **given: real(self, **{**given, **small})
"""
FEW = [
    *("steps=2", "tasks_per_step=2", "group_size=4", "microbatch=8", "eval.tasks=6", "eval.best_of_k=0", "eval.batch=6"),
    *("samples.tasks=1", "trackers=[]"),
]


def pip(*words, environment=None):
    """Run the pip of these tests, for another environment if one is given."""
    target = [] if environment is None else ["--python", str(environment / "bin" / "python")]
    command = [sys.executable, "-m", "pip", "--quiet", *target, *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory):
    """An environment with the wheel."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment)
    packages = environment / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    # Paths of a .pth file come after the environment's own folder, so its retouch is found and not the one of these tests.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip("install", "--no-deps", str(wheel), environment=environment)
    return environment


def run(environment, words, folder, *, code=0):
    """What a program of the environment prints, in ``folder``."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("RETOUCH")}
    command = [str(environment / "bin" / words[0]), *words[1:]]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_the_wheel_contains_exactly_the_files_of_the_package_and_the_recipes(wheel):
    assert wheel.stat().st_size <= MOST_BYTES
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    data = {
        str(file.relative_to(ROOT / "src"))
        for file in (ROOT / "src").glob("retouch*/**/*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    recipes = {f"retouch/recipes/{file.relative_to(ROOT / 'recipes')}" for file in (ROOT / "recipes").rglob("*") if file.is_file()}
    assert {"retouch/recipes/quickstart.jsonnet", "retouch/recipes/sd3/ocr-grpo-playground.jsonnet"} <= recipes
    assert {"retouch_view/report/page.js", "retouch_judge/prompts/alignment.txt", "retouch/py.typed"} <= data
    assert {name for name in names if ".dist-info/" not in name} == data | recipes


def test_the_installed_package_is_imported_and_not_the_checkout(installed, tmp_path):
    found = run(installed, ["python", "-c", "import retouch; print(retouch.__file__)"], tmp_path)
    assert Path(found.strip()).is_relative_to(installed)
    assert str(ROOT) not in run(installed, ["retouch", "recipes"], tmp_path)


def test_the_quickstart_trains_in_an_empty_folder(installed, tmp_path):
    changes = [word for change in FEW for word in ("--set", change)]
    printed = run(installed, ["retouch", "train", "quickstart", *changes], tmp_path)
    assert "step 2/2" in printed
    assert (tmp_path / "runs" / "quickstart" / "report.html").is_file()


@pytest.mark.slow
def test_the_recipe_tiny_sd3_trains_outside_of_the_checkout(installed, tmp_path):
    changes = [word for change in ("steps=1", "trackers=[]") for word in ("--set", change)]
    assert "step 1/1" in run(installed, ["retouch", "train", "tiny-sd3", *changes], tmp_path)


@pytest.mark.slow
def test_the_code_of_the_readme_runs(installed, tmp_path):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    snippet = next(block for block in readme.split("```python\n")[1:] if "retouch.Trainer(" in block).split("```")[0]
    (tmp_path / "script.py").write_text(TINY + snippet)
    run(installed, ["python", "script.py"], tmp_path)
    assert (tmp_path / "lora" / "pytorch_lora_weights.safetensors").is_file()


@pytest.mark.slow
def test_doctor_plans_a_recipe_for_real_weights(installed, tmp_path):
    printed = run(installed, ["retouch", "doctor", "sd3/ocr-grpo"], tmp_path, code=1)
    assert "not ready: data\n" in printed
    words = ("red", "blue", "green", "gold", "grey", "pink")
    (tmp_path / "words.txt").write_text("".join(f'a sign that says "{word}"\n' for word in words))
    printed = run(installed, ["retouch", "doctor", "sd3/ocr-grpo", "--set", "data.held_out=0.5"], tmp_path)
    assert "of h100 on each of 32 ranks, in " in printed
    assert printed.split("\nready\n")[1].startswith("next: retouch launch --nproc 32 sd3/ocr-grpo")


@pytest.mark.slow
def test_the_quickstart_trains_after_an_install_with_all_dependencies(wheel, tmp_path):
    venv.create(tmp_path / "environment")
    pip("install", "--constraint", str(ROOT / "constraints.txt"), str(wheel), environment=tmp_path / "environment")
    folder = tmp_path / "empty"
    folder.mkdir()
    changes = [word for change in FEW for word in ("--set", change)]
    assert "step 2/2" in run(tmp_path / "environment", ["retouch", "train", "quickstart", *changes], folder)
    assert "\nready\n" in run(tmp_path / "environment", ["retouch", "doctor"], folder)
