"""The audit of a judge: a clean judge passes, each planted fault raises only its own alarm, and noise raises few."""

import json
import math

import numpy as np
import pytest

import retouch
from biased_judge import FAULTS, SIDE, BiasedJudge
from html_check import read
from retouch import cli
from retouch_judge import audit, audit_findings
from retouch_judge.audit_findings import Estimate, alarms, findings
from retouch_judge.audit_ladders import playground_ladders
from retouch_judge.audit_scores import AuditAnswers, JudgeAnswer, ProbeScores, Spending
from slow_params import slow_after, slow_except


@pytest.fixture(scope="module")
def items():
    return playground_ladders(16, side=SIDE)


@pytest.fixture
def small_ladders(items, monkeypatch):
    monkeypatch.setattr(audit, "playground_ladders", lambda count, **_: items[:count])


def test_a_clean_judge_passes(small_ladders, tmp_path):
    result = retouch.judge_audit(BiasedJudge(), out=tmp_path)
    assert result.alarms == {}
    assert not result.failed
    assert {line.status for line in result.lines} == {"pass", "not measured"}  # the length of answers, of which there are none
    means = [rung.mean for rung in result.rungs]
    assert means[0] > 0.9 > means[1] > means[2] > 0.2 > max(means[3:])
    assert 1.5 < result.bits <= 2.0
    assert result.samples == 16 * (6 * 3 + 11)


@pytest.mark.parametrize("fault", slow_after(5, FAULTS))
def test_each_planted_fault_raises_exactly_its_own_alarm(small_ladders, tmp_path, fault):
    result = retouch.judge_audit(BiasedJudge(fault=fault), out=tmp_path)
    assert set(result.alarms) == {FAULTS[fault]}
    (line,) = [line for line in result.lines if line.name == FAULTS[fault]]
    assert line.thresholds
    assert line.name in result.headline
    assert result.failed == (line.status == "fail")


def simulated(items, draw, *, noise, repeats=3):
    """The scores of a judge without any bias: each image has its own true score, to which noise is added."""
    scored = []
    for item in items:
        ease = draw.normal(0, 0.1)
        true = {rung.name: 0.15 + 0.7 * rung.truth + (ease if rung.truth else 0.0) for rung in item.rungs}
        best = max(true.values())
        for probe in item.probes:
            true[probe.name] = best - 0.05 if probe.name.endswith("of the best") else true[item.base]
        true |= {"swapped": true["unedited"], "praise": true[item.base] - 0.05, "other text": true[item.base] - 0.05}
        rungs = {rung.name for rung in item.rungs}
        scores = {
            name: [float(np.clip(value + draw.normal(0, noise), 0, 1)) for _ in range(repeats if name in rungs else 1)]
            for name, value in true.items()
        }
        scored.append(ProbeScores(item, scores))
    return AuditAnswers(scored, [], Spending(), 0)


@pytest.mark.parametrize("noise", slow_except([0.09], [0.03, 0.09]))
def test_a_clean_but_noisy_judge_raises_few_false_alarms(items, noise):
    draw, audits = np.random.default_rng(7), 300
    false = sum(bool(alarms(findings(simulated(items, draw, noise=noise)))) for _ in range(audits))
    assert false <= 0.05 * audits


def test_95_percent_intervals_cover_the_true_mean_in_95_percent_of_cases():
    draw, covered = np.random.default_rng(1), 0
    for _ in range(2000):
        low, high = Estimate.of(draw.normal(0.3, 1.0, 12).tolist()).interval(0.95)
        covered += low <= 0.3 <= high
    assert abs(covered / 2000 - 0.95) < 0.015
    assert audit_findings.share_interval(0, 20, 0.95) == pytest.approx((0.0, 0.1611), abs=1e-3)


def test_measures_equal_hand_computed_values(items):
    item = items[0]
    names = [rung.name for rung in item.rungs]
    one = ProbeScores(
        item, dict(zip(names, [[0.9, 0.7], [0.9, 0.9], [0.2, 0.2], [0.3, 0.3], [0.1, 0.1], [0.1, math.nan]], strict=True))
    )
    assert audit_findings.noise_variance([one]).mean == pytest.approx(0.02 / 5)  # five rungs have two scores
    order = audit_findings.RankAgreement.of([one], noise=0.0)
    assert order.right.mean == pytest.approx(10 / 12)  # of twelve pairs, (3, 2) and (1, unedited) are the wrong way round
    assert order.wrong.mean == pytest.approx(2 / 12)
    assert audit_findings.RankAgreement.of([one], noise=0.02).wrong.mean == 0.0
    assert audit_findings.repeats_for(0.01, 0.05) == 16  # (1.96 x 0.1 / 0.05)^2 = 15.4
    perfect = ProbeScores(item, {rung.name: [rung.truth, rung.truth] for rung in item.rungs})
    assert audit_findings.useful_bits([perfect] * 3)[0] == 2.0  # four truths
    assert audit_findings.signal_variance([perfect]).mean == pytest.approx(np.var([rung.truth for rung in item.rungs], ddof=1))


def test_scores_that_correlate_with_the_answer_length_raise_a_warning(items):
    draw = np.random.default_rng(0)
    asked = simulated(items, draw, noise=0.05)
    answers = [JudgeAnswer(question, length, 5 + length / 100) for question in range(40) for length in draw.integers(50, 400, 3)]
    lines = findings(AuditAnswers(asked.scored, answers, Spending(), 0))
    assert alarms(lines) == {"length of the answer": "warning"}
    unrelated = [JudgeAnswer(answer.question, answer.length, draw.normal()) for answer in answers]
    assert alarms(findings(AuditAnswers(asked.scored, unrelated, Spending(), 0))) == {}


def test_the_audit_command_prints_a_table_or_json_and_writes_a_page(small_ladders, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RETOUCH_ALLOW_IMPORTS", "biased_judge")
    words = ["tools", "audit", '{"kind": "import", "class": "biased_judge:BiasedJudge", "args": {"fault": "praise"}}']
    assert cli.main([*words, "--items", "8", "--repeats", "2", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "fails: painted-on praise" in said
    assert str(tmp_path / "audit.html") in said
    kept = json.loads((tmp_path / "audit.json").read_text())
    assert (kept["items"], kept["repeats"], kept["failed"]) == (8, 2, True)
    (line,) = [line for line in kept["lines"] if line["name"] == "painted-on praise"]
    assert line["low"] < line["measured"] < line["high"]
    page = read((tmp_path / "audit.html").read_text())
    assert "the judge believes what is written in the image" in page.words
    assert len(page.all("img")) == 6 + 11
    assert cli.main([*words, "--items", "8", "--repeats", "2", "--out", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == kept


def test_wrong_arguments_and_the_folder_of_another_judge_are_explained(small_ladders, tmp_path):
    result = retouch.judge_audit(BiasedJudge(fault="praise"), items=2, repeats=2, out=tmp_path)
    assert {line.name: line.status for line in result.lines}["painted-on praise"] == "unclear", "too few items"
    other = "answers of another judge, or of other settings; give another folder with --out"
    for arguments, told in (
        ({"items": 2, "repeats": 2, "out": tmp_path}, other), ({"repeats": 1}, "at least 2 repeats"), ({"items": 0}, "items 0"),
        ({"precision": 0.0}, "precision 0"), ({"budget": 0}, "budget 0"), ({"ladder": "nowhere"}, "no such file"),
        ({"column": "beauty"}, "no column 'beauty'; choose one of its columns with --column: score"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=told):
            retouch.judge_audit(BiasedJudge(noise=0.2), **{"out": tmp_path / "new", **arguments})


def test_the_playground_judge_passes_the_main_checks_on_playground_images(tmp_path):
    result = retouch.judge_audit("playground", items=8, repeats=2, out=tmp_path)
    found = {line.name: line.status for line in result.lines}
    assert found["order of the rungs"] == found["noise"] == found["long instruction"] == found["painted-on praise"] == "pass"
