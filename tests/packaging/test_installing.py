"""What is installed: the wheel outside of the checkout, the core without the libraries of extras, and the slow tests by file."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import slow

from warm_python import python

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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_installed_package_is_imported_and_not_the_checkout(installed, tmp_path):
    found = run(installed, ["python", "-c", "import retouch; print(retouch.__file__)"], tmp_path)
    assert Path(found.strip()).is_relative_to(installed)
    assert str(ROOT) not in run(installed, ["retouch", "recipes"], tmp_path)


@pytest.mark.parametrize(
    ("recipe", "changes", "last"), [("quickstart", FEW, "2/2"), ("tiny-sd3", ["steps=1", "trackers=[]"], "1/1")]
)
@pytest.mark.slow
def test_a_recipe_trains_in_an_empty_folder(recipe, changes, last, installed, tmp_path):
    changes = [word for change in changes for word in ("--set", change)]
    assert f"step {last}" in run(installed, ["retouch", "train", recipe, *changes], tmp_path)
    assert (tmp_path / "runs" / recipe / "report.html").is_file()


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


def train(*words):
    return subprocess.run([python(), "-c", TRAIN, "quickstart", *words], cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_recipe_with_a_local_reward_trains_without_the_libraries_of_extras(tmp_path):
    changes = ["steps=1", "tasks_per_step=2", "group_size=2", "microbatch=4", "rollout.chunk=4", "eval.tasks=3", "eval.best_of_k=0"]
    changes += ["samples.tasks=1", 'reward={"kind":"share","combine":{"share":1.0}}', "eval.column=share", f"out={tmp_path}"]
    words = [word for change in changes for word in ("--set", change)]
    done = train(*words)
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
    done = train(*words)
    assert done.returncode == 2, done.stderr
    assert "asking a judge needs the openai package: pip install 'retouch[judge]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow  # it starts pytest many times
@pytest.mark.parametrize("code", ["pass", "raise AssertionError"])
def test_files_that_were_run_are_not_run_again(code, tmp_path, monkeypatch, capsys):
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q\nmarkers =\n  slow\n  engines\n")
    for name in ("one", "two"):
        (tmp_path / f"test_small_{name}.py").write_text(
            "from pathlib import Path\nimport pytest\n"
            "@pytest.mark.slow\ndef test_slowly():\n"
            f"    with Path('calls').open('a') as file: file.write({name!r})\n"
            f"    {code if name == 'two' else 'pass'}\n"
            "def test_quickly():\n    raise AssertionError\n"
        )
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slow, "ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # pytest starts faster

    def call(*words):
        Path("calls").write_text("")
        return slow.main([*words, "."]), Path("calls").read_text()

    expected = int(code != "pass")
    assert slow.main(["test_small_one.py"]) == 0
    assert call("--jobs", "2") == (expected, "two")
    assert call() == (expected, "")
    assert call("--repeat-failed") == (expected, "two" * expected)
    assert "2 slow tests in 2 files; 2 files are done" in capsys.readouterr().out
    with Path("test_small_one.py").open("a") as file:
        file.write("# changed\n")
    assert call() == (expected, "onetwo")
