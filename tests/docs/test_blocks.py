"""Every code block of the documents is run, or parsed by the program that reads it; the reason why it is only parsed is here.

Blocks of docs/your-own.md are run by test_docs.py, those of README.md and docs/python.md by test_python_page.py, and those of
docs/coming-from.md by tests/examples/test_from_trl.py.
"""

import ast
import re
import shlex
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import diffusers
import pytest
from PIL import Image

import judge_double
import retouch
import tiny_pipelines
from retouch.recipe.recipe import load
from retouch.rewards.base import RewardSection, close
from retouch.rewards.loading import LoadedReward
from slow_params import slow_except

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "src" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(?:^`(?P<file>[\w./]+)`:\n\n)?^( *)```(?P<language>\w*)\n(?P<text>.*?)^ *```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "sh", "jsonnet", "jsonl", "toml", "text"}
RUN_ELSEWHERE = {"README.md", "docs/python.md", "docs/your-own.md", "docs/coming-from.md"}

PARSED = {"docs/rewards.md": "it loads a published CLIP, which is not on this machine"}
"""Pages whose Python is only compiled, and why."""
TINY_PIPELINE = {"size": (32, 32), "rollout": {"num_steps": 3, "transition": {"kind": "sde", "noise_level": 0.7}}}
TINY_RUN = {"steps": 2, "group_size": 2, "tasks_per_step": 2, "device": "cpu", "trackers": ()}


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    text: str
    file: str | None
    line: int

    @property
    def place(self):
        return f"{self.page}:{self.line}"


def blocks(language=None):
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in BLOCK.finditer(text):
            block = Block(
                page.relative_to(ROOT).as_posix(), found["language"], found["text"], found["file"],
                text[: found.start("text")].count("\n") + 1,
            )  # fmt: skip
            if language in (None, block.language):
                yield block


def pages_with(language):
    return sorted({block.page for block in blocks(language)})


def test_every_block_has_a_language_that_is_checked():
    assert [block.place for block in blocks() if block.language not in LANGUAGES] == []
    fences = sum(len(re.findall(r"^ *```", page.read_text(encoding="utf-8"), re.MULTILINE)) for page in PAGES)
    assert fences == 2 * len(list(blocks()))


# Python


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Trainers take the page's arguments, but train for two steps; pipelines are tiny ones of the same class."""
    real = retouch.Trainer.__init__

    def small(self, **given):
        loaded = isinstance(given["model"], str) or hasattr(given["model"], "scheduler")
        model = tiny_pipelines.sd3() if isinstance(given["model"], str) else given["model"]
        real(self, **{**given, "model": model, **TINY_RUN, **(TINY_PIPELINE if loaded else {})})

    monkeypatch.setattr(retouch.Trainer, "__init__", small)
    monkeypatch.setattr(diffusers.StableDiffusion3Pipeline, "from_pretrained", lambda path, **keys: tiny_pipelines.sd3())
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    "page",
    slow_except(
        {*pages_with("python")} - RUN_ELSEWHERE - {*PARSED} - {"docs/guides/judge-audit.md"},
        sorted({*pages_with("python")} - RUN_ELSEWHERE - {*PARSED}),
    ),
)
def test_the_python_blocks_of_a_page_run_in_order(page, monkeypatch):
    script = ModuleType("script_of_the_page")
    monkeypatch.setitem(sys.modules, script.__name__, script)
    monkeypatch.syspath_prepend(Path.cwd())
    monkeypatch.setenv("OPENAI_API_KEY", judge_double.KEY)
    Image.new("RGB", (32, 32), "red").save("photo.png")
    with judge_double.Double() as server:
        monkeypatch.setenv("RETOUCH_KEYS", f"OPENAI_API_KEY={server.url.removesuffix('/v1')}")
        for block in blocks("python"):
            if block.page == page and block.file:
                Path(block.file).write_text(block.text)
            elif block.page == page:
                text = block.text.replace("http://127.0.0.1:8000/v1", server.url).replace('"key": None', '"key": "OPENAI_API_KEY"')
                exec(compile(text, block.place, "exec"), vars(script))
        for made in [value for value in vars(script).values() if isinstance(value, LoadedReward | RewardSection)]:
            close(getattr(made, "reward", made))
    for block in blocks("python"):
        if block.page == page and block.file:
            sys.modules.pop(Path(block.file).stem, None)


@pytest.mark.parametrize("page", PARSED)
def test_python_that_is_not_run_is_valid(page):
    found = [block for block in blocks("python") if block.page == page]
    assert found
    for block in found:
        ast.parse(block.text)


# Recipes

EDITOR, WRITER = "playground/grpo.jsonnet", "qwen-image-edit/writer-grpo-frozen-playground.jsonnet"


@pytest.mark.parametrize("block", [block for block in blocks("jsonnet") if not block.file], ids=lambda block: block.place)
def test_jsonnet_blocks_are_valid_parts_of_a_recipe(block, tmp_path):
    """Keys, types and combinations are checked, as in a recipe; complete recipes are files of docs/your-own.md."""
    recipe = tmp_path / "recipe.jsonnet"
    recipe.write_text(
        f"local base = import '{WRITER if 'renderer:' in block.text else EDITOR}';\nlocal judges = import 'lib/judges.libsonnet';\n"
        f"assert std.isObject(judges);\nbase {{ eval: {{ tasks: 6 }} }} {{\n{block.text}\n}}\n"
    )
    load(recipe, allow_imports=re.findall(r"class: '([\w.]+):", block.text))


# Commands


def retouch_or_make(words):
    """`test_docs.py` parses these with the command's own parser, and runs those of docs/your-own.md; most train for minutes."""
    return True


def pip(words):
    """Extras of the package exist. Not run: tests install nothing."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {extra for word in words for found in re.findall(r"^(?:\.|retouch)\[([\w,]+)\]$", word) for extra in found.split(",")}
    return words[1] == "install" and named <= extras.keys()


def python(words):
    """The script exists. Not run: these are measurements, generators and servers, with tests of their own."""
    return words[1] == "-m" or (ROOT / words[1]).is_file()


def launcher(words):
    """It starts a script, or the command as a module. Not run: it starts processes; `tests/distributed` has ranks."""
    return any(word.endswith(".py") for word in words) or "retouch.cli" in words


def job_file(words):
    """The job file exists. Not run: `tests/examples/test_cluster_files.py` runs it with test doubles."""
    return any((ROOT / word).is_file() for word in words)


def elsewhere(words):
    """A command of a program that is not installed here, or a setting of the user's shell."""
    return True


PROGRAMS: dict[str, Callable[[list[str]], bool]] = {
    **dict.fromkeys(("retouch", "make"), retouch_or_make), "pip": pip, "python": python,
    **dict.fromkeys(("accelerate", "torchrun"), launcher), **dict.fromkeys(("sbatch", "examples/cluster/ray_job.sh"), job_file),
    **dict.fromkeys(("vllm", "sglang", "export", "hf", "uv", "conda", "docker", "kubectl", "sky", "cp"), elsewhere),
}  # fmt: skip


@pytest.mark.parametrize("page", pages_with("sh"))
def test_every_line_of_a_shell_block_is_a_known_command(page):
    for block in blocks("sh"):
        if block.page == page:
            for line in block.text.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    words.pop(0)
                if words:
                    assert words[0] in PROGRAMS, f"{block.place}: {line}"
                    assert PROGRAMS[words[0]](words), f"{block.place}: {line}"


def test_toml_is_valid():
    for block in blocks("toml"):
        tomllib.loads(block.text)
