"""The command `retouch score`, and the function `score`, which scores one image."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from judge_double import KEY, Double, expected_score
from retouch import cli
from retouch.rewards.scorers.pixels import CompressibilityReward
from retouch.rewards.scoring import score
from retouch.types import Sample
from retouch_worlds.data import PlaygroundData
from retouch_worlds.rewards import PlaygroundReward

RED = Image.new("RGB", (8, 8), (200, 50, 0))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.chdir(tmp_path)
    RED.save("out.png")
    Image.new("RGB", (8, 8), (0, 50, 200)).save("in.png")
    return tmp_path


def judge(url: str, combine: object = "sqrt(alignment * quality)") -> str:
    section = {"kind": "aspects", "n_evals": 1, "judge": {"kind": "endpoint", "model": "m", "base_url": url, "attempts": 1}}
    return json.dumps(section | ({} if combine is None else {"combine": combine}))


def test_score_command_prints_a_column_with_its_range_or_as_json(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["score", "share:red", "--image", "out.png"]) == 0
    assert capsys.readouterr().out == "share    0.8000  (0 to 1)\n"
    assert cli.main(["score", "share:red", "--image", "out.png", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"scores": {"share": pytest.approx(0.8)}, "missing": []}


def test_score_command_sends_files_to_the_judge_and_combines_its_columns(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_failed_judge_calls_give_missing_scores_and_exit_code_1(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_score_command_reads_a_reward_from_a_json_file(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "reward.json").write_text('{"kind": "compressibility", "combine": {"compressibility": 2}}')
    assert cli.main(["score", "reward.json", "--image", "out.png", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["scores"]["compressibility"] == pytest.approx(score(CompressibilityReward(), RED)["compressibility"])
    assert said["reward"] == pytest.approx(2 * said["scores"]["compressibility"])


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
def test_invalid_score_commands_exit_with_2(files: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    assert cli.main(["score", *words]) == 2
    assert says in capsys.readouterr().err


def test_the_written_option_passes_the_completion_to_the_reward(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["score", "thinking", "--image", "out.png", "--completion", "<think>hm</think>so", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"] == {"think_format": 1.0}


TYPED = """
from retouch.rewards.identity import fingerprint
from retouch.types import Column
class Typed:
    columns = {"typed": Column(0.0, 1.0)}
    def __call__(self, samples):
        return [0.5] * len(samples)
print(fingerprint(Typed()))
"""


def test_a_class_that_was_typed_into_python_has_a_fingerprint() -> None:
    done = subprocess.run([sys.executable, "-"], input=TYPED, capture_output=True, text=True)
    assert len(done.stdout.strip()) == 16, done.stderr


def test_the_score_of_one_sample_equals_its_score_in_a_batch() -> None:
    reward = PlaygroundReward()
    tasks = [PlaygroundData(seed=1, count=3, complexity=[1]).tasks(in_turn=True)[k] for k in range(3)]
    many = reward([Sample(task, task.images[0]) for task in tasks])
    for row, task in enumerate(tasks):
        alone = score(reward, task.images[0], instruction=task.instruction, source=task.images, meta=task.meta)
        assert {name: alone[name] for name in ("IF", "IP", "PQ")} == {name: many[name][row].item() for name in ("IF", "IP", "PQ")}
