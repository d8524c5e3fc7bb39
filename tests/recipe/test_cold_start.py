"""What a recipe costs before anything is loaded: reading one imports no torch, and showing the help imports next to nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "diffusers", "datasets", "peft", "accelerate", "numpy", "httpx", "openai"}
# A recipe that names a class of its own (``kind: 'import'``) imports the module of that class.
RECIPES = sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "recipes").rglob("*.jsonnet") if "kind: 'import'" not in path.read_text()
)


def imported(code: str) -> set[str]:
    """The modules that a new interpreter has imported after ``code``."""
    script = f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(json.loads(done.stderr.splitlines()[-1]))


def test_no_recipe_that_ships_needs_torch_to_be_read() -> None:
    found = imported(f"from retouch.recipe.recipe import load\nfor name in {RECIPES}: load(name)")
    assert not HEAVY & found
    assert "retouch.recipe.recipe" in found
    assert len(RECIPES) > 60


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["--version"]], ids=" ".join)
def test_help_imports_neither_torch_nor_the_schema(words: list[str]) -> None:
    found = imported(f"from retouch.cli import main\ntry: main({words})\nexcept SystemExit: pass")
    assert not (HEAVY | {"pydantic"}) & found
    assert len([name for name in found if name.startswith("retouch")]) < 25
