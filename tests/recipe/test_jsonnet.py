"""Recipe files: Jsonnet, its imports and variables, and the packaged recipes, each of which must load."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from retouch.config import packaged
from retouch.config.packaged import available, find, packaged_recipes
from retouch.recipe import document
from retouch.recipe.document import evaluate
from retouch.recipe.recipe import load

PACKAGED = available()


def test_packaged_recipes_have_unique_names(monkeypatch):
    names = []
    for name in PACKAGED:
        monkeypatch.setenv("APP__RUN_NAME", Path(name).stem)  # some take their name from the environment
        names.append(load(packaged_recipes().parent / name).name)
    assert len(set(names)) == len(names) >= 5


def test_recipes_can_read_only_environment_variables_that_begin_with_app(tmp_path, monkeypatch):
    file = tmp_path / "a.jsonnet"
    file.write_text("{ path: std.extVar('APP__DATA') }")
    monkeypatch.setenv("APP__DATA", "pictures")
    assert evaluate(file) == {"path": "pictures"}
    file.write_text("{ path: std.extVar('HOME') }")
    assert "HOME" in os.environ
    with pytest.raises(ValueError, match=r"(?s)HOME.*begin with APP__"):
        evaluate(file)


def test_imports_are_searched_next_to_the_file_and_then_among_packaged_files(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "mine.libsonnet").write_text("{ x: (import '../x.json').x }")
    (tmp_path / "x.json").write_text('{"x": 3}')
    file = tmp_path / "a.jsonnet"
    file.write_text("(import 'lib/mine.libsonnet') + { kind: (import 'lib/playground.libsonnet').model.kind }")
    assert evaluate(file) == {"x": 3, "kind": "playground"}
    (tmp_path / "lib" / "playground.libsonnet").write_text("{ model: { kind: 'mine' } }")
    assert evaluate(file) == {"x": 3, "kind": "mine"}


def test_overrides_are_applied_before_the_check(tmp_path):
    recipe = load("recipes/photos.jsonnet", ["data.path=my photos", "steps=3", "eval.num_steps=null", "policy.train.rank=4"])
    assert (recipe.data.path, recipe.steps, recipe.policy.train.rank) == ("my photos", 3, 4)
    with pytest.raises(ValueError, match=r"photos\.jsonnet:\ndata\.pathh: unknown key; did you mean data\.path\?$"):
        load("recipes/photos.jsonnet", ["data.pathh=x"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{ a: ", "syntax error"), ("{ a: error 'no such size' }", "no such size"), ("[1]", "object with keys"),
        ("{ a: 1, a: 2 }", "duplicate"), ("{ steps: , }", "."), ("{\n  a: 1, //one\n  = 3,\n}", "."), ("{ a: missing }", "."),
        ("{ a: 1 } }", "."), ("steps: 3", "."), ("{ a: [1, 2 }", "."),
    ],
)  # fmt: skip
def test_errors_contain_the_file_name_and_a_suggestion_only_if_it_is_clear(tmp_path, text, says):
    file = tmp_path / "bad.jsonnet"
    file.write_text(text)
    with pytest.raises(ValueError, match=says) as caught:
        load(file)
    assert "bad.jsonnet" in str(caught.value)
    assert ("perhaps" in str(caught.value)) == (says == "syntax error")


def test_a_local_recipe_takes_precedence_over_a_packaged_one_and_other_names_are_not_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("recipes/../pyproject.toml", "recipes/lib/playground.libsonnet", "recipes"):
        with pytest.raises(ValueError, match="no such file"):
            find(name)
    with pytest.raises(ValueError, match=r"no such file.*did you mean quickstart\? `retouch recipes` lists them"):
        find("recipes/quickstrt.jsonnet")
    assert find("recipes/quickstart.jsonnet") == packaged_recipes() / "quickstart.jsonnet"
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "quickstart.jsonnet").write_text("{}")
    assert find("recipes/quickstart.jsonnet") == Path("recipes/quickstart.jsonnet")


def test_recipes_are_found_inside_an_installed_package(tmp_path):
    """The layout of the wheel: ``retouch/recipes`` next to the modules, without a source tree."""
    package = tmp_path / "site" / "retouch"
    (package / "config").mkdir(parents=True)
    for module in ("__init__.py", "config/__init__.py", "config/packaged.py"):
        (package / module).write_text((Path(packaged.__file__).parents[1] / module).read_text())
    (package / "recipes" / "lib").mkdir(parents=True)
    (package / "recipes" / "mine.jsonnet").write_text("{}")
    (package / "recipes" / "lib" / "x.libsonnet").write_text("{}")
    code = "from retouch.config.packaged import *; print(available(), find('recipes/mine.jsonnet'))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(package.parent)}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert done.stdout.strip() == f"['recipes/mine.jsonnet'] {package / 'recipes' / 'mine.jsonnet'}"


@pytest.mark.parametrize("words", ["import", "importstr", "importbin"])
@pytest.mark.parametrize(
    "target", ["/proc/self/environ", "/etc/passwd", "{home}/.aws/credentials", "{home}/.docker/config.json", "link.jsonnet"]
)
def test_a_recipe_cannot_import_hidden_files_or_files_of_other_types(tmp_path, words, target):
    for name in (".aws/credentials", ".docker/config.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text('{"key": "sk-0123456789"}')
    folder = tmp_path / "downloads"
    folder.mkdir()
    (folder / "link.jsonnet").symlink_to("/proc/self/environ")
    recipe = folder / "theirs.jsonnet"
    recipe.write_text(f"(import 'quickstart.jsonnet') + {{ name: std.md5({words} '{target.format(home=tmp_path)}') }}")
    with pytest.raises(ValueError, match=r"a recipe may import only files named \.jsonnet, .* that are not hidden"):
        load(recipe)


def test_packaged_recipes_can_be_imported_from_a_hidden_folder(tmp_path, monkeypatch):
    (tmp_path / ".venv").mkdir()
    shutil.copytree(packaged_recipes(), tmp_path / ".venv" / "recipes")
    monkeypatch.setattr(document, "packaged_recipes", lambda: tmp_path / ".venv" / "recipes")
    recipe = tmp_path / "mine.jsonnet"
    recipe.write_text("import 'playground/nft.jsonnet'")
    assert load(recipe).name == "playground-nft"


COMMA = "perhaps a comma is missing after the value that ends in line {}"


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("{\n  steps: 3\n  seed: 2,\n}", COMMA.format(2)),
        ("{\n  steps: 3  // three\n\n  // the seed\n  seed: 2,\n}", COMMA.format(2)),
        ("{\n  path: 'http://a.b'\n  seed: 2,\n}", COMMA.format(2)), ("{ complexity: [1 2] }", COMMA.format(1)),
        ("{ name: 'äöü€' seed: 2 }", COMMA.format(1)), ("{\n  steps: 3,//three\n  a: 1 b: 2 }", COMMA.format(3)),
        ('{\n  name: "x,\n  steps: 3\n}', "perhaps a closing quote is missing"),
        ("{\n  steps: 3,\n", "perhaps a closing bracket is missing"), ("{\n  steps: [3\n", "perhaps a closing bracket is missing"),
        ("", "perhaps the file is empty"), ("local a = 3\n{ steps: a }", "perhaps the semicolon after a `local` is missing"),
        ("local a = 3\nlocal b = 4;\n{ steps: a }", "perhaps the semicolon after a `local` is missing"),
        ("{ steps = 3 }", "perhaps the colon after a key is missing, or the key needs quotes"),
        ("{ learning-rate: 3 }", "perhaps the colon after a key is missing, or the key needs quotes"),
        ("{ steps 3 }", "perhaps the colon after a key is missing, or the key needs quotes"),
    ],
)  # fmt: skip
def test_a_syntax_error_says_what_may_be_missing(text, advice, tmp_path):
    file = tmp_path / "mine.jsonnet"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="syntax error") as caught:
        evaluate(str(file))
    assert str(caught.value).splitlines()[-1].strip() == advice


@pytest.mark.parametrize("broken", ["mine.jsonnet", "part.libsonnet"])
def test_a_file_that_is_not_utf_8_raises_with_its_name_and_the_offset(broken, tmp_path):
    (tmp_path / "mine.jsonnet").write_text("import 'part.libsonnet'")
    (tmp_path / "part.libsonnet").write_text("{}")
    (tmp_path / broken).write_bytes(b"{name: 'caf\xe9'}")
    with pytest.raises(ValueError, match=rf"{broken}: the byte at offset 11 is not UTF-8; save the file as UTF-8$"):
        evaluate(str(tmp_path / "mine.jsonnet"))
