"""Judges that fail or give invalid answers, and killed audits: no wrong score is recorded, and no recorded question is repeated."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from faulty_judge import SCORES, _json, faulty_judge
from judge_double import FAULTS, KEY, Double
from retouch.rewards.ledger.database import decode_scores, open_read_only
from retouch_judge import audit
from retouch_judge.audit import judge_audit
from retouch_judge.audit_ladders import playground_ladders
from retouch_judge.kinds import Endpoint
from retouch_judge.models import Prices
from retouch_judge.rewards import AspectsReward, GroundReward
from slow_params import slow_after
from warm_python import python

QUICK = {"timeout": 30.0, "deadline": 60.0, "attempts": 1, "pause": 0.001, "longest_pause": 0.01}
QUESTIONS = 6 * 2 + 11  # of an item with two repeats


@pytest.fixture(autouse=True)
def small_audits(monkeypatch):
    items = playground_ladders(3, side=72)
    monkeypatch.setattr(audit, "playground_ladders", lambda count, **_: items[:count])
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def judged(url, **changes):
    return AspectsReward(
        judge=Endpoint(model="judge", base_url=url, **{**QUICK, **changes}), aspects=("alignment",), n_evals=1, temperature=0.7
    )


def ledger_answers(folder):
    """The usable answers in the ledger, by their content; no content has two."""
    with closing(open_read_only(folder / "ledger.sqlite")) as connection:
        rows = connection.execute("SELECT content, scores FROM answers WHERE scores IS NOT NULL").fetchall()
    assert len({content for content, _ in rows}) == len(rows)
    return {content: decode_scores(scores) for content, scores in rows}


@pytest.fixture(scope="module")
def faultless_answers(tmp_path_factory):
    """What a judge without faults answers about the first item."""
    folder = tmp_path_factory.mktemp("faultless_answers")
    with pytest.MonkeyPatch.context() as patch, Double() as double:
        patch.setenv("OPENAI_API_KEY", KEY)
        patch.setattr(audit, "playground_ladders", lambda count, **_: playground_ladders(1, side=72))
        judge_audit(judged(double.url), items=1, repeats=2, out=folder)
    return ledger_answers(folder)


@pytest.mark.parametrize("fault", slow_after(3, FAULTS))
def test_faulty_answers_are_not_recorded_and_only_missing_ones_are_requested_again(tmp_path, faultless_answers, fault):
    """A third of the questions get the fault once. A 429 with Retry-After is retried at once and does not count as an attempt."""

    def sometimes(digest, times):
        return fault if int(digest[:4], 16) % 3 == 0 and times == 0 else None

    limits = {"timeout": 2.0} if fault == "time-out" else {}
    with Double(sometimes, hang=4.0) as double:
        first = judge_audit(judged(double.url, **limits), items=1, repeats=2, out=tmp_path)
        before = ledger_answers(tmp_path)
        assert before == faultless_answers if fault == "429" else 0 < len(before) < len(faultless_answers)
        assert before.items() <= faultless_answers.items()
        missing = next(line for line in first.lines if line.name == "missing scores")
        assert missing.measured == pytest.approx(1 - len(before) / QUESTIONS)
        asked, double.fault = len(double.requests), lambda *_: None  # a busy machine sends some questions only now
        second = judge_audit(judged(double.url), items=1, repeats=2, out=tmp_path)
        assert len(double.requests) - asked == len(faultless_answers) - len(before)
    assert ledger_answers(tmp_path) == faultless_answers
    assert next(line for line in second.lines if line.name == "missing scores").measured == 0
    assert double.refused == []


def test_retries_within_an_audit_leave_no_missing_scores(tmp_path, faultless_answers):
    """Every question gets a fault at each of its first two attempts; the kinds alternate."""
    kinds = itertools.cycle([kind for kind in FAULTS if kind not in ("time-out", "refusal", "filtered")])
    with Double(lambda digest, times: next(kinds) if times < 2 else None) as double:
        result = judge_audit(judged(double.url, attempts=6), items=1, repeats=2, out=tmp_path)
    assert next(line for line in result.lines if line.name == "missing scores").measured == 0
    assert next(line for line in result.lines if line.name == "unreadable answers").measured > 0.2
    assert ledger_answers(tmp_path).keys() == faultless_answers.keys()  # a repeated question has another seed, and another score
    assert result.requests == 3 * QUESTIONS


def test_invalid_answers_of_a_judge_are_not_recorded(tmp_path):
    """The first answer is valid, because an audit raises if no image of its first item gets a score."""
    lies = itertools.chain([_json], itertools.cycle(SCORES.values()))
    with faulty_judge() as judge:
        judge.make_reply = lambda true: next(lies)(true)
        section = GroundReward(judge=judged(judge.url, key=None).judge, temperature=0.7)  # wrong replies have a score from 0 to 10
        result = judge_audit(section, items=3, repeats=3, out=tmp_path)
    assert len(judge.requests) > len(SCORES)
    assert list(ledger_answers(tmp_path).values()) == [{"score": 7.0}]
    assert result.failed
    assert result.alarms["missing scores"] == "fail"


def test_an_audit_raises_after_the_first_item_if_the_judge_never_answers(tmp_path):
    with Double(lambda digest, times: "503") as double:
        with pytest.raises(ValueError, match=r"no image of the first item got a score \(23 HTTP 503\); correct the judge"):
            judge_audit(judged(double.url), items=3, repeats=2, out=tmp_path)
        assert len(double.requests) == QUESTIONS


@pytest.mark.parametrize(("kind", "questions"), [("viescore", 44), ("win_rate", 60), ("several", 44)])
def test_no_kind_of_judge_is_asked_a_question_twice(tmp_path, kind, questions):
    """Two of the 23 samples share another one's image, whose quality is asked for once; ``win_rate`` compares pairs of rungs."""
    with Double(words={"first": 0.3, "second": 0.6}) as double:
        one = {"kind": "aspects", "aspects": ["alignment"], "n_evals": 1, "temperature": 0.7}
        document = {"kind": kind, "temperature": 0.7}
        model = judged(double.url).judge.model_dump(mode="json")
        if kind == "several":
            two = {**one, "aspects": ["quality"], "judge": model}
            document = {
                "kind": kind,
                "rewards": {"a": {**one, "judge": model}, "b": two},
                "combine": "sqrt(a_alignment * b_quality)",
            }
        else:
            document["judge"] = model
        results = [judge_audit(json.dumps(document), items=1, repeats=2, out=tmp_path) for _ in range(2)]
        assert len(double.requests) == len(ledger_answers(tmp_path)) == questions
    assert results[0].to_json() == results[1].to_json()
    assert (kind == "win_rate") == (results[0].samples == 12)


def test_an_audit_stops_at_its_budget_and_the_next_call_continues_it(tmp_path):
    with Double() as double:
        first = judge_audit(judged(double.url), items=3, repeats=2, budget=2 * QUESTIONS + 3, out=tmp_path)
        assert (first.items, first.left, first.failed) == (2, 1, True)
        assert "after 2 of 3 items; the same command asks the rest" in str(first)
        assert len(double.requests) <= 2 * QUESTIONS + 3
        second = judge_audit(judged(double.url), items=3, repeats=2, budget=2 * QUESTIONS + 3, out=tmp_path)
        assert (second.items, second.left) == (3, 0)
        assert len(double.requests) == len(ledger_answers(tmp_path)) == 3 * QUESTIONS
        with pytest.raises(ValueError, match="does not suffice for one item; raise it with --budget"):
            judge_audit(judged(double.url), items=1, repeats=2, budget=5, out=tmp_path / "other")


def test_audit_costs_include_answers_from_the_ledger(tmp_path):
    with Double() as double:
        section = judged(double.url, prices=Prices(input=1.0, output=10.0))
        results = [judge_audit(section, items=1, repeats=2, out=tmp_path) for _ in range(2)]
    for result in results:  # the second audit sends no request
        assert (result.requests, result.tokens) == (QUESTIONS, 110 * QUESTIONS)
        assert result.cost == pytest.approx(QUESTIONS * (100 * 1.0 + 10 * 10.0) / 1e6)
        assert result.per_bit(result.cost) == pytest.approx(result.cost / (result.bits * QUESTIONS))


KILLED = """
import sys
from retouch_judge import audit, audit_ladders
from test_judge_audit_faults import judged
items = audit_ladders.playground_ladders(3, side=72)
audit.playground_ladders = lambda count, **_: items
audit.judge_audit(judged(sys.argv[1]), items=3, repeats=2, out=sys.argv[2])
"""


@pytest.mark.slow
def test_a_killed_audit_resumes_without_repeating_recorded_questions(tmp_path):
    with Double() as double:
        double.fault = lambda digest, times: time.sleep(0.05)
        paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        child = subprocess.Popen([python(), "-c", KILLED, double.url, str(tmp_path)], env={**os.environ, "PYTHONPATH": paths})
        try:
            end = time.monotonic() + 120
            while len(double.requests) < QUESTIONS + 15 and child.poll() is None and time.monotonic() < end:
                time.sleep(0.005)
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()
        time.sleep(0.3)  # until then the requests of the killed process are answered
        before, asked = ledger_answers(tmp_path), len(double.requests)
        assert 0 < len(before) < 3 * QUESTIONS
        result = judge_audit(judged(double.url), items=3, repeats=2, out=tmp_path)
        assert len(double.requests) - asked == 3 * QUESTIONS - len(before)
    assert ledger_answers(tmp_path).items() >= before.items()
    assert result.items == 3
    assert json.loads((tmp_path / "audit.json").read_text())["items"] == 3
