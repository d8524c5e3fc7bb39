"""The documents: code and commands of docs/your-own.md work, and commands, links, files, names and keys of all pages exist."""

import ast
import contextlib
import functools
import importlib
import importlib.util
import io
import json
import logging
import os
import pkgutil
import re
import runpy
import shlex
import sys
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from pictures import encoded
from retouch import cli
from retouch.config.consent import GROUP
from retouch.config.errors import places
from retouch.models.kinds import IMAGE_MODELS
from retouch.recipe.derived_facts import OutOfMemory
from retouch.recipe.recipe import Recipe, load
from retouch.run.build import build_sets
from retouch.run.folder import explain_out_of_memory
from retouch.types import Sample, Task
from retouch_worlds.testing import check_reward

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "src" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
YOUR_OWN = (ROOT / "docs" / "your-own.md").read_text()
BLOCK = re.compile(r"(?:^`(?P<file>[\w./]+)`:\n\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
FILES = {block["file"]: block["text"] for block in BLOCK.finditer(YOUR_OWN) if block["file"]}
GENERATED = (  # by commands that the pages name
    "docs/results.md", "docs/pictures/enhancer.png", "docs/pictures/quickstart.png", "docs/pictures/writer.png",
)  # fmt: skip
SHORTER = ("tasks_per_step=2", "microbatch=4", "eval.tasks=3")
"""Settings for the command that trains on photographs, which takes the sizes of the recipe."""
COMMANDS = [line for block in BLOCK.finditer(YOUR_OWN) if block["language"] == "sh" for line in block["text"].splitlines()]


def words_of(command):
    """A command line as the shell hands it to `retouch`, without the comment."""
    return shlex.split(command, comments=True)[1:]


def commands(page):
    """Every `retouch ...` and `make ...` in a page: lines of shell blocks, and code within the text."""
    text = page.read_text()
    lines = [line for block in BLOCK.finditer(text) if block["language"] == "sh" for line in block["text"].splitlines()]
    spans = re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))
    for command in [*lines, *spans]:
        yield from re.findall(r"^(?:\w+=\S+ )*((?:retouch|make) .*)$", command.strip())


def slug(heading):
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


# The data, reward and model of docs/your-own.md


def picture(number, *, mask=False):
    image = Image.new("L" if mask else "RGB", (64, 48))
    image.paste(255 if mask else (40 * number % 256, 90, 200), (8, 8, 40, 40))
    return image


def png(number):
    return encoded(picture(number))


def make_pictures(folder):
    """The files that the metadata names."""
    for number, line in enumerate((folder / "metadata.jsonl").read_text().splitlines()):
        for key, value in json.loads(line).items():
            if key in ("file_name", "target", "mask"):
                picture(number, mask=key == "mask").save(folder / value)


def make_table(folder, columns):
    """A parquet file with the columns that the recipe maps."""
    folder.mkdir()
    made = {columns["instruction"]: [f"make it red, number {k}" for k in range(6)]}
    made |= {columns[field]: [png(k) for k in range(6)] for field in ("image", "target")}
    pyarrow.parquet.write_table(pyarrow.table(made), folder / "train.parquet")


@pytest.fixture(scope="module")
def page_folder(tmp_path_factory):
    """A working directory with every file of the page, importable as for `retouch`; everything is undone afterwards."""
    folder = tmp_path_factory.mktemp("own")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    make_pictures(folder / "my_photos")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path, str(folder)])
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        make_table(folder / "my_table", load("my_table.jsonnet").data.columns)
        yield folder
    for name in FILES:
        sys.modules.pop(Path(name).stem, None)
    log = logging.getLogger("retouch")
    for handler in [*log.handlers]:
        log.removeHandler(handler)
        handler.close()


def module(name):
    return importlib.import_module(name)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(words_of(command)[:3]))
def test_commands_of_the_your_own_page_succeed(page_folder, command, monkeypatch):
    allowed = os.environ["RETOUCH_ALLOW_IMPORTS"]
    monkeypatch.delenv("RETOUCH_ALLOW_IMPORTS")
    said, words = io.StringIO(), words_of(command)
    shorter = [f"--set={change}" for change in SHORTER if words[:2] == ["train", "recipes/photos.jsonnet"]]
    with contextlib.redirect_stdout(said):
        assert cli.main([*words, *shorter, "--debug"]) == 0
    assert said.getvalue()
    monkeypatch.setenv("RETOUCH_ALLOW_IMPORTS", allowed)
    if words[0] == "train":
        recipe = load(words[1], [words[k + 1] for k, word in enumerate(words) if word == "--set"])
        summary = json.loads((recipe.folder / "summary.json").read_text())
        assert summary["steps"] == 2
        metrics = [json.loads(line) for line in (recipe.folder / "metrics.jsonl").read_text().splitlines()]
        assert all(f"reward/{column}" in line for line in metrics for column in recipe.reward.combine)


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".jsonnet")])
def test_recipes_of_the_your_own_page_load(page_folder, name):
    assert load(name).name == Path(name).stem.replace("_", "-").replace("my-recipe", "my-model")


def test_data_of_the_your_own_page_give_the_documented_tasks(page_folder):
    recipe = load("recipes/photos.jsonnet", ["data.path=my_photos"])
    sets = build_sets(recipe, recipe.data, size=None)
    tasks = {task.instruction: task for tasks in (sets.train, sets.heldout) for task in tasks}
    assert len(tasks) == 4
    assert tasks["paint the car red"].mask.size == tasks["paint the car red"].images[0].size == (64, 48)
    assert tasks["remove the car"].target is not None
    assert tasks["remove the car"].meta == {"photographer": "Ada"}
    assert tasks['write "closed" on the gate'].text == "closed"
    table = load("my_table.jsonnet")
    assert all(task.target is not None and task.images for task in build_sets(table, table.data, size=None).train)
    prompts = load("my_recipe.jsonnet")
    prompts = build_sets(prompts, prompts.data, size=None)
    assert {task.text for tasks in (prompts.train, prompts.heldout) for task in tasks} == {None, "open"}


def test_the_tests_of_the_your_own_page_pass(page_folder):
    found = [made for name, made in vars(module("test_mine")).items() if name.startswith("test_")]
    assert len(found) == 5
    for test in found:
        test()


def test_the_your_own_page_has_commands_for_its_recipes_a_short_reward_and_every_image_model_kind():
    kinds = {load_words[1] for command in COMMANDS if (load_words := words_of(command))[0] in ("train", "doctor")}
    assert kinds >= {"recipes/photos.jsonnet", "recipes/quickstart.jsonnet", "my_table.jsonnet", "my_recipe.jsonnet"}
    assert any("my_reward:Keeps" in command for command in COMMANDS)
    lines = [line for line in FILES["my_reward.py"].splitlines() if line and not line.startswith(("import", "from"))]
    assert len(lines) <= 10
    table = re.findall(r"^\| `([\w-]+)` \| `\w+Pipeline`", YOUR_OWN, re.MULTILINE)
    shown = [kind for kind in IMAGE_MODELS if kind != "import" and not kind.startswith("playground")]
    assert sorted(table) == sorted(shown)


def test_the_reward_of_the_lora_guide_passes_the_contract_checks(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "guides" / "lora.md").read_text()
    (block,) = [block["text"] for block in BLOCK.finditer(page) if block["language"] == "python" and "class " in block["text"]]
    (tmp_path / "bright.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    check_reward(module("bright").Bright(), [Sample(Task(id=str(k), instruction="brighter"), picture(k)) for k in range(4)])
    sys.modules.pop("bright")


# All pages

parser = functools.cache(cli.build_parser)


def command_error(command):
    """The error message for a command that does not exist, or None; a command that is only mentioned needs no arguments."""
    tool, *words = shlex.split(command, comments=True)
    if tool == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        unknown = [word for word in words if word not in targets]
        return f"no target {unknown}" if unknown else None
    named = all(re.fullmatch("[a-z]+", word) for word in words)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            parser().parse_args([*words, *(["--help"] if named else [])])
        except SystemExit as end:
            return said.getvalue().splitlines()[-1] if end.code else None
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_exists(page):
    assert {command: found for command in commands(page) if (found := command_error(command))} == {}


def test_commands_that_do_not_exist_are_detected(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("`retouch conjure`, `retouch.types`, `makefile`, `make test` or:\n\n```sh\nA=1 make gold  # from lead\n```\n")
    found = list(commands(page))
    assert found == ["make gold  # from lead", "retouch conjure", "make test"]
    assert [command_error(command) is None for command in found] == [False, False, True]
    assert command_error("retouch train --hastily recipe.jsonnet") is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_resolves_and_every_file_that_is_named_exists(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        place, _, anchor = target.partition("#")
        file = page if not place else page.parent / place
        assert file.exists(), target
        if anchor:
            assert anchor in [slug(line.lstrip("#")) for line in file.read_text().splitlines() if line.startswith("#")], target
    named = re.findall(r"(?<![\w/.])((?:docs|tests|examples|measurements|recipes|src)/[\w./-]+\.\w+)", text)
    assert [name for name in named if name not in GENERATED and not (ROOT / name).is_file()] == []


@pytest.mark.parametrize(("page", "least"), [("architecture.md", 30), ("security.md", 10)])
def test_every_function_and_test_that_a_page_names_exists(page, least):
    named = re.findall(r"`([\w/]+\.py)::([\w.]+)`", (ROOT / "docs" / page).read_text())
    assert len(named) > least
    for file, name in named:
        source = ROOT / "src" if file.startswith("retouch_") else ROOT / "src" / "retouch"
        root = ROOT / "tests" if name.startswith("test_") else source
        assert name in defined(root / file), f"{file}::{name}"


def test_every_retouch_name_in_a_page_can_be_imported():
    texts = [page.read_text().split("<!-- shape -->")[0] for page in PAGES]  # the column "before" names modules that are gone
    named = {name for text in texts for name in re.findall(r"`(retouch(?:\.\w+)+)(?::\w+)?`", text)}
    assert len(named) > 20
    assert [name for name in sorted(named) if not importable(name)] == []


def importable(name):
    """Whether it is a module of the package, an attribute of one, or the entry-point group."""
    try:
        return name == GROUP or pkgutil.resolve_name(name) is not None
    except (ImportError, AttributeError):
        return False


@functools.cache
def defined(file):
    """Names of functions and classes, and of methods as ``Class.method``."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


def test_the_recipes_page_equals_the_generated_one_and_lists_every_key():
    stored = {file.name: file.read_text() for file in (ROOT / "docs").glob("recipes*.md")}
    assert stored == runpy.run_path(str(ROOT / "docs" / "generate_recipes.py"))["pages"](), "run `python docs/generate_recipes.py`"
    text = "\n".join(stored.values())
    for key in places(Recipe):
        assert key in ("kind", "mode") or f"| `{key}` |" in text, key


TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text()
CODE = re.findall(r"`([^`\n]+)`", BLOCK.sub("", TROUBLESHOOTING))


def test_every_key_and_metric_that_troubleshooting_names_exists():
    known = {path for paths in places(Recipe).values() for path in paths}
    said = {span for span in CODE if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", span)}
    said -= {"metrics.jsonl", "timings.jsonl", "report.html", "model_index.json", "identity.json"}  # files
    assert len(said) > 20
    assert {key for key in said if key not in known and not key.startswith("retouch.")} == set()
    source = "".join(file.read_text() for file in (ROOT / "src").rglob("*.py"))
    said = {span for span in CODE if re.fullmatch(r"[a-z]+/[a-z_]+", span)}
    assert len(said) > 8
    stages = set(re.findall(r'clock\("(\w+)"\)', source))
    assert {name for name in said if f'"{name}"' not in source and name.removeprefix("time/") not in stages} == set()


def test_the_out_of_memory_error_in_troubleshooting_matches_the_raised_one():
    shown = next(block["text"] for block in BLOCK.finditer(TROUBLESHOOTING) if "does not fit" in block["text"])
    first, advice = shown.splitlines()
    recipe = load("recipes/quickstart.jsonnet", ["microbatch=32"])
    with pytest.raises(OutOfMemory) as raised, explain_out_of_memory(recipe, lambda: "update"):
        raise torch.OutOfMemoryError(first.partition("fit: ")[2])
    assert str(raised.value).splitlines() == [first, advice]


def packages():
    """Every package of the source tree, those of the core relative to ``retouch``."""
    source = ROOT / "src"
    found = {file.parent.relative_to(source).as_posix() for file in source.rglob("__init__.py")}
    return {name.removeprefix("retouch/") for name in found} - {"retouch"}


def test_the_tables_of_the_source_tree_list_every_package():
    rows = re.findall(r"^\| `([\w./]+)` \|", (ROOT / "src" / "README.md").read_text(), re.MULTILINE)
    assert {row for row in rows if not row.endswith(".py")} - {"models/configs"} == packages()
    tree = (ROOT / "docs" / "architecture.md").read_text().split("| `src/retouch/` |")[1].split("\n\n")[0]
    named = set(re.findall(r"`(\w+)/`", tree))
    assert named == {package for package in packages() if "/" not in package}
