"""Rewards as users write and call them: errors name file, line, reward and sample; lists of images; `retouch score`."""

import json
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from PIL import Image

import retouch
from judge_double import KEY, Double, expected_score
from retouch import cli
from retouch.config.imports import import_class
from retouch.distributed.ranks import Ranks
from retouch.recipe.recipe import parse
from retouch.rewards.function import ImportedReward
from retouch.rewards.judging import RewardScorer
from retouch.rewards.kinds import KINDS
from retouch.rewards.loading import LoadedReward
from retouch.rewards.pixels import CompressibilityReward, ShareReward
from retouch.rewards.scoring import score
from retouch.run.build import assemble
from retouch.types import Sample, Task
from retouch_plan.checks import check_scoring
from retouch_worlds.data import PlaygroundData

MODULE = """
import torch
from retouch.types import Column

class Red:
    columns = {"red": Column(0.0, 1.0)}

    def __call__(self, samples):
        return {"red": torch.tensor([1 / (sample.task.id != "b") for sample in samples])}

class Listed:
    columns = {"listed": Column(0.0, 1.0)}

    def __call__(self, samples):
        return [None if sample.task.id == "b" else 0.25 for sample in samples]

class Text(Listed):
    def __call__(self, samples):
        return "good"

class Wild(Listed):
    def __call__(self, samples):
        return [0.5 if sample.task.id == "a" else 7.0 for sample in samples]

class Words(Listed):
    def __call__(self, samples):
        return ["good"] * len(samples)

class Missing(Listed):
    def __call__(self, samples):
        return {"listed": [None if sample.task.id == "b" else 0.25 for sample in samples]}

class Wordy(Listed):
    def __call__(self, samples):
        return {"listed": [0.25, "good", 0.5]}

class OnlyBatches(Listed):
    def __call__(self, samples):
        raise IndexError("one sample") if len(samples) == 1 else ZeroDivisionError("the real error")

class Unmade(Listed):
    def __init__(self):
        raise KeyError("path")

class Strong(Listed):
    def __init__(self, strength, *, device="cpu", scale=1.0):
        pass

class Pairs(Listed):
    columns = {"h": (0, 1)}

class Names(Listed):
    columns = ["h"]

def plain(images, prompts, **kwargs):
    return [len(prompt) / 10 for prompt in prompts]

def broken(images, **kwargs):
    return [image.brightness for image in images]

def single(images, **kwargs):
    return 0.5

def misnamed(image, **kwargs):
    return [0.5]

def titled(images, title, photographer, **kwargs):
    return [0.5] * len(images)
"""

DOCUMENT = {
    **{"name": "mine", "steps": 1, "tasks_per_step": 1, "group_size": 2, "learning_rate": 1e-4},
    "policy": {"kind": "denoising", "model": {"kind": "playground"}, "train": {"kind": "full"}},
    "rollout": {"num_steps": 3, "transition": {"kind": "cps", "noise_level": 0.7}},
    "data": {"kind": "playground", "count": 4, "complexity": [1]},
    "reward": {"kind": "import", "class": "rw:broken", "combine": {"broken": 1}},
    "objective": {"kind": "policy_gradient", "clip_low": 1e-4, "clip_high": 1e-4},
    "advantage": {"kind": "group"},
}


@pytest.fixture
def rw(tmp_path, monkeypatch):
    file = tmp_path / "rw.py"
    file.write_text(MODULE)
    (tmp_path / "unwritten.py").write_text("import torch\n\ndef half(:\n")
    (tmp_path / "failing.py").write_text("import torch\n\nWEIGHTS = torch.zeros(2)[5]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("RETOUCH_ALLOW_IMPORTS", "rw,unwritten,failing,__main__")
    monkeypatch.delitem(sys.modules, "rw", raising=False)
    return file


def samples():
    return [Sample(Task(name, f"paint {name}"), Image.new("RGB", (8, 8))) for name in "abc"]


def section(name, **more):
    return ImportedReward.model_validate({"kind": "import", "class": f"rw:{name}", **more})


def inside_several(name):
    made: Any = KINDS.load("several")
    parts = {"mine": {"kind": "import", "class": f"rw:{name}"}, "size": {"kind": "compressibility"}}
    return made.model_validate_json(json.dumps({"kind": "several", "rewards": parts})).build()


def scored(reward, combine):
    scorer = RewardScorer(reward, dict(combine))
    try:
        return scorer.submit(samples()).result(timeout=30)
    finally:
        scorer.close()


def line_of(file, text):
    return 1 + next(number for number, line in enumerate(file.read_text().splitlines()) if text in line)


def test_fault_10_an_error_inside_several_reports_reward_file_line_and_sample(rw):
    made = inside_several("Red")
    with pytest.raises(ValueError, match="raised ZeroDivisionError: division by zero") as caught:
        scored(made, {"mine/red": 1.0})
    said = str(caught.value)
    assert f"reward mine, rw:Red ({rw}:{line_of(rw, 'class Red')})" in said
    assert f"{rw}:{line_of(rw, '1 / (sample')}, in " in said
    assert "sample: task 'b', instruction 'paint b'" in said
    with pytest.raises(ValueError, match="sample: task 'b'"):
        made(samples())
    for function, says in (
        ("broken", "reward mine: reward function broken raised AttributeError"),
        ("single", "reward mine: reward function single returned float; return a list of floats"),
        ("misnamed", "reward mine: reward function misnamed has the argument 'image', but .*; did you mean 'images'"),
    ):
        with pytest.raises(ValueError, match=says):
            scored(inside_several(function), {"size/compressibility": 1.0})


UNKNOWN = "unknown argument; the constructor takes strength, device, scale"


@pytest.mark.parametrize(
    ("args", "key", "says"),
    [
        ({"strenght": 1, "strength": 1}, "strenght", f"{UNKNOWN}; did you mean '"),
        ({"other": 0.5, "strength": 1}, "other", UNKNOWN),
        ({"scale": 2.0}, "strength", "missing; the constructor needs this argument"),
    ],
)
def test_a_wrong_constructor_argument_is_refused_with_its_key_and_the_accepted_arguments(rw, args, key, says):
    with pytest.raises(ValueError, match=re.escape(f"rw:Strong: args.{key}: {says}")):
        section("Strong", args=args).build()
    parts = {"mine": {"kind": "import", "class": "rw:Strong", "args": args}, "size": {"kind": "compressibility"}}
    with pytest.raises(ValueError, match=re.escape(f"reward.rewards.mine.args.{key}: rw:Strong: {says}")):
        parse({**DOCUMENT, "reward": {"kind": "several", "rewards": parts, "combine": {"size/compressibility": 1}}})
    with pytest.raises(ValueError, match="a function, so args must be empty"):
        section("plain", args={"a": 1}).build()


@pytest.mark.parametrize("column", ["photograper", "photographer"])
def test_an_argument_that_is_no_column_of_the_data_is_refused_before_the_model_is_loaded(rw, column, monkeypatch):
    data = rw.parent / "data"
    data.mkdir()
    rows = [
        {"file_name": f"{number}.png", "instruction": f"paint {number}", "title": "a", column: "someone"} for number in range(8)
    ]
    for number, row in enumerate(rows):
        Image.new("RGB", (24, 24), (number, 0, 0)).save(data / row["file_name"])
    (data / "metadata.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    changes = {
        "data": {"kind": "folder", "path": str(data), "held_out": 2},
        "reward": {"kind": "import", "class": "rw:titled", "combine": {"titled": 1}},
        "device": "cpu",
    }
    recipe = parse({**DOCUMENT, **changes})

    def load(*arguments, **how):
        raise RuntimeError("the model is loaded")

    monkeypatch.setattr("retouch.run.build.assemble_policy", load)
    if column == "photographer":
        with pytest.raises(RuntimeError, match="the model is loaded"):
            assemble(recipe, Ranks())
        return
    says = (
        "reward function titled has the argument 'photographer', but the data set has no such column; its columns are photograper, "
    )
    with pytest.raises(ValueError, match=f"{says}title, and .*; did you mean 'photograper'"):
        assemble(recipe, Ranks())


def test_fault_10_a_list_is_the_scores_of_a_column_or_an_error_with_class_file_and_line(rw):
    assert scored(section("plain").build(), {"plain": 1.0}).rewards.tolist() == pytest.approx([0.7, 0.7, 0.7])
    for name in ("Listed", "Missing"):
        found = scored(section(name).build(), {"listed": 1.0}).rewards
        assert found[[0, 2]].tolist() == [0.25, 0.25]
        assert torch.isnan(found[1])
    for name, line, says in (
        ("Text", "class Text", "returned str; return a dictionary with a tensor for each column: 'listed', or a list of"),
        ("Words", "class Words", "column 'listed': too many dimensions 'str'; return a number for each sample, NaN if"),
        ("Wordy", "class Wordy", "column 'listed': must be real number, not str; return a number for each sample, NaN if"),
        ("Wild", "class Wild", "column 'listed' is 7.0, outside its declared range 0.0 to 1.0; declare the true range (task "),
        ("broken", "image.brightness", "reward function broken raised AttributeError"),
        ("OnlyBatches", "the real error", "raised ZeroDivisionError: the real error"),
        ("OnlyBatches", "the real error", "occurs with 3 samples at once, but with none of the first 64 samples alone"),
    ):
        column = "broken" if name == "broken" else "listed"
        with pytest.raises(ValueError, match="reward") as caught:
            scored(section(name).build(), {column: 1.0})
        assert says in str(caught.value)
        assert f"{rw}:{line_of(rw, line)}" in str(caught.value)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("rw:Unmade", r"rw:Unmade: its constructor raised KeyError: 'path'(.|\n)*\.py:\d+"),
        ("unwritten:Red", r"importing unwritten raised SyntaxError(.|\n)*\.py:\d+"),
        ("failing:Red", r"importing failing raised IndexError(.|\n)*\.py:\d+"),
        ("rw:sinlge", r"rw has no class or function sinlge; did you mean single\?"),
        ("rw:Pairs", "rw:Pairs: its columns are .*; give a dictionary of retouch"),
        ("rw:Names", "rw:Names: its columns are .*; give a dictionary of retouch"),
    ],
)
def test_fault_10_a_reward_that_cannot_be_built_is_refused_with_its_place(path, says, rw):
    with pytest.raises(ValueError, match=says):
        retouch.rewards.load("import", **{"class": path})


def test_fault_10_a_class_of_main_is_found_in_a_script_or_its_absence_raises(rw):
    with pytest.raises(ValueError, match=r"save the class in a file mine.py and name it mine:Red"):
        import_class("__main__:Red")
    script = "from retouch.config.imports import import_class\nclass Red: pass\nprint(import_class('__main__:Red') is Red)"
    (rw.parent / "script.py").write_text(script)
    done = subprocess.run([sys.executable, "script.py"], cwd=rw.parent, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_fault_10_doctor_reports_a_reward_that_raises_with_file_and_line(rw):
    recipe = parse({**DOCUMENT, "reward": {"kind": "import", "class": "rw:broken", "combine": {"broken": 1}}})
    tasks = PlaygroundData(count=1, complexity={1: 1.0}).tasks(in_turn=True)[:]
    finding = check_scoring(recipe, type("Sets", (), {"train": tasks})())
    assert finding.status == "FAILED"
    assert f"{rw}:{line_of(rw, 'image.brightness')}" in finding.text


IMAGES = [Image.new("RGB", (8, 8), colour) for colour in ("red", "black")]


def test_a_loaded_reward_is_closed_by_its_with_block_and_refuses_a_wrong_number_of_prompts():
    closed = []

    class Connected(ShareReward):
        def close(self):
            closed.append(self.channel)

    with LoadedReward(Connected(channel="red")) as reward:
        assert reward(IMAGES)["share"]
        assert closed == []
        with pytest.raises(ValueError, match="prompts has length 1, but there are 2 images; give one per image"):
            reward(IMAGES, prompts=["one"])
    assert closed == ["red"]
    with pytest.raises(KeyError), LoadedReward(Connected(channel="blue")) as reward:
        reward(IMAGES)["red"]
    assert closed == ["red", "blue"]
    with pytest.raises(ValueError, match=r"give the range of the scores of half: @retouch.reward\(low=0, high=1\)"):

        @retouch.reward
        def half(images):
            return [0.5] * len(images)


RED = Image.new("RGB", (8, 8), (200, 50, 0))


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.chdir(tmp_path)
    RED.save("out.png")
    Image.new("RGB", (8, 8), (0, 50, 200)).save("in.png")
    return tmp_path


def judge(url):
    section = {"kind": "aspects", "n_evals": 1, "judge": {"kind": "endpoint", "model": "m", "base_url": url, "attempts": 1}}
    return json.dumps(section | {"combine": "sqrt(alignment * quality)"})


def test_score_command_sends_files_to_the_judge_and_combines_its_columns(files, capsys):
    with Double() as double:
        words = ["score", judge(double.url), "--image", "out.png", "--source", "in.png", "--instruction", "make it red", "--json"]
        assert cli.main(words) == 0
        # There is one request per aspect; the request about quality does not contain the instruction.
        told = ["make it red" in json.dumps(request["messages"]) for request in double.requests]
    assert sorted(told) == [False, True, True]
    said = json.loads(capsys.readouterr().out)
    expected = {name: expected_score(RED, name, 0, low=0, high=1) for name in ("alignment", "quality", "identity")}
    assert said["scores"] == pytest.approx(expected, abs=1e-6)
    assert said["reward"] == pytest.approx((expected["alignment"] * expected["quality"]) ** 0.5, abs=1e-6)


def test_failed_judge_calls_give_missing_scores_and_exit_code_1(files, capsys):
    with Double(lambda digest, times: "500") as double:
        words = ["score", judge(double.url), "--image", "out.png", "--source", "in.png", "--instruction", "make it red"]
        assert cli.main([*words, "--json"]) == 1
        said = json.loads(capsys.readouterr().out)
        assert said["scores"] == {"alignment": None, "quality": None, "identity": None}
        assert said["reward"] is None
        assert said["missing"] == ["alignment", "quality", "identity"]
        assert cli.main(words) == 1
        out = capsys.readouterr().out.splitlines()
    assert out[0].split()[:2] == ["alignment", "missing"]
    assert out[-1].endswith("(0 to 1) = sqrt(alignment * quality)")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["lpips", "--image", "out.png"], "reward.weights: missing"),
        (["photos:red", "--image", "out.png"], "has no source image"),
        (["shar", "--image", "out.png"], "did you mean 'share'"),
        (["share:red", "--image", "nowhere.png"], "nowhere.png"),
        (["clip:nowhere", "--image", "out.png"], "nowhere are not on this machine"),
        (["thinking", "--image", "out.png"], "has no completion"),
        (["playground", "--image", "out.png"], "has no scene"),
        (["share:red", "--image", "out.png", "--meta", "{"], "--meta is not JSON"),
        (["share:red", "--image", "out.png", "--meta", "[]"], "--meta must be a JSON object"),
    ],
)
def test_invalid_score_commands_exit_with_2(files, capsys, words, says):
    assert cli.main(["score", *words]) == 2
    assert says in capsys.readouterr().err


def test_score_command_prints_a_column_with_its_range_or_as_json(files, capsys):
    def said(*words):
        assert cli.main(["score", words[0], "--image", "out.png", *words[1:], "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert cli.main(["score", "share:red", "--image", "out.png"]) == 0
    assert capsys.readouterr().out == "share    0.8000  (0 to 1)\n"
    assert said("share:red") == {"scores": {"share": pytest.approx(0.8)}, "missing": []}
    assert said("thinking", "--completion", "<think>hm</think>so")["scores"] == {"think_format": 1.0}
    (files / "reward.json").write_text('{"kind": "compressibility", "combine": {"compressibility": 2}}')
    found = said("reward.json")
    assert found["scores"]["compressibility"] == pytest.approx(score(CompressibilityReward(), RED)["compressibility"])
    assert found["reward"] == pytest.approx(2 * found["scores"]["compressibility"])
