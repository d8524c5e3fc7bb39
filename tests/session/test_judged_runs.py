"""Runs whose reward calls a judge server: predicted calls, missing scores after failed calls, and no API key in any output."""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from judge_double import KEY, Double
from retouch import cli
from retouch.recipe.document import apply
from retouch.recipe.recipe import Recipe, load, parse
from retouch.run.build import build_sets
from retouch_judge.calls import judge_calls
from retouch_plan.checks import calls_of, check_keys, check_scoring
from retouch_plan.findings import Finding


class Leaky(Double):
    """A server that repeats the caller's API key in every answer and every error."""

    def content(self, body: dict[str, Any]) -> tuple[str, Any]:
        content, words = super().content(body)
        return json.dumps({**json.loads(content), "reasoning": f"you sent Bearer {KEY}"}), words


def document(url: str, out: Path, **changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "name": "judged",
        "out": str(out),
        "steps": 3,
        "tasks_per_step": 2,
        "group_size": 3,
        "learning_rate": 1e-4,
        "device": "cpu",
        "policy": {"kind": "denoising", "model": {"kind": "playground"}, "train": {"kind": "lora", "rank": 4, "alpha": 8}},
        "rollout": {"num_steps": 3, "transition": {"kind": "cps", "noise_level": 0.7}, "window": {"mode": "window", "size": 1}},
        "data": {"kind": "playground", "complexity": [1], "count": 8},
        "reward": {
            "kind": "several",
            "rewards": {
                "judge": {
                    "kind": "aspects",
                    "n_evals": 2,
                    "judge": {
                        "kind": "endpoint",
                        "model": "m",
                        "base_url": url,
                        "pause": 0.01,
                        "prices": {"input": 2, "output": 8},
                    },
                },
                "exact": {"kind": "playground"},
            },
            "combine": "0.6 * alignment + 0.4 * quality",
            "max_missing": 0.9,
        },
        "objective": {"kind": "policy_gradient", "clip_low": 1e-4, "clip_high": 1e-4},
        "eval": {"tasks": 3, "every": 1, "column": "judge/alignment"},
    }
    return apply(made, [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in changes.items()])


def write(folder: Path, made: dict[str, Any]) -> str:
    file = folder / "judged.json"
    file.write_text(json.dumps(made))
    return str(file)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the API key in the environment, and close the log files afterwards."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    yield
    log = logging.getLogger("retouch")
    for handler in [*log.handlers]:
        log.removeHandler(handler)
        handler.close()


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_run_makes_the_predicted_judge_calls_and_leaks_no_api_key(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Leaky() as double:
        file = write(tmp_path, document(double.url, tmp_path / "runs"))
        assert cli.main(["train", file, "--debug"]) == 0
        asked = len(double.requests)
        assert double.refused == []
    (calls,) = judge_calls(load(file), steps=[3], heldout=3)
    assert calls.training == 3 * 6 * 3 * 2
    assert asked == calls.training + calls.evaluation
    said = capfd.readouterr()
    assert f"{calls.training} questions in training" in said.out
    metrics = lines(tmp_path / "runs" / "judged" / "metrics.jsonl")
    assert all(line["missing/judge/alignment"] == line["reward/missing_fraction"] == 0 for line in metrics)
    assert {"reward/exact/overall", "reward/judge/identity"} <= metrics[0].keys()
    first, *_, last = lines(tmp_path / "runs" / "judged" / "timings.jsonl")
    evaluated = 3 * 2 * 3  # images, questions and columns of the evaluation after the last step, which timings.jsonl lacks
    assert last["judge/requests"] == asked - evaluated
    assert last["judge/requests"] > first["judge/requests"] > evaluated
    assert last["judge/cost"] == pytest.approx((2 * last["judge/input_tokens"] + 8 * last["judge/output_tokens"]) / 1e6)
    assert "judge/unpriced_requests" not in last
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"ledger.sqlite", "report.html", "train.log", "recipe.json"} <= {path.name for path in files}
    assert any("tfevents" in path.name for path in files)
    assert any(path.suffix == ".safetensors" for path in files)
    assert [path.name for path in files if KEY.encode() in path.read_bytes()] == []
    assert KEY not in said.out + said.err


def test_failed_judge_calls_give_missing_scores_per_column_and_are_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fault(digest: str, times: int) -> str | None:
        return "400" if int(digest[:8], 16) % 8 == 0 else None  # the body of this error contains the API key

    with Double(fault) as double:
        assert cli.main(["train", write(tmp_path, document(double.url, tmp_path / "runs", eval__tasks=6)), "--debug"]) == 0
    said = capfd.readouterr()
    assert "HTTP 400" in said.out
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in files if KEY.encode() in path.read_bytes()] == []
    assert KEY not in said.out + said.err
    metrics = lines(tmp_path / "runs" / "judged" / "metrics.jsonl")
    shares = [line["reward/missing_fraction"] for line in metrics]
    assert 0 < sum(shares) / len(shares) < 0.9
    for line in metrics:
        parts = line["missing/judge/alignment"], line["missing/judge/quality"]
        assert max(parts) <= line["reward/missing_fraction"] <= sum(parts) + 1e-9
        assert line["missing/exact/overall"] == 0
        assert not any(name.startswith("missing/exact/success") for name in line)
    evals = lines(tmp_path / "runs" / "judged" / "evals.jsonl")
    page = (tmp_path / "runs" / "judged" / "report.html").read_text()
    captions = re.findall(r'<p class="caption"><b>(?:held-out, )?([^<]*)</b>([^<]*)', page)
    for column in ("judge/alignment", "judge/quality"):
        stored = [tmp_path / "runs" / "judged" / "evals" / f"step-{line['step']:06d}.json" for line in evals]
        counts = [json.loads(path.read_text())["scores"][column].count(None) for path in stored]
        assert [line.get("missing", {}).get(column, 0) for line in evals] == counts
        assert sum(counts) > 0
        told = [f"{counts[0]}", *(f"{counts[0]} -> {count}" for count in counts[1:])]
        expected = [f"no {column} for {each} of 6 tasks; its means are those of the others" for each in told]
        assert all((line in said.out) == (re.search("[1-9]", line.partition(" of ")[0]) is not None) for line in expected)
        note = f"no {column} for {counts[0]} → {counts[-1]} of 6 tasks"
        assert [family for family, text in captions if note in text] == (["judge"] if counts[0] or counts[-1] else [])


# Before a run


def recipe(url: str = "http://127.0.0.1:9/v1", **changes: Any) -> Recipe:
    return parse(document(url, Path("runs"), **changes))


def test_doctor_reports_an_api_key_that_is_not_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert list(check_keys(recipe())) == []
    monkeypatch.delenv("OPENAI_API_KEY")
    (finding,) = check_keys(recipe())
    assert finding.text == "OPENAI_API_KEY is not set; reward.rewards.judge needs it for m at http://127.0.0.1:9/v1"
    assert finding.fix.startswith("export OPENAI_API_KEY=")
    assert list(check_keys(recipe(reward__rewards__judge__judge__key=None))) == []
    (other,) = check_keys(recipe(reward__rewards__judge__judge__key="MY_JUDGES_KEY"))
    assert "MY_JUDGES_KEY is not set" in other.text
    (tmp_path / "key").write_text("k")
    monkeypatch.setenv("MY_JUDGES_KEY_FILE", str(tmp_path / "key"))
    assert list(check_keys(recipe(reward__rewards__judge__judge__key="MY_JUDGES_KEY"))) == []


def test_doctor_calls_the_judge_and_reports_missing_columns() -> None:
    with Double() as double:
        assert check_judge(double.url).status == "ok"
        asked = len(double.requests)
        blind = check_scoring(recipe(double.url), None)
        assert len(double.requests) == asked == 6
    assert "not tested" in blind.text
    with Double(lambda digest, times: "401") as double:
        failing = check_judge(double.url)
    assert failing.status == "FAILED"
    assert "judge/alignment, judge/quality missing" in failing.text


def check_judge(url: str) -> Finding:
    made = recipe(url)
    return check_scoring(made, build_sets(made, made.data, size=None))


def test_judge_estimate_contains_calls_tokens_and_dollars() -> None:
    (planned,) = calls_of(recipe(), steps=[3], sets=None)
    assert str(planned).startswith("reward.rewards.judge asks m at http://127.0.0.1:9/v1 108 questions in training and 90 in")
    (calls,) = judge_calls(recipe(), steps=[3], heldout=3)
    assert calls.dollars == pytest.approx((2 * calls.input_tokens + 8 * calls.output_tokens) / 1e6, rel=1e-6)
    assert calls.output_tokens == 150 * 198
    (free,) = judge_calls(recipe(reward__rewards__judge__judge__prices=None), steps=[3], heldout=3)
    assert free.dollars is None
    assert "$" not in str(free)
    win = {"kind": "win_rate", "judge": {"kind": "endpoint", "model": "m"}}
    pairs = {"kind": "several", "rewards": {"win": win, "exact": {"kind": "playground"}}, "combine": {"win/win_rate": 1}}
    (won,) = judge_calls(recipe(reward=pairs, eval__column="exact/overall"), steps=[3], heldout=3)
    assert (won.training, won.evaluation, won.output_tokens) == (3 * 6 * 2, 0, 36)
    assert judge_calls(recipe(reward={"kind": "playground", "combine": {"IF": 1}}, eval__column=None), steps=[3], heldout=3) == []


def test_recipe_with_an_api_key_is_rejected_without_printing_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = document(
        "http://127.0.0.1:9/v1", tmp_path, reward={"kind": "import", "class": "a:B", "args": {"k": KEY}, "combine": {"a": 1}}
    )
    assert cli.main(["train", write(tmp_path, made)]) == 2
    said = capsys.readouterr()
    assert "reward.args.k: contains the value of OPENAI_API_KEY" in said.err
    assert KEY not in said.err + said.out


def test_unreachable_judge_ends_the_run_before_its_first_step_without_stored_results(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, document("http://127.0.0.1:9/v1", tmp_path / "runs", reward__rewards__judge__judge__attempts=1))
    assert cli.main(["train", file]) == 2
    printed = capfd.readouterr().err
    assert "100% of the held-out images have no judge/alignment" in printed
    assert "if the reward leaves images out on purpose, set max_missing to the share that it leaves out" in printed
    folder = tmp_path / "runs" / "judged"
    assert not (folder / "evals.jsonl").exists()
    assert not (folder / "metrics.jsonl").exists()
    with Double() as double:
        assert cli.main(["train", write(tmp_path, document(double.url, tmp_path / "runs")), "--debug"]) == 0
    assert json.loads((folder / "summary.json").read_text())["before"] is not None
