"""Runs whose reward asks a judge server: predicted calls, missing scores, no key in any output, and servers that die."""

import html
import json
import logging
import os
import re
import subprocess
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from judge_double import KEY, Double
from live_server import live
from retouch import cli
from retouch.recipe.document import apply
from retouch.recipe.recipe import load, parse
from retouch.records.folder import RunFolder
from retouch.run import checkpoint
from retouch.run.build import build_sets
from retouch_judge.calls import judge_calls
from retouch_judge.rewards import AspectsReward
from retouch_plan.checks import calls_of, check_keys, check_scoring
from warm_python import python


class Leaky(Double):
    """A server that repeats the caller's API key in every answer and every error."""

    def content(self, body):
        content, words = super().content(body)
        return json.dumps({**json.loads(content), "reasoning": f"you sent Bearer {KEY}"}), words


PRICES = {"input": 2, "output": 8}


def document(url, out, **changes):
    made: dict[str, Any] = {
        "name": "judged", "out": str(out), "steps": 2, "tasks_per_step": 2, "group_size": 3, "learning_rate": 1e-4, "device": "cpu",
        "policy": {"kind": "denoising", "model": {"kind": "playground"}, "train": {"kind": "lora", "rank": 4, "alpha": 8}},
        "rollout": {"num_steps": 3, "transition": {"kind": "cps", "noise_level": 0.7}, "window": {"mode": "window", "size": 1}},
        "data": {"kind": "playground", "complexity": [1], "count": 8},
        "reward": {
            "kind": "several",
            "rewards": {
                "judge": {
                    "kind": "aspects", "n_evals": 2,
                    "judge": {"kind": "endpoint", "model": "m", "base_url": url, "pause": 0.01, "prices": PRICES},
                },
                "exact": {"kind": "playground"},
            },
            "combine": "0.6 * alignment + 0.4 * quality", "max_missing": 0.9,
        },
        "objective": {"kind": "policy_gradient", "clip_low": 1e-4, "clip_high": 1e-4},
        "eval": {"tasks": 3, "every": 1, "column": "judge/alignment"},
    }  # fmt: skip
    return apply(made, [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in changes.items()])


def write(folder, made):
    file = folder / "judged.json"
    file.write_text(json.dumps(made))
    return str(file)


@pytest.fixture(autouse=True)
def key(monkeypatch):
    """Set the API key in the environment, and close the log files afterwards."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    yield
    log = logging.getLogger("retouch")
    for handler in [*log.handlers]:
        log.removeHandler(handler)
        handler.close()


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.slow
def test_run_makes_the_predicted_judge_calls_and_leaks_no_api_key(tmp_path, capfd):
    with Leaky() as double:
        file = write(tmp_path, document(double.url, tmp_path / "runs", eval__guided_k=2))
        assert cli.main(["train", file, "--debug"]) == 0
        asked = len(double.requests)
        assert double.refused == []
    (calls,) = judge_calls(load(file), steps=[2], heldout=3)
    assert calls.training == 2 * 6 * 3 * 2
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


def test_failed_judge_calls_give_missing_scores_per_column_and_are_reported(tmp_path, capfd):
    def fault(digest, times):
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


def test_a_run_that_stops_for_want_of_answers_quotes_one_in_its_error_the_report_and_the_ledger(tmp_path, capsys):
    changes = {"reward__max_missing": 0.1, "reward__rewards__judge__judge__attempts": 1}
    with Double(lambda digest, times: "prose") as double:
        file = write(tmp_path, document(double.url, tmp_path / "runs", **changes))
        assert cli.main(["train", file]) != 0
    answer = "unusable answer: 'I think it is a fine picture.'"
    assert f"that it leaves out. The latest answer that could not be used: {answer}" in capsys.readouterr().err
    run = tmp_path / "runs" / "judged"
    assert cli.main(["ledger", str(run), "answers", "--failed", "--top", "1"]) == 0
    said = capsys.readouterr().out
    assert said.count(answer) == 1
    assert said.startswith("m, typed, attempts 1, image ")
    assert cli.main(["report", str(run)]) == 0
    page = html.unescape((run / "report.html").read_text())
    assert re.search(r"Judges without a usable answer: </strong>(\d+) of \1 calls, the latest with " + re.escape(answer), page)


# Before a run


class Undeclared(AspectsReward):
    questions = ()


class Declared(AspectsReward):
    questions = (("Look at this picture.", 1),)


def test_the_estimate_for_a_judge_of_the_users_own_counts_declared_questions_and_else_says_that_the_number_is_not_known():
    judge = {"kind": "endpoint", "model": "m", "prices": PRICES}
    said = []
    for own in (Undeclared, Declared):
        reward = {
            "kind": "import",
            "class": f"{own.__module__}:{own.__name__}",
            "args": {"judge": judge},
            "combine": {"quality": 1},
        }
        changed = apply(document("http://127.0.0.1:9/v1", "runs", eval__column="quality"), [f"reward={json.dumps(reward)}"])
        said += judge_calls(parse(changed, allow_imports=[own.__module__]), steps=[3], heldout=3)
    undeclared, declared = said
    assert "how many questions is not known: declare them in the class, for example Undeclared.questions = ((RUBRIC, 1),)" in str(
        undeclared
    )
    assert undeclared.dollars is None
    assert (declared.training, declared.dollars > 0) == (3 * 6 * 3, True)


def recipe(url="http://127.0.0.1:9/v1", **changes):
    return parse(document(url, Path("runs"), **changes))


def test_doctor_reports_an_api_key_that_is_not_set(monkeypatch, tmp_path):
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


def test_doctor_calls_the_judge_and_reports_missing_columns():
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


def check_judge(url):
    made = recipe(url)
    return check_scoring(made, build_sets(made, made.data, size=None))


def test_judge_estimate_contains_calls_tokens_and_dollars():
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


def test_recipe_with_an_api_key_is_rejected_without_printing_it(tmp_path, capsys):
    reward = {"kind": "import", "class": "a:B", "args": {"k": KEY}, "combine": {"a": 1}}
    assert cli.main(["train", write(tmp_path, document("http://127.0.0.1:9/v1", tmp_path, reward=reward))]) == 2
    said = capsys.readouterr()
    assert "reward.args.k: contains the value of OPENAI_API_KEY" in said.err
    assert KEY not in said.err + said.out


def test_unreachable_judge_ends_the_run_before_its_first_step_without_stored_results(tmp_path, capfd):
    file = write(tmp_path, document("http://127.0.0.1:9/v1", tmp_path / "runs", reward__rewards__judge__judge__attempts=1))
    assert cli.main(["train", file]) == 2
    printed = capfd.readouterr().err
    assert "100% of the held-out images have no judge/alignment" in printed
    assert "if the reward leaves images out on purpose, set max_missing to the share that it leaves out" in printed
    folder = tmp_path / "runs" / "judged"
    assert not (folder / "evals.jsonl").exists()
    assert not (folder / "metrics.jsonl").exists()
    with Double() as double:
        assert cli.main(["train", write(tmp_path, document(double.url, tmp_path / "runs", steps=1)), "--debug"]) == 0
    assert json.loads((folder / "summary.json").read_text())["before"] is not None


TINY = {
    "tasks_per_step": 2, "group_size": 2, "microbatch": 4, "device": "cpu", "trackers": [], "ranks": 2, "rollout.chunk": 2,
    "rollout.num_steps": 3, "rollout.window": {"mode": "window", "size": 2, "high": 2}, "eval.tasks": 4, "eval.best_of_k": 0,
    "samples.every": 0, "checkpoints.every": 1000,
}  # fmt: skip
DEADLINE = 8


@contextmanager
def training(out, reward, *, ranks, steps):
    """A process that trains a tiny version of `playground/grpo` with the given reward."""
    settings = {**TINY, "name": "run", "out": str(out), "steps": steps, "reward": reward}
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    launch = ["launch", "--nproc", str(ranks)] if ranks > 1 else ["train"]
    command = [python(), "-W", "ignore", "-m", "retouch.cli", *launch, "recipes/playground/grpo.jsonnet", *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def steps_of(folder):
    file = folder.root / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def check_end(process, folder, says, *, ranks, of_ranks=all):
    """Check that all ranks (or any) ended with this error, and that the newest checkpoint includes every step of the metrics."""
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 2, said
    logs = [said] if ranks == 1 else [(folder.root / "logs" / f"rank-{rank}.log").read_text() for rank in range(ranks)]
    assert of_ranks(says in log for log in logs), logs
    newest = checkpoint.latest(folder.checkpoints)
    assert newest is not None
    assert checkpoint.load(newest).step == steps_of(folder)


@contextmanager
def servers(ports):
    with ExitStack() as stack:
        yield [stack.enter_context(live("playground", port=port)).url for port in ports]


def remote(urls, **settings):
    return {"kind": "remote", "endpoints": urls, **settings, "combine": {"overall": 1}}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_death_of_all_reward_servers_ends_every_rank_with_a_checkpoint_and_the_run_resumes(tmp_path, ranks):
    folder = RunFolder(tmp_path / "run")
    with ExitStack() as alive:
        urls = alive.enter_context(servers([0, 0]))
        reward = remote(urls, deadline=DEADLINE)
        with training(tmp_path, reward, ranks=ranks, steps=10_000) as process:
            while steps_of(folder) < 2:
                assert process.poll() is None, process.communicate()
                time.sleep(0.05)
            alive.close()
            check_end(process, folder, "could not be judged, and the recipe allows", ranks=ranks)
    done = steps_of(folder)
    ports = [urlsplit(url).port or 0 for url in urls]
    with servers(ports), training(tmp_path, reward, ranks=ranks, steps=done + 1) as process:
        said, _ = process.communicate(timeout=600)
        assert process.returncode == 0, said
    assert steps_of(folder) == done + 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_spent_budget_ends_every_rank_with_a_checkpoint_and_a_larger_budget_resumes(tmp_path, ranks):
    """Each rank makes two calls before the first step; a step makes two in total. With seven more calls, the fourth step fails."""
    folder = RunFolder(tmp_path / "run")
    with servers([0]) as urls:
        reward = remote(urls, calls=2 * ranks + 7, rate_file=str(tmp_path / "quota"))
        with training(tmp_path, reward, ranks=ranks, steps=4) as process:
            # The budget is shared, so any rank may make the call that exceeds it; the other ranks refer to the log of that rank.
            check_end(process, folder, "raise its `calls` to continue", ranks=ranks, of_ranks=any)
        assert steps_of(folder) == 3
        with training(tmp_path, {**reward, "calls": 100}, ranks=ranks, steps=4) as process:
            said, _ = process.communicate(timeout=600)
            assert process.returncode == 0, said
    assert steps_of(folder) == 4
