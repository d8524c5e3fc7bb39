"""Stored answers: what was answered is not asked again, even after a restart, and every question is recorded."""

import hashlib
import sqlite3
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from judge_double import on_panel
from pictures import picture
from retouch.rewards.ledger.database import Database, ImageHasher, image_hash, open_read_only
from retouch.types import Column, Sample, Task
from retouch_judge.base import Panel, fingerprint
from retouch_judge.cache import AnswerCache, CachedJudgeClient, CachedReward, RequestStats, question_hash
from retouch_judge.questions import Answer, Question, ScoresForm, WordForm
from retouch_judge.rewards import AspectsReward, ComplexEditReward, DigitReward, VieScore, YesReward
from retouch_judge.wording import Scale

FORM = ScoresForm({"score": Scale(0, 10)})


def question(seed=0, *, image=0, rubric="Judge.", form=FORM, temperature=0.5):
    return Question(rubric, ("Picture:", picture(image)), form, seed=seed, temperature=temperature)


class RandomClient:
    """A judge client with random answers, which records the questions."""

    identity = "random"

    def __init__(self):
        self.asked: list[Question] = []
        self.faulty = False

    def ask(self, questions):
        self.asked += questions
        if self.faulty:
            return [Answer(fault="HTTP 503", attempts=3, faults=("time-out", "HTTP 500"), seconds=2.0) for _ in questions]
        given = np.random.default_rng().uniform(0, 10, len(questions))
        cost = {"seconds": 0.25, "input_tokens": 100, "output_tokens": 10, "cost": 0.001}
        return [
            Answer(
                scores={name: float(value) for name in getattr(each.form, "scales", {"x": 0})},
                text=f"I say {value}",
                attempts=2,
                faults=("HTTP 503",),
                seed=each.seed + 7,
                temperature=each.temperature,
                **cost,
            )
            for each, value in zip(questions, given, strict=True)
        ]


@pytest.fixture
def reopen(tmp_path):
    """Opens the same ledger again and again, as restarts do."""
    with ExitStack() as opened:

        def begin():
            opened.pop_all().close()
            return AnswerCache(opened.enter_context(closing(Database(tmp_path / "ledger.sqlite"))))

        yield begin


@pytest.fixture
def with_ledger(reopen):
    with ExitStack() as made:

        def make(reward):
            made.pop_all().close()
            return made.enter_context(closing(CachedReward(reward, reopen())))

        yield make


def sample(number, **changes):
    known = {"id": f"t{number}", "instruction": "make it blue", "images": (picture(50 + number),), **changes}
    return Sample(Task(**known), picture(number))


def rows(path, columns):
    with closing(open_read_only(path)) as reader:
        return reader.execute(f"SELECT {columns} FROM answers ORDER BY number").fetchall()


def test_the_same_question_is_asked_once_also_after_a_restart(reopen):
    asker, wanted = RandomClient(), [question(seed, image=image) for image in range(3) for seed in range(2)]
    first = CachedJudgeClient(asker, reopen()).ask(wanted)
    assert len(asker.asked) == 6
    for _ in range(2):
        again = CachedJudgeClient(asker, reopen()).ask(wanted[::-1])[::-1]
        assert [answer.scores for answer in again] == [answer.scores for answer in first]
        assert [(answer.text, answer.seed) for answer in again] == [(answer.text, answer.seed) for answer in first]
        assert all((answer.attempts, answer.input_tokens, answer.seconds, answer.cost) == (0, 0, 0.0, None) for answer in again)
    assert len(asker.asked) == 6
    other = [question(image=7), question(1, image=7)]  # images of a group may be identical
    answers = CachedJudgeClient(asker, reopen()).ask([*other, other[0], other[0]])
    assert len(asker.asked) == 8
    assert answers[0].scores == answers[2].scores == answers[3].scores != answers[1].scores
    asker.identity = "another"
    CachedJudgeClient(asker, reopen()).ask([question()])
    assert len(asker.asked) == 9


def test_judges_reuse_stored_answers_and_ask_only_new_repeats(reopen):
    asker = RandomClient()
    given = [Sample(Task(f"t{k}", "make it blue", images=(picture(50 + k),)), picture(k)) for k in range(3)]

    def scores(repeats):
        return on_panel(VieScore, Panel(CachedJudgeClient(asker, reopen()), repeats=repeats, temperature=0.7))(given)

    first = scores(3)
    assert len(asker.asked) == 3 * 2 * 3
    again = scores(3)
    assert len(asker.asked) == 18
    assert all(torch.equal(first[name], again[name]) for name in first)
    scores(4)
    assert len(asker.asked) == 18 + 6  # the fourth repeat alone is new


def test_questions_that_differ_in_any_input_are_asked_separately(reopen):
    asker = RandomClient()
    asked = [
        question(),
        question(1),
        question(image=1),
        question(rubric="Judge well."),
        question(form=ScoresForm({"score": Scale(0, 5)})),
        question(form=ScoresForm({"score": Scale(0, 10)}, reasoning=False)),
        question(form=WordForm("score", {"no": 0.0, "yes": 10.0})),
        question(temperature=0.6),
        Question("Judge.", ("Picture", ":", picture(0)), FORM, seed=0, temperature=0.5),
        Question("Judge.", ("Picture:", picture(0), picture(0)), FORM, seed=0, temperature=0.5),
    ]
    cached = CachedJudgeClient(asker, reopen())
    for number, other in enumerate(asked, start=1):
        cached.ask([other])
        assert len(asker.asked) == number


def test_every_call_is_recorded_and_failed_questions_are_asked_again(reopen, tmp_path):
    asker, ledger = RandomClient(), tmp_path / "ledger.sqlite"
    asker.faulty = True
    (missing,) = CachedJudgeClient(asker, reopen()).ask([question(3)])
    assert missing.fault == "HTTP 503"
    asker.faulty = False
    (answer,) = CachedJudgeClient(asker, reopen()).ask([question(3)])
    assert answer.scores
    assert len(asker.asked) == 2
    kept = rows(ledger, "scores IS NULL, fault, attempts, faults")
    assert kept == [(1, "HTTP 503", 3, '["time-out", "HTTP 500"]'), (0, "", 2, '["HTTP 503"]')]
    (_, text), *_ = reversed(rows(ledger, "number, text"))
    assert text.startswith("I say ")
    kept = rows(ledger, "picture, judge, rubric, seed, temperature, seconds, input_tokens, output_tokens, cost")
    assert kept[1] == (image_hash(picture(0)), "random", fingerprint("Judge."), 10, 0.5, 0.25, 100, 10, 0.001)


def test_bypassed_questions_are_always_asked_and_their_answers_are_not_reused(reopen):
    asker, answers = RandomClient(), reopen()
    cached = CachedJudgeClient(asker, answers)
    first = cached.ask([question()])
    with answers.bypass():
        fresh = cached.ask([question(), question()])
    assert len(asker.asked) == 3
    assert cached.ask([question()])[0].scores == first[0].scores not in [answer.scores for answer in fresh]
    assert len(asker.asked) == 3
    with answers.bypass():
        cached.ask([question(image=8)])
    cached.ask([question(image=8)])
    assert len(asker.asked) == 5


def test_a_question_in_progress_is_not_asked_by_another_thread(reopen):
    asked, may_answer = threading.Event(), threading.Event()

    class Waiting(RandomClient):
        def ask(self, questions):
            asked.set()
            assert may_answer.wait(60)
            return super().ask(questions)

    asker = Waiting()
    cached = CachedJudgeClient(asker, reopen())
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cached.ask, [question()])
        assert asked.wait(60)
        second = pool.submit(cached.ask, [question()])
        may_answer.set()
        assert first.result(60)[0].scores == second.result(60)[0].scores
    assert len(asker.asked) == 1


def test_api_keys_of_the_environment_are_not_stored(reopen, tmp_path, monkeypatch):
    keys = ("canary-0a1b2c3d4e5f", "another-0a1b2c3d4e5f")
    for variable, key in zip(("OPENAI_API_KEY", "RETOUCH_TOKEN"), keys, strict=True):
        monkeypatch.setenv(variable, key)

    class Leaky(RandomClient):
        identity = f"judge of {keys[0]}"

        def ask(self, questions):
            leaked = f"you sent {keys[0]} and {keys[1]}"
            return [Answer(scores={"score": 1.0}, text=leaked, fault=leaked, faults=(leaked,), attempts=1) for _ in questions]

    CachedJudgeClient(Leaky(), reopen()).ask([question()])
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"you sent [key] and [key]" in written
    assert not any(key.encode() in written for key in keys)


class RandomReward:
    """A remote reward with random scores and request statistics, which records the ids of the tasks."""

    columns: Mapping[str, Column] = {"quality": Column(0.0, 1.0), "notes": Column(0.0, 1.0, diagnostic=True)}
    fingerprint = "server 1"
    missing = ""

    def __init__(self):
        self.asked: list[str] = []

    def __call__(self, samples):
        self.asked += [sample.task.id for sample in samples]
        quality = torch.rand(len(samples))
        quality[[k for k, sample in enumerate(samples) if sample.task.id == self.missing]] = float("nan")
        return {"quality": quality, "notes": torch.full((len(samples),), float("nan"))}

    def submit_with_stats(self, samples):
        done = Future()
        done.set_result((self(samples), [RequestStats(0.5, ("timeout", "http_503"), attempts=3)] * len(samples)))
        return done


def test_a_sample_is_sent_once_also_after_a_restart(with_ledger):
    server, given = RandomReward(), [sample(k) for k in range(4)]
    first = with_ledger(server)([*given, given[0]])
    assert server.asked == ["t0", "t1", "t2", "t3"]
    again = with_ledger(server).submit([*given, given[0]]).result()
    assert len(server.asked) == 4
    assert torch.equal(first["quality"], again["quality"])
    assert again["notes"].isnan().all()
    assert first["quality"][0] == first["quality"][4]


def test_stored_scores_outside_the_declared_range_are_requested_again(with_ledger, reopen):
    server, given = RandomReward(), [sample(k) for k in range(3)]
    with_ledger(server)(given)
    for number, poison in enumerate(("1e999", "-1e999", "1e300", "1.5", "-0.5")):
        with reopen()._database.writing() as connection:
            stored = f'{{"quality": {poison}, "notes": null}}'
            connection.execute("UPDATE answers SET scores = ? WHERE number = ?", (stored, 2 if number == 0 else 3 + number))
        again = with_ledger(server)(given)
        assert server.asked == ["t0", "t1", "t2", *["t1"] * (number + 1)]
        assert again["quality"].isfinite().all()
        assert again["quality"].max() <= 1


def test_samples_that_differ_in_any_field_or_reward_are_scored_separately(with_ledger):
    server, one = RandomReward(), sample(1)
    cached = with_ledger(server)
    given = [one, replace(one, completion="a red door"), replace(one, completion="a blue door"), replace(one, image=picture(9))]
    for changes in (
        *({"instruction": "make it red"}, {"images": (picture(9),)}, {"images": ()}, {"mask": picture(9).convert("L")}),
        *({"reference": picture(9)}, {"target": picture(9)}, {"text": "open"}, {"tags": {"complexity": "2"}}),
        *({"meta": {"requirement": "red"}}, {"id": "other"}),
    ):
        given.append(sample(1, **changes))
    for number, other in enumerate(given, start=1):
        cached([one, other])
        assert len(server.asked) == number
    server.fingerprint = "server 2"
    with_ledger(server)([one])
    assert len(server.asked) == len(given) + 1


def test_a_sample_with_a_missing_score_is_scored_again_and_its_requests_are_recorded(with_ledger, tmp_path):
    server = RandomReward()
    server.missing = "t1"
    scores = with_ledger(server)([sample(0), sample(1)])
    assert scores["quality"].isnan().tolist() == [False, True]
    server.missing = ""
    assert not with_ledger(server)([sample(0), sample(1)])["quality"].isnan().any()
    assert server.asked == ["t0", "t1", "t1"]
    kept = rows(tmp_path / "ledger.sqlite", "fault, seconds, attempts, faults")
    assert kept == [(fault, 0.5, 3, '["timeout", "http_503"]') for fault in ("", "missing quality", "")]


def test_read_only_connections_reject_writes_and_other_formats(tmp_path):
    Database(tmp_path / "ledger.sqlite").close()
    with closing(open_read_only(tmp_path / "ledger.sqlite")) as reader, pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.execute("DELETE FROM answers")
    sqlite3.connect(tmp_path / "other.sqlite").close()
    for name, says in (("other", "has format 0"), ("none", "cannot be used")):
        with pytest.raises(ValueError, match=says):
            open_read_only(tmp_path / f"{name}.sqlite")


@pytest.mark.parametrize(
    ("judge", "fields", "digest"),
    [
        (VieScore, {}, "a79f200610b1efa5"),
        (AspectsReward, {}, "e2d3591a648abdce"),
        (ComplexEditReward, {}, "d26eda62d045cde5"),
        (YesReward, {}, "f9185b1b1b79fce4"),
        (YesReward, {"by": "choice"}, "8f3b75c6f16782f9"),
        (DigitReward, {}, "f96b57224442a9c2"),
    ],
    ids=["viescore", "aspects", "complex_edit", "yes", "choice", "digit"],
)
def test_question_hashes_match_those_of_existing_ledgers(judge, fields, digest):
    """If a hash changes, judges are asked again, at a cost, about everything that existing ledgers have answers to."""
    client, before, after = RandomClient(), Image.new("RGB", (8, 8), (200, 10, 10)), Image.new("RGB", (8, 8), (10, 10, 200))
    client.faulty = True
    on_panel(judge, Panel(client), **fields)([Sample(Task("t0", "make the red circle blue", images=(before,)), after)])
    keys = [question_hash(each, "a model", ImageHasher()) for each in client.asked]
    assert hashlib.sha256("".join(sorted(keys)).encode()).hexdigest()[:16] == digest
