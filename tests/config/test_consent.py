"""Code that a recipe names is imported only if the user has allowed its module, and instantiated only if it has the right type.

Each test begins without consent. The modules in them are written to disk, and write a file when they are imported.
"""

import io
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from retouch import cli
from retouch.config import consent
from retouch.inference.opening import open_recipe, read_target
from retouch.models.base import ImportedLanguageModel
from retouch.recipe.document import apply, evaluate
from retouch.recipe.recipe import load, parse
from retouch.recipe.reward_arguments import parse_reward
from retouch.records.folder import RunFolder
from retouch.rewards.function import ImportedReward

REWARD = """
from pathlib import Path
from retouch.types import Column
Path(__file__).with_suffix(".ran").touch()

class Zero:
    columns = {"zero": Column(0.0, 1.0)}
    def __init__(self, *, device="cpu", note=None):
        Path(__file__).with_suffix(".built").touch()
    def __call__(self, samples):
        return {"zero": [0.0] * len(samples)}

class Number:
    def __init__(self, *args, **kwargs):
        Path(__file__).with_suffix(".built").touch()
"""
GRPO = Path(__file__).parents[2] / "recipes" / "playground" / "grpo.jsonnet"
SMALL = ["steps=1", "tasks_per_step=2", "eval.tasks=4", "eval.best_of_k=0", "eval.column=null", "trackers=[]"]


class Project:
    """A folder that is the current one, with a module of a reward, and a recipe that names it."""

    def __init__(self, folder):
        self.folder = folder
        self.recipe = folder / "theirs.jsonnet"
        (folder / "stranger.py").write_text(REWARD)
        self.write(self.section("stranger:Zero"))

    def section(self, path, **args):
        return {"kind": "import", "class": path, "args": args, "combine": {"zero": 1}}

    def write(self, reward):
        small = "steps: 1, tasks_per_step: 2, trackers: [], eval+: { tasks: 4, best_of_k: 0, column: null }"
        self.recipe.write_text(f"(import '{GRPO}') + {{ name: 'theirs', {small}, reward: {json.dumps(reward)} }}")

    def run_folder(self):
        """A run's folder as it might be received: with a recipe, and nothing else."""
        with consent.allowing(["stranger"]):
            recipe = load(self.recipe)
        folder = RunFolder(self.folder / "received")
        folder.write_recipe(recipe.document())
        self.remove_traces()
        return folder.root

    def remove_traces(self):
        sys.modules.pop("stranger", None)
        for trace in self.folder.glob("*.ran"):
            trace.unlink()

    @property
    def ran(self):
        return (self.folder / "stranger.ran").exists()

    @property
    def built(self):
        return (self.folder / "stranger.built").exists()


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.delenv("RETOUCH_ALLOW_IMPORTS")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    yield Project(tmp_path / "project")
    sys.modules.pop("stranger", None)


class Terminal(io.StringIO):
    """Standard input and error as a terminal, with an answer; it counts the questions."""

    answer, asked = "", 0

    def isatty(self):
        return True

    def readline(self):
        self.asked += 1
        return self.answer + "\n"


def on_a_terminal(monkeypatch, answer):
    terminal = Terminal()
    terminal.answer = answer
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


# Commands


def commands(project, target):
    image = str(project.folder / "in.png")
    Image.new("RGB", (32, 32)).save(image)
    listed = [
        ["doctor", target], ["eval", target], ["sample", target, "--instruction", "x", "--image", image, "--out", "out.png"],
        ["export", target, "--to", "exported"], ["score", target, "--image", image], ["serve", target, "--port", "0"],
    ]  # fmt: skip
    return [*listed, ["train", target], ["launch", "--nproc", "2", target]] if target.endswith("jsonnet") else listed[1:]


@pytest.mark.parametrize("target", ["theirs.jsonnet", "received"])
def test_commands_reject_code_named_by_a_recipe_or_run_without_consent(project, target, capsys):
    if target == "received":
        project.run_folder()
    for words in commands(project, target):
        assert cli.main(words) == 2, words
        said = capsys.readouterr().err
        assert "reward.class: stranger:Zero is code from outside Retouch, in " in said
        assert str(project.folder / "stranger.py") in said
        assert "add --allow-import stranger, or set RETOUCH_ALLOW_IMPORTS=stranger" in said
    assert not project.ran


def test_the_report_and_the_ledger_of_a_received_run_are_read_without_its_reward(project, capsys):
    from retouch_view.report.page import write_report

    with consent.allowing(["stranger"]):
        assert cli.main(["train", str(project.recipe)]) == 0
    folder = Path("runs", "theirs")
    project.remove_traces()
    write_report(folder)
    capsys.readouterr()
    assert cli.main(["ledger", str(folder)]) == 0
    assert "stranger:Zero" in capsys.readouterr().out
    assert not project.ran


def test_a_module_is_allowed_by_argument_typed_override_or_environment_variable(project, monkeypatch):
    assert isinstance(load(project.recipe, allow_imports=["stranger"]).reward, ImportedReward)
    with pytest.raises(ValueError, match=r"in Python: allow_imports=\['stranger'\]"):
        load(project.recipe)
    typed = json.dumps(project.section("stranger:Zero", note="typed"))
    assert isinstance(load(GRPO, [f"reward={typed}", *SMALL]).reward, ImportedReward)
    assert isinstance(load(project.recipe, ["reward.class=stranger:Zero"]).reward, ImportedReward)
    monkeypatch.setenv("RETOUCH_ALLOW_IMPORTS", "another, stranger")
    assert isinstance(load(project.recipe).reward, ImportedReward)


def test_the_allow_import_flag_sets_the_environment_only_during_its_command(project, monkeypatch):
    seen: list[str | None] = []
    monkeypatch.setattr("retouch.run.session.run", lambda recipe, **_: seen.append(os.environ.get("RETOUCH_ALLOW_IMPORTS")) or 0)
    assert cli.main(["train", "theirs.jsonnet", "--allow-import", "stranger", "--allow-import", "a,b"]) == 0
    assert seen == ["stranger,a,b"]
    assert "RETOUCH_ALLOW_IMPORTS" not in os.environ
    assert cli.main(["train", "theirs.jsonnet"]) == 2


def test_allowing_a_package_allows_its_submodules_but_not_its_parents_and_invalid_names_are_rejected(project):
    names = frozenset({"mine", "theirs.rewards"})
    assert all(consent.allows(names, module) for module in ("mine", "mine.rewards.red", "theirs.rewards.red"))
    assert not any(consent.allows(names, module) for module in ("theirs", "minerals", "theirs.models", ""))
    for name in ("*", "my-module", "stranger.py:", "../stranger", "a..b"):
        with pytest.raises(ValueError, match="is not the name of a module"):
            load(project.recipe, allow_imports=[name])


# The question on a terminal


def test_consent_is_asked_once_on_a_terminal_and_remembered(project, monkeypatch):
    monkeypatch.setattr("retouch.run.session.run", lambda recipe, **_: 0)
    terminal = on_a_terminal(monkeypatch, "y")
    assert cli.main(["train", "theirs.jsonnet"]) == 0
    assert (terminal.asked, project.ran) == (1, True)
    assert f"reward.class: stranger:Zero, in {project.folder / 'stranger.py'}" in terminal.getvalue()
    assert cli.main(["train", "theirs.jsonnet", "--set", "steps=2"]) == 0
    assert terminal.asked == 1
    project.write(project.section("stranger:Zero", note="changed"))
    terminal.answer = ""
    assert cli.main(["train", "theirs.jsonnet"]) == 2
    assert terminal.asked == 2


def test_remembered_consent_does_not_apply_to_another_file(project, tmp_path, monkeypatch):
    consent.remember(parse(evaluate(project.recipe), allow_imports=["stranger"]).document())
    document = parse(evaluate(project.recipe), allow_imports=["stranger"]).document()
    project.remove_traces()
    parse(document)
    elsewhere = tmp_path / "download"
    elsewhere.mkdir()
    (elsewhere / "stranger.py").write_text(REWARD)
    project.remove_traces()
    monkeypatch.chdir(elsewhere)
    sys.path[:] = [entry for entry in sys.path if Path(entry) != project.folder]
    with pytest.raises(ValueError, match="a recipe may import only modules that you have named"):
        parse(document)
    assert not (elsewhere / "stranger.ran").exists()


def test_consent_is_not_stored_for_a_user_without_a_home_folder(project, monkeypatch):
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    document = parse(evaluate(project.recipe), allow_imports=["stranger"]).document()
    before = set(project.folder.rglob("*"))
    consent.remember(document)
    with pytest.raises(ValueError, match="--allow-import stranger"):
        parse(document)
    assert set(project.folder.rglob("*")) == before


def test_consent_is_not_asked_outside_of_a_command_or_on_a_rank(project, monkeypatch):
    terminal = on_a_terminal(monkeypatch, "y")
    with pytest.raises(ValueError, match="--allow-import stranger"):
        load(project.recipe)
    monkeypatch.setenv("RANK", "0")
    assert cli.main(["eval", "theirs.jsonnet"]) == 2
    assert terminal.asked == 0


def test_the_consent_question_contains_no_control_characters(project, monkeypatch):
    terminal = on_a_terminal(monkeypatch, "n")
    hidden = "\x1b[2K\rharmless"
    rewards = {"kind": "several", "rewards": {hidden: project.section("stranger:Zero")}, "combine": {f"{hidden}/zero": 1}}
    project.write(rewards)
    assert cli.main(["eval", "theirs.jsonnet"]) == 2
    assert terminal.asked == 1
    assert "\x1b" not in terminal.getvalue().partition("[y/N]")[0]


def test_a_run_trained_with_consent_is_opened_without_further_consent(project):
    assert cli.main(["train", "theirs.jsonnet", "--allow-import", "stranger"]) == 0
    project.remove_traces()
    assert cli.main(["eval", "runs/theirs"]) == 0
    project.remove_traces()
    _, step = open_recipe(*read_target("runs/theirs", ["eval.tasks=2"]), trained=True)
    assert step == 1
    assert cli.main(["doctor", "theirs.jsonnet"]) == 2  # no consent was stored for the recipe itself


# Modules and classes that must not be imported or called


def test_every_key_that_names_a_class_needs_consent(project):
    section = {"kind": "import", "class": "stranger:Zero", "args": {"unknown": 1}}
    for key in ("reward", "policy.model", "data", "objective", "advantage", "rollout.transition", "rollout.window"):
        document = apply(evaluate(GRPO), [f"{key}={json.dumps(section)}"])
        with pytest.raises(ValueError, match=rf"{key}\.class: stranger:Zero is code from outside Retouch"):
            parse(document)
    assert not project.ran


@pytest.mark.parametrize("path", ["subprocess:Popen", "os:PathLike", "stranger.deeper:Popen", "antigravity:Any"])
def test_no_module_is_imported_before_consent_not_even_a_parent(project, path):
    sys.modules.pop("antigravity", None)
    with pytest.raises(ValueError, match="is code from outside Retouch"):
        parse_reward({"kind": "import", "class": path, "args": {"args": ["touch", "ran"]}, "combine": {"a": 1}})
    assert "antigravity" not in sys.modules
    assert not project.ran


def test_a_class_that_is_no_reward_or_model_is_not_called(project):
    marker = project.folder / "called"
    popen = {"kind": "import", "class": "subprocess:Popen", "args": {"args": ["touch", str(marker)]}}
    for path in ("subprocess:Popen", "stranger:Number", "functools:partial", "torch.nn:Linear"):
        args = popen["args"] if path == "subprocess:Popen" else {}
        section = parse_reward(project.section(path, **args), allow_imports=[path.partition(":")[0]])
        with pytest.raises(ValueError, match=r"is no reward: its class has no columns"):
            section.build()
    image_model = load(GRPO, [f"policy.model={json.dumps(popen)}"]).policy.model
    with pytest.raises(ValueError, match="subprocess:Popen is no image model: its class has no encode, "):
        image_model.build(device=torch.device("cpu"))
    with pytest.raises(ValueError, match="subprocess:Popen is no language model: its class has no encode, "):
        ImportedLanguageModel(**popen).build(device=torch.device("cpu"), gradient_checkpointing=False)
    assert not marker.exists()
    assert not project.built


def test_only_classes_of_retouch_with_a_kind_can_be_named_in_a_recipe_and_need_no_consent(project):
    for path in ("retouch.cli.__main__:main", "retouch.types:Task", "retouch_serve.client:RemoteClient"):
        with pytest.raises(ValueError, match=f"{path} is not a class of Retouch that a recipe can name"):
            parse_reward(project.section(path))
    share = {"kind": "import", "class": "retouch.rewards.pixels:ShareReward", "args": {"channel": "red"}}
    assert parse_reward({**share, "combine": {"share": 1}}).channel == "red"
    assert load("recipes/flux-fill/tiny.jsonnet").policy.model.class_.endswith("TinyFluxFill")


def test_a_package_in_the_current_folder_does_not_count_as_installed(project, monkeypatch):
    metadata = Path("stranger-1.0.dist-info")
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[retouch.plugins]\nreward.innocent = stranger:Zero\n")
    for entry in ("", str(project.folder)):
        monkeypatch.setattr(sys, "path", [entry, *sys.path])
        with pytest.raises(ValueError, match=r"reward\.kind: 'innocent' is not one of"):
            parse_reward({"kind": "innocent", "combine": {"zero": 1}})
    assert not project.ran
    installed = project.folder / "site"
    installed.mkdir()
    metadata.rename(installed / metadata.name)
    monkeypatch.setattr(sys, "path", [str(installed), *sys.path])
    assert [entry.value for entry in consent.plugins() if entry.name == "reward.innocent"] == ["stranger:Zero"]
    assert isinstance(parse_reward(project.section("stranger:Zero")), ImportedReward)
