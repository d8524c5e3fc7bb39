"""Cold start: parsing a recipe imports no torch, the help almost nothing, and a run only what its recipe needs."""

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "diffusers", "datasets", "peft", "accelerate", "numpy", "httpx", "openai"}
# A recipe that names a class of its own (``kind: 'import'``) imports the module of that class.
RECIPES = sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "recipes").rglob("*.jsonnet") if "kind: 'import'" not in path.read_text()
)


def imported(code):
    """The modules that a new interpreter has imported after ``code``."""
    script = f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(json.loads(done.stderr.splitlines()[-1]))


def test_loading_packaged_recipes_imports_no_torch():
    found = imported(f"from retouch.recipe.recipe import load\nfor name in {RECIPES}: load(name)")
    assert not HEAVY & found
    assert "retouch.recipe.recipe" in found
    assert len(RECIPES) > 60


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["--version"]], ids=" ".join)
def test_help_imports_neither_torch_nor_pydantic(words):
    found = imported(f"from retouch.cli import main\ntry: main({words})\nexcept SystemExit: pass")
    assert not (HEAVY | {"pydantic"}) & found
    assert len([name for name in found if name.startswith("retouch")]) < 25


@pytest.fixture(scope="module")
def shape():
    """``measurements/structure/shape.py``, which says which modules are those of the recipe's model family."""
    folder = str(ROOT / "measurements" / "structure")
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module("shape")
    finally:
        sys.path.remove(folder)


@pytest.fixture(scope="module")
def first_step(shape, tmp_path_factory):
    """What ``retouch train recipes/playground/grpo.jsonnet`` has imported and run at the first call of its model."""
    out = str(tmp_path_factory.mktemp("run"))
    words = ["train", "retouch.cli:main", shape.RECIPE, out, str(time.time()), "--calls"]
    done = subprocess.run([sys.executable, str(shape.PROBE), *words], cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_the_first_step_runs_at_most_60_modules_outside_its_model_family_and_data(shape, first_step):
    own = {"own family": 2, "own data": 5}
    families = [shape._family(name) for name in first_step["functions"]]
    assert {family: families.count(family) for family in own} == own
    ran = {name: calls for name, calls in first_step["functions"].items() if shape._family(name) not in own}
    assert "retouch.run.preflight" in ran
    assert len(ran) <= 60
    # Of these, 32 are the border of a run: the one opener of its files, the removal of keys, the content of its weights; and 4 read
    # what the wings add.
    assert sum(ran.values()) <= 336


UNUSED = """
retouch_bench retouch_judge retouch_plan retouch_serve retouch_view retouch_worlds.pretraining retouch_worlds.testing
retouch.inference retouch.integrations retouch.run.watch retouch_rewards retouch.data.sources
retouch_models.sd3 retouch_models.z_image retouch_models.qwen_image_2 retouch_models.emu3 retouch.models.lora
retouch.distributed.fsdp retouch.distributed.zero retouch.policies.autoregressive retouch.records.trackers
retouch.recipe.derived_facts retouch.renderers.prompts retouch_models.responses retouch.config.errors
"""


@pytest.mark.slow
def test_the_first_step_imports_no_package_and_no_library_that_its_recipe_does_not_need(first_step):
    assert [name for name in UNUSED.split() if importlib.util.find_spec(name) is None] == []
    unused = (*UNUSED.split(), *(f"{name}." for name in UNUSED.split()))
    assert [module for module in first_step["modules"] if module in unused or module.startswith(unused[len(unused) // 2 :])] == []
    assert not {"datasets", "deepspeed", "fastapi", "openai", "tensorboard", "trl", "wandb"} & set(first_step["packages"])
    assert len(first_step["modules"]) <= 165
