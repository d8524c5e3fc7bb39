"""Stored answers: what was answered is not asked again, even after a restart, and every question is recorded."""

import hashlib
import json
import sqlite3
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from judge_double import on_panel
from retouch.rewards.ledger.database import Database, ImageHasher, image_hash, open_read_only
from retouch.types import Column, Sample, Task
from retouch_judge.base import Panel, fingerprint
from retouch_judge.cache import AnswerCache, CachedJudgeClient, CachedReward, RequestStats, question_hash
from retouch_judge.questions import Answer, Question, ScoresForm, WordForm
from retouch_judge.rewards import AspectsReward, ComplexEditReward, DigitReward, VieScore, YesReward
from retouch_judge.wording import Scale

KEY = "canary-0a1b2c3d4e5f"
FORM = ScoresForm({"score": Scale(0, 10)})


def picture(seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (6, 5, 3), dtype=np.uint8))


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
        return [
            Answer(
                scores={name: float(value) for name in getattr(each.form, "scales", {"x": 0})},
                text=f"I say {value}",
                attempts=2,
                faults=("HTTP 503",),
                seed=each.seed + 7,
                temperature=each.temperature,
                seconds=0.25,
                input_tokens=100,
                output_tokens=10,
                cost=0.001,
            )
            for each, value in zip(questions, given, strict=True)
        ]


@pytest.fixture
def reopen(tmp_path):
    """Opens the same ledger again and again, as restarts do."""
    opened = []

    def begin():
        for database in opened:
            database.close()
        opened[:] = [Database(tmp_path / "ledger.sqlite")]
        return AnswerCache(opened[0])

    yield begin
    for database in opened:
        database.close()


def rows(path, columns):
    reader = open_read_only(path)
    found = reader.execute(f"SELECT {columns} FROM answers ORDER BY number").fetchall()
    reader.close()
    return found


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


def test_equal_questions_of_one_call_are_asked_once(reopen):
    """Images of a group may be identical."""
    asker = RandomClient()
    answers = CachedJudgeClient(asker, reopen()).ask([question(), question(1), question(), question()])
    assert len(asker.asked) == 2
    assert answers[0].scores == answers[2].scores == answers[3].scores != answers[1].scores


def test_judges_reuse_stored_answers_and_ask_only_new_repeats(reopen):
    asker = RandomClient()
    given = [Sample(Task(f"t{k}", "make it blue", images=(picture(50 + k),)), picture(k)) for k in range(3)]
    first = on_panel(VieScore, Panel(CachedJudgeClient(asker, reopen()), repeats=3, temperature=0.7))(given)
    assert len(asker.asked) == 3 * 2 * 3
    again = on_panel(VieScore, Panel(CachedJudgeClient(asker, reopen()), repeats=3, temperature=0.7))(given)
    assert len(asker.asked) == 18
    assert all(torch.equal(first[name], again[name]) for name in first)
    on_panel(VieScore, Panel(CachedJudgeClient(asker, reopen()), repeats=4, temperature=0.7))(given)
    assert len(asker.asked) == 18 + 6  # the fourth repeat alone is new


@pytest.mark.parametrize(
    "other",
    [
        question(1),
        question(image=1),
        question(rubric="Judge well."),
        question(form=ScoresForm({"score": Scale(0, 5)})),
        question(form=ScoresForm({"score": Scale(0, 10)}, reasoning=False)),
        question(form=WordForm("score", {"no": 0.0, "yes": 10.0})),
        question(temperature=0.6),
        Question("Judge.", ("Picture", ":", picture(0)), FORM, seed=0, temperature=0.5),
        Question("Judge.", ("Picture:", picture(0), picture(0)), FORM, seed=0, temperature=0.5),
    ],
    ids=lambda other: "",
)
def test_questions_that_differ_in_any_input_are_asked_separately(reopen, other):
    asker = RandomClient()
    cached = CachedJudgeClient(asker, reopen())
    cached.ask([question()])
    cached.ask([other])
    assert len(asker.asked) == 2


def test_stored_answers_are_not_reused_for_another_judge(reopen):
    asker = RandomClient()
    CachedJudgeClient(asker, reopen()).ask([question()])
    asker.identity = "another"
    CachedJudgeClient(asker, reopen()).ask([question()])
    assert len(asker.asked) == 2


def test_failed_questions_are_recorded_and_asked_again(reopen, tmp_path):
    asker = RandomClient()
    asker.faulty = True
    (missing,) = CachedJudgeClient(asker, reopen()).ask([question()])
    assert missing.fault == "HTTP 503"
    asker.faulty = False
    (answer,) = CachedJudgeClient(asker, reopen()).ask([question()])
    assert answer.scores
    assert len(asker.asked) == 2
    kept = rows(tmp_path / "ledger.sqlite", "scores IS NULL, fault, attempts, faults")
    assert kept == [(1, "HTTP 503", 3, '["time-out", "HTTP 500"]'), (0, "", 2, '["HTTP 503"]')]


def test_every_call_is_recorded_with_its_settings_and_cost(reopen, tmp_path):
    CachedJudgeClient(RandomClient(), reopen()).ask([question(3)])
    columns = "picture, judge, rubric, seed, temperature, text, seconds, input_tokens, output_tokens, cost"
    ((shown, judge, rubric, seed, temperature, text, *cost),) = rows(tmp_path / "ledger.sqlite", columns)
    assert shown == image_hash(picture(0))
    assert (judge, rubric, seed, temperature) == ("random", fingerprint("Judge."), 10, 0.5)
    assert text.startswith("I say ")
    assert cost == [0.25, 100, 10, 0.001]


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
    asked, may_answer, results = threading.Event(), threading.Event(), {}

    class Waiting(RandomClient):
        def ask(self, questions):
            asked.set()
            assert may_answer.wait(60)
            return super().ask(questions)

    asker = Waiting()
    cached = CachedJudgeClient(asker, reopen())

    def ask(number):
        results[number] = cached.ask([question()])[0]

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(2)]
    threads[0].start()
    assert asked.wait(60)
    threads[1].start()
    may_answer.set()
    for thread in threads:
        thread.join(60)
    assert len(asker.asked) == 1
    assert results.keys() == {0, 1}, "one of them waits for ever"
    assert results[0].scores == results[1].scores


def test_api_keys_of_the_environment_are_not_stored(reopen, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("RETOUCH_TOKEN", KEY[::-1])

    class Leaky(RandomClient):
        identity = f"judge of {KEY}"

        def ask(self, questions):
            leaked = f"you sent {KEY} and {KEY[::-1]}"
            return [Answer(scores={"score": 1.0}, text=leaked, fault=leaked, faults=(leaked,), attempts=1) for _ in questions]

    CachedJudgeClient(Leaky(), reopen()).ask([question()])
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"you sent [key] and [key]" in written
    assert KEY.encode() not in written
    assert KEY[::-1].encode() not in written


class RandomReward:
    """A remote reward with random scores, which records the ids of the tasks."""

    columns: Mapping[str, Column] = {"quality": Column(0.0, 1.0), "notes": Column(0.0, 1.0, diagnostic=True)}
    fingerprint = "server 1"

    def __init__(self, *, missing=frozenset()):
        self.asked: list[str] = []
        self.missing = missing

    def __call__(self, samples):
        self.asked += [sample.task.id for sample in samples]
        quality = torch.rand(len(samples))
        quality[[k for k, sample in enumerate(samples) if sample.task.id in self.missing]] = float("nan")
        return {"quality": quality, "notes": torch.full((len(samples),), float("nan"))}


@pytest.fixture
def with_ledger(reopen):
    made = []

    def make(reward):
        for one in made:
            one.close()
        made[:] = [CachedReward(reward, reopen())]
        return made[0]

    yield make
    for one in made:
        one.close()


def sample(number, **changes):
    known = {"id": f"t{number}", "instruction": "make it blue", "images": (picture(50 + number),), **changes}
    return Sample(Task(**known), picture(number))


def test_a_sample_is_sent_once_also_after_a_restart(with_ledger):
    server, given = RandomReward(), [sample(k) for k in range(4)]
    first = with_ledger(server)([*given, given[0]])
    assert server.asked == ["t0", "t1", "t2", "t3"]
    again = with_ledger(server).submit([*given, given[0]]).result()
    assert len(server.asked) == 4
    assert torch.equal(first["quality"], again["quality"])
    assert again["notes"].isnan().all()
    assert first["quality"][0] == first["quality"][4]


@pytest.mark.parametrize("poison", ["1e999", "-1e999", "1e300", "1.5", "-0.5"])
def test_stored_scores_outside_the_declared_range_are_requested_again(with_ledger, reopen, poison):
    server, given = RandomReward(), [sample(k) for k in range(3)]
    with_ledger(server)(given)
    with reopen()._database.writing() as connection:
        connection.execute("UPDATE answers SET scores = ? WHERE number = 2", (f'{{"quality": {poison}, "notes": null}}',))
    again = with_ledger(server)(given)
    assert server.asked == ["t0", "t1", "t2", "t1"]
    assert again["quality"].isfinite().all()
    assert again["quality"].max() <= 1


@pytest.mark.parametrize(
    "changes",
    [
        {"instruction": "make it red"},
        {"images": (picture(9),)},
        {"images": ()},
        {"mask": picture(9).convert("L")},
        {"reference": picture(9)},
        {"target": picture(9)},
        {"text": "open"},
        {"tags": {"complexity": "2"}},
        {"meta": {"requirement": "red"}},
        {"id": "other"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_samples_that_differ_in_any_task_field_are_scored_separately(with_ledger, changes):
    server = RandomReward()
    cached = with_ledger(server)
    cached([sample(1)])
    cached([sample(1, **changes)])
    assert len(server.asked) == 2


def test_samples_that_differ_in_completion_or_image_are_scored_separately(with_ledger):
    server, one = RandomReward(), sample(1)
    cached = with_ledger(server)
    cached([one, replace(one, completion="a red door"), replace(one, image=picture(9))])
    cached([one, replace(one, completion="a blue door")])
    assert len(server.asked) == 4


def test_samples_are_scored_again_for_another_reward_fingerprint(with_ledger):
    server = RandomReward()
    with_ledger(server)([sample(1)])
    server.fingerprint = "server 2"
    with_ledger(server)([sample(1)])
    assert len(server.asked) == 2


def test_a_sample_with_a_missing_score_is_scored_again(with_ledger, tmp_path):
    server = RandomReward(missing=frozenset({"t1"}))
    scores = with_ledger(server)([sample(0), sample(1)])
    assert scores["quality"].isnan().tolist() == [False, True]
    server.missing = frozenset()
    assert not with_ledger(server)([sample(0), sample(1)])["quality"].isnan().any()
    assert server.asked == ["t0", "t1", "t1"]
    assert [fault for (fault,) in rows(tmp_path / "ledger.sqlite", "fault")] == ["", "missing quality", ""]


def test_request_statistics_of_each_sample_are_recorded(with_ledger, tmp_path):
    class Client(RandomReward):
        def submit_with_stats(self, samples):
            done = Future()
            done.set_result((self(samples), [RequestStats(0.5, ("timeout", "http_503"), attempts=3)] * len(samples)))
            return done

    with_ledger(Client())([sample(0)])
    ((seconds, attempts, faults),) = rows(tmp_path / "ledger.sqlite", "seconds, attempts, faults")
    assert (seconds, attempts, json.loads(faults)) == (0.5, 3, ["timeout", "http_503"])


def test_read_only_connections_reject_writes_and_other_formats(tmp_path):
    database = Database(tmp_path / "ledger.sqlite")
    reader = open_read_only(tmp_path / "ledger.sqlite")
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.execute("DELETE FROM answers")
    reader.close()
    database.close()
    sqlite3.connect(tmp_path / "other.sqlite").close()
    with pytest.raises(ValueError, match="has format 0"):
        open_read_only(tmp_path / "other.sqlite")
    with pytest.raises(ValueError, match="cannot be used"):
        open_read_only(tmp_path / "none.sqlite")


class Fixed(RandomClient):
    """A client with a fixed identity, all of whose scores are 1."""

    identity = "a model"

    def ask(self, questions):
        self.asked += questions
        return [Answer(scores=dict.fromkeys(getattr(each.form, "scales", ("yes", "digit")), 1.0)) for each in questions]


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
    client, before, after = Fixed(), Image.new("RGB", (8, 8), (200, 10, 10)), Image.new("RGB", (8, 8), (10, 10, 200))
    on_panel(judge, Panel(client), **fields)([Sample(Task("t0", "make the red circle blue", images=(before,)), after)])
    keys = [question_hash(each, client.identity, ImageHasher()) for each in client.asked]
    assert hashlib.sha256("".join(sorted(keys)).encode()).hexdigest()[:16] == digest
