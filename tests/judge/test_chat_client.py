"""The client of judges: faults, deadlines, event loops, keys, and hostile servers, with a strict and with a faulty double."""

import base64
import io
import logging
import re
import resource
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import numpy as np
import pytest
import torch
from PIL import Image

import loopback
from faulty_judge import REDIRECTS, SCORES, USAGE, WIRE, WORDS, Reply, _json, completion, faulty_judge
from judge_double import FAULTS, KEY, Double, expected_score, on_panel
from pictures import picture
from retouch.core.random import backoff_pause
from retouch.protocols import AsyncReward, Reward
from retouch.rewards.base import BudgetSpent
from retouch.types import Sample, Task
from retouch_judge import chat_client
from retouch_judge.base import Panel
from retouch_judge.chat_client import ChatClient, retry_after
from retouch_judge.kinds import Endpoint
from retouch_judge.models import JudgeQuota, Prices
from retouch_judge.questions import JudgeClient, Question, ScoresForm, WordForm
from retouch_judge.rewards import AspectsReward
from retouch_judge.wording import Scale
from retouch_worlds.testing import check_reward

QUICK = {"timeout": 30.0, "deadline": 120.0, "attempts": 6, "pause": 0.002, "longest_pause": 0.01}
ONCE = {"key": None, "attempts": 1}
SCORE = ScoresForm({"score": Scale(0, 10)})
WORD = WordForm("yes", {"yes": 1.0, "no": 0.0})
ROUND_TRIP = 20.0  # seconds: far less than the 15 s of one regular expression times the attempts, and enough for a busy machine
ASPECTS = ("alignment", "quality", "identity")


def samples(count):
    return [Sample(Task(f"t{k}", f"make it {k}", images=(picture(1000 + k),)), picture(k)) for k in range(count)]


def mean(sample, name, repeats):
    return float(np.mean([expected_score(sample.image, name, seed, low=0, high=1) for seed in range(repeats)]))


@pytest.fixture
def open_client(monkeypatch):
    """Clients, closed at the end."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with ExitStack() as made:
        yield lambda double, **changes: made.enter_context(
            closing(ChatClient(Endpoint(model="judge", base_url=double.url, **{**QUICK, **changes})))
        )


@pytest.fixture
def judge():
    with faulty_judge() as made:
        yield made


def question(seed=0, *, form=SCORE):
    return Question("Judge.", ("Picture:", picture(seed)), form, seed=0, temperature=0.3)


def always(kind):
    return lambda digest, times: kind


def once(kind):
    return lambda digest, times: kind if times == 0 else None


def test_scores_of_a_healthy_server_are_correct_and_pass_the_contract_checks(open_client):
    with Double() as double:
        client = open_client(double)
        assert isinstance(client, JudgeClient)
        reward = on_panel(AspectsReward, Panel(client, repeats=3, temperature=0.7))
        assert isinstance(reward, Reward)
        given = samples(4)
        scores = reward(given)
        for name in ASPECTS:
            expected = torch.tensor([mean(sample, name, 3) for sample in given])
            torch.testing.assert_close(scores[name], expected, atol=1e-6, rtol=0)
        assert double.refused == []
        assert {body["seed"] for body in double.requests} == {0, 1, 2}
        assert {body["temperature"] for body in double.requests} == {0.7}
        assert len(double.requests) == 4 * 3 * 3
        check_reward(reward, given)


@pytest.mark.parametrize("kind", FAULTS)
def test_a_transient_fault_is_retried_and_the_score_is_correct(open_client, kind):
    patience = {"timeout": 0.5, "attempts": 30} if kind == "time-out" else {}
    with Double(once(kind)) as double:
        (answer,) = open_client(double, **patience).ask([question()])
        assert answer.fault == ""
        assert answer.scores == {"score": expected_score(picture(0), "score", 0, low=0, high=10)}
        assert answer.attempts == 2 or kind == "time-out"  # a busy machine may be too slow twice
        assert answer.seed == 1_000_003 * (answer.attempts - 1)
        assert answer.temperature == 0.3
        assert len(answer.faults) == answer.attempts - 1
        readable = kind in FAULTS[FAULTS.index("refusal") :] and kind != "no message"
        paid = answer.attempts if readable else 1  # every readable reply costs tokens, even if its answer is unusable
        assert (answer.input_tokens, answer.output_tokens) == (100 * paid, 10 * paid)


@pytest.mark.parametrize("kind", ["429", "500", "cut", "no json", "prose", "off the scale", "400", "401", "403", "404", "422"])
def test_a_permanent_fault_gives_a_missing_score(open_client, kind):
    with Double(always(kind)) as double:
        (answer,) = open_client(double, attempts=3, deadline=0.5 if kind == "429" else 120.0).ask([question()])
    assert answer.scores == {}
    assert answer.fault
    if kind in ("400", "401", "403", "404", "422"):  # final: not retried
        assert answer.fault.startswith(f"HTTP {kind}: ")
        assert KEY not in answer.fault
        assert len(double.requests) == 1
    else:
        assert len(double.requests) == 3 or kind == "429"  # a 429 is retried until the deadline


def test_one_failed_repeat_makes_only_that_aspect_of_that_sample_missing(open_client):
    given = samples(3)
    lost = expected_score(given[1].image, "quality", 2, low=0, high=1)

    class Picky(Double):
        def respond(self, handler, body, fault):
            content, _ = self.content(body)
            super().respond(handler, body, "prose" if f'"quality": {lost}' in content else None)

    with Picky() as double:
        scores = on_panel(AspectsReward, Panel(open_client(double), repeats=3))(given)
    assert scores["quality"].isnan().tolist() == [False, True, False]
    assert not scores["alignment"].isnan().any()


def test_all_scores_are_missing_at_the_deadline_if_the_server_is_down_or_hangs(open_client):
    with Double() as double:
        pass  # nobody listens there any more
    client = open_client(double, timeout=0.5, deadline=1.0, attempts=10_000, pause=0.05, longest_pause=0.2)
    answers = client.ask([question(k) for k in range(6)])
    assert all(answer.scores == {} and answer.attempts < 1000 for answer in answers)  # the deadline ended them, not the attempts
    scores = on_panel(AspectsReward, Panel(client, repeats=2))(samples(5))
    assert all(column.isnan().all() for column in scores.values())
    with Double(always("time-out"), hang=1.5) as double:
        patient = open_client(double, timeout=60.0, deadline=0.5, attempts=3, pause=0.5, longest_pause=20.0, concurrency=2)
        answers = patient.ask([question(k) for k in range(6)])
    assert [answer.fault for answer in answers] == ["deadline"] * 6


def test_a_client_is_used_again_and_again_from_four_threads_with_few_requests_in_progress(open_client):
    """With a new event loop per call, the second call would fail or silently return no scores."""
    with Double() as double, ThreadPoolExecutor(4) as pool:
        client = open_client(double, concurrency=2)

        def work(k):
            expected = {"score": expected_score(picture(k), "score", 0, low=0, high=10)}
            return [client.ask([question(k)] * 3)[2].scores == expected for _ in range(4)]

        assert list(pool.map(work, range(4))) == [[True] * 4] * 4
        assert double.max_concurrent <= 2


def test_retries_count_against_the_call_budget_and_questions_beyond_it_raise(open_client):
    with Double(once("500")) as double:
        client = open_client(double, quota=JudgeQuota(calls=5))
        assert all(answer.attempts == 2 for answer in client.ask([question(k) for k in range(2)]))
        assert client.quota.spent() == (4, 0.0)
        with pytest.raises(BudgetSpent, match="4 were made, 2 more are needed"):
            client.ask([question(2), question(3)])
        (answer,) = client.ask([question(2)])  # it fails once, and no call is left for a retry
        assert (answer.scores, answer.fault, answer.attempts) == ({}, "budget", 1)
        assert len(double.requests) == 5


def test_a_cost_budget_counts_every_reply_including_unusable_ones(open_client):
    """Each reply of the double has 100 input tokens and 10 output tokens; unusable replies cost the same."""
    quota = JudgeQuota(cost=0.001)
    with Double(once("prose")) as double:
        client = open_client(double, quota=quota, prices=Prices(input=2.0, output=20.0))
        client.ask([question(k) for k in range(2)])
        assert client.quota.spent() == (4, pytest.approx(4 * 400e-6))
        for used, cost in ((-1.0, 0.0), (1.0, -1.0), (float("nan"), 0.0), (1.0, float("inf"))):
            with pytest.raises(ValueError, match="cannot have used"):
                client.quota.settle(client.quota.turn(1.0), used=used, cost=cost)
            assert client.quota.spent()[1] == pytest.approx(4 * 400e-6)
        with pytest.raises(BudgetSpent, match="raise its `cost`"):
            client.ask([question(2)])
        with pytest.raises(ValueError, match=r"set judge\.prices"):
            open_client(double, quota=quota)


@pytest.mark.parametrize("fails", [False, True])
def test_unused_tokens_are_returned_to_the_rate_limit_except_those_of_a_failed_attempt(open_client, fails):
    """A question reserves more than half of a minute's tokens, so a second one fits only if unused tokens are returned."""
    quota = JudgeQuota(tokens_per_minute=1e6, tokens_per_question=6e5)
    with Double(always("500") if fails else always(None)) as double:
        answers = open_client(double, deadline=30.0, quota=quota, concurrency=1).ask(
            [question(k) for k in range(1 if fails else 3)]
        )
        if fails:
            assert [(answer.fault, answer.attempts) for answer in answers] == [("rate limit", 1)]
        assert all(answer.scores for answer in answers) is not fails
        assert len(double.requests) == len(answers)


def test_submitted_chunks_are_scored_concurrently(open_client):
    """The server answers no question before it has received one question of each chunk."""
    chunks = [samples(3)[k : k + 1] for k in range(3)]
    together = threading.Barrier(len(chunks))

    class Patient(Double):
        def respond(self, handler, body, fault):
            together.wait(timeout=120)
            super().respond(handler, body, fault)

    with Patient() as double, closing(on_panel(AspectsReward, Panel(open_client(double)), aspects=("quality",))) as reward:
        assert isinstance(reward, AsyncReward)
        given = [future.result() for future in [reward.submit(chunk) for chunk in chunks]]
        for chunk, scores in zip(chunks, given, strict=True):
            assert scores["quality"].item() == pytest.approx(mean(chunk[0], "quality", 1), abs=1e-6)


def test_the_key_is_in_no_log_error_or_answer(open_client, caplog, monkeypatch):
    class Leaky(Double):
        def content(self, body):
            return f'{{"reasoning": "you sent Bearer {KEY}", "score": 5}}', None

    with caplog.at_level(logging.DEBUG), Double(lambda digest, times: "401" if times else "500") as double:
        client = open_client(double)
        answers = client.ask([question(k) for k in range(3)])
    assert all(answer.fault.startswith("HTTP 401") for answer in answers)
    assert "3 of 3 answers are missing" in caplog.text
    with Leaky() as double:
        (answer,) = open_client(double).ask([question()])
    assert answer.scores == {"score": 5.0}
    assert "[key]" in answer.text
    for said in (caplog.text, repr(answers), repr(client.endpoint), repr(client), client.identity, answer.text):
        assert KEY not in said
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(ValueError, match="OPENAI_API_KEY is not set"):
        ChatClient(Endpoint(model="judge"))


MISTAKES = [
    *(
        (Endpoint, {key: value}, f"Endpoint: {key}: should be greater than")
        for key, value in (("timeout", 0.0), ("deadline", -1.0))
    ),
    *((Endpoint, {key: 0}, f"Endpoint: {key}: should be greater than") for key in ("attempts", "concurrency")),
    (Endpoint, {"pause": 2.0, "longest_pause": 1.0}, "pause 2 is above longest_pause 1; increase longest_pause or decrease pause"),
    (Endpoint, {"base_url": "localhost:8000/v1"}, "Endpoint: base_url: give an address as http://host:port/v1"),
    (Endpoint, {"base_url": "http://a:8000/v1/chat/completions"}, "the client adds /chat/completions; give http://a:8000/v1"),
    (Endpoint, {"key": KEY}, "Endpoint: key: give the name of an environment variable, such as OPENAI_API_KEY"),
    (Endpoint, {"api_key": "MY_KEY"}, "Endpoint: api_key: unknown key; did you mean key?"),
    (Endpoint, {"max_tokens": 512}, "Endpoint: max_tokens: unknown key; known here: kind, model, base_url, key"),
    (Endpoint, {"image_format": "jpg"}, "Endpoint: image_format: should be 'png', 'jpeg' or 'webp', not 'jpg'"),
    (AspectsReward, {}, "AspectsReward: judge: missing: The model that answers."),
    (AspectsReward, {"judge": "http://a:8000/v1"}, "judge: should be an object with a kind, not 'http://a:8000/v1'"),
    (AspectsReward, {"judge": {"base_url": "http://a/v1"}}, "judge.kind: missing: one of 'endpoint', 'in_process'"),
    (AspectsReward, {"judge": {"kind": "vllm"}}, "judge.kind: 'vllm' is not a kind; write 'endpoint', with the server's base_url"),
    (AspectsReward, {"judge": {"kind": "endpont"}}, "judge.kind: 'endpont' is not one of 'endpoint', 'in_process'"),
]


@pytest.mark.parametrize(("section", "wrong", "says"), MISTAKES)
def test_mistakes_in_the_section_of_a_judge_are_refused_with_what_to_write(section, wrong, says):
    with pytest.raises(ValueError, match=re.escape(says)) as raised:
        section(**({"model": "judge"} if section is Endpoint else {}), **wrong)
    assert KEY not in str(raised.value)


@pytest.mark.parametrize("form", ["png", "jpeg", "webp"])
def test_images_are_sent_in_the_chosen_format_and_only_a_lossy_one_is_another_judge(open_client, form):
    smooth = Image.linear_gradient("L").resize((16, 16)).convert("RGB")
    with Double() as double:
        client = open_client(double, **({} if form == "png" else {"image_format": form}))
        (answer,) = client.ask([Question("Judge.", ("Picture:", smooth), SCORE, seed=0, temperature=0.0)])
    assert answer.scores
    kind, content = double.requests[0]["messages"][-1]["content"][-1]["image_url"]["url"].split(";base64,")
    assert kind == f"data:image/{form}"
    difference = np.abs(np.asarray(Image.open(io.BytesIO(base64.b64decode(content))), dtype=int) - np.asarray(smooth))
    assert difference.max() <= (4 if form == "jpeg" else 0)
    assert client.identity == ("judge, typed, jpeg" if form == "jpeg" else "judge, typed")


def test_a_wait_for_a_rate_limit_is_logged_while_it_lasts_and_an_unusable_answer_is_quoted(open_client, caplog, monkeypatch):
    caplog.set_level("INFO", logger="retouch")
    monkeypatch.setattr(chat_client, "_QUIET", 0.02)
    with Double(once("429")) as double:
        assert open_client(double).ask([question()])[0].scores
    said, repeated = caplog.messages
    assert f"judge at {double.url}: HTTP 429; questions wait to be asked again, for at most 1" in said
    assert repeated == "judge: 1 requests were repeated (1 HTTP 429)"
    with Double(always("prose")) as double:
        open_client(double).ask([question()])
    assert "(1 unusable answer; for example unusable answer: 'I think it is a fine picture.')" in caplog.messages[-1]


@pytest.fixture
def late_server(monkeypatch):
    """A judge's address where nothing listens until the returned function is called; it takes the status of its replies."""
    monkeypatch.setattr(chat_client, "_POLL", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as placeholder:
        port = placeholder.getsockname()[1]
    with ExitStack() as stack:

        def start(status):
            server = stack.enter_context(loopback.scripted(lambda request: (status, {}), port=port))
            stack.callback(lambda: {request.path for request in server.requests} == {"/v1/models"} or pytest.fail("another path"))

        yield f"http://127.0.0.1:{port}/v1", start


@pytest.mark.parametrize("status", [200, 404])
def test_the_client_waits_until_the_server_answers(late_server, caplog, status):
    url, start = late_server
    timer = threading.Timer(0.3, start, args=[status])
    timer.start()
    began = time.monotonic()
    with closing(ChatClient(Endpoint(model="judge", base_url=url, key=None, wait=20.0))):
        assert 0.2 < time.monotonic() - began < 15
    timer.join()
    said = [record.message for record in caplog.records if "waiting for the judge" in record.message]
    assert said == [f"waiting for the judge judge at {url} (no connection), at most 20 s more"]


def test_the_client_raises_if_the_server_is_not_up_in_time(late_server):
    url, start = late_server
    for fault in ("no connection", "HTTP 503"):
        with pytest.raises(ValueError, match=rf"judge at {url} is not up after 0 s \({fault}\); start its server"):
            ChatClient(Endpoint(model="judge", base_url=url, key=None, wait=0.1))
        if fault == "no connection":
            start(503)


def test_pauses_are_jittered_and_bounded():
    for attempt in range(0, 8, 2):
        pauses = [backoff_pause(str(k), attempt=attempt, base=0.5, longest=4.0) for k in range(200)]
        top = min(4, 0.5 * 2**attempt)
        assert 0 <= min(pauses) < 0.1 * top
        assert 0.9 * top < max(pauses) <= top
        assert pauses[0] == backoff_pause("0", attempt=attempt, base=0.5, longest=4.0) != pauses[1]


def test_retry_after_is_read_as_seconds_or_utc_date_and_nonsense_is_none(monkeypatch):
    assert retry_after("1.5") == 1.5
    assert retry_after("-3") == 0
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert [retry_after(value) for value in (None, "soon", "nan", "inf")] == [None] * 4
    hostile = ("Mon, 99 Foo 99999 99:99:99 GMT", "Fri, 31 Dec 9999 23:59:59 -2359", "Mon, 01 Jan 2024 00:00:00 +99999999999999999")
    for value in (*hostile, "9" * 5000, "\0", "1_0", "٣"):
        seconds = retry_after(value)
        assert seconds is None or seconds >= 0
    monkeypatch.setenv("TZ", "America/Los_Angeles")
    time.tzset()
    try:
        for form in ("%a, %d %b %Y %H:%M:%S GMT", "%a %b %d %H:%M:%S %Y", "%a, %d %b %Y %H:%M:%S -0000"):
            assert 3500 < retry_after(time.strftime(form, time.gmtime(time.time() + 3600))) < 3700
    finally:
        monkeypatch.undo()
        time.tzset()


LIMITED = {name: WIRE[name] for name in WIRE if name.startswith("429")}
OTHERS = {name: WIRE[name] for name in WIRE if name not in LIMITED}


@pytest.mark.parametrize(
    ("lies", "form"),
    [(SCORES, SCORE), pytest.param(OTHERS, SCORE, marks=pytest.mark.slow), (WORDS, WORD), (LIMITED, SCORE)],
    ids=["scores", "wire", "words", "rate limits"],
)
def test_invalid_replies_give_no_score_and_raise_nothing(judge, open_client, lies, form):
    """One client reads all replies, so state that an invalid reply leaves behind would affect the next one."""
    # A reply with status 429 does not count as an attempt, so only the deadline ends it.
    client = open_client(judge, deadline=0.3 if lies is LIMITED else ROUND_TRIP, **ONCE, timeout=ROUND_TRIP / 2)
    for name, make_reply in lies.items():
        judge.make_reply = make_reply
        (answer,) = client.ask([question(form=form)])
        assert not answer.scores, name
        assert answer.fault in ("HTTP 429", "deadline") if lies is LIMITED else answer.fault, name
    judge.make_reply = _json
    assert client.ask([question()])[0].scores == {"score": 7.0}


@pytest.mark.parametrize("status", REDIRECTS)
def test_a_redirect_is_never_followed(judge, open_client, status):
    with faulty_judge() as elsewhere:
        judge.make_reply = lambda true: Reply(b"", status, {"Location": f"{elsewhere.url}/chat/completions"})
        (answer,) = open_client(judge, key=None, attempts=3).ask([question()])
        assert not answer.scores
        assert elsewhere.requests == []


def test_compression_bombs_and_large_replies_use_little_memory(judge, open_client):
    client = open_client(judge, **ONCE)
    client.ask([question()])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in ("a gzip bomb", "a deflate bomb", "a gzip bomb of an error", "6 MB"):
        made = WIRE[name]({"choices": []}) if "bomb" in name else WIRE[name](completion())
        judge.make_reply = lambda true, made=made: made
        before = max(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # the memory used to create the bomb
        assert not client.ask([question()])[0].scores
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * (1 if sys.platform == "darwin" else 1024) < 60e6


@pytest.mark.parametrize("name", USAGE)
def test_an_impossible_token_usage_is_replaced_by_an_estimate(judge, open_client, name, caplog):
    judge.make_reply = lambda true: _json({**true, "usage": USAGE[name]})
    client = open_client(judge, **ONCE, prices=Prices(input=1.0, output=10.0), quota=JudgeQuota(cost=1.0))
    for _ in range(2):
        (answer,) = client.ask([question()])
        assert answer.scores == {"score": 7.0}
        assert 1 <= answer.input_tokens < 100
        assert 1 <= answer.output_tokens <= 100
        assert answer.cost > 0
    assert client.quota.spent()[1] == pytest.approx(2 * answer.cost)
    assert len([record for record in caplog.records if "usage" in record.message]) == 1
    poor = open_client(judge, **ONCE, prices=Prices(input=1000.0, output=1000.0), quota=JudgeQuota(cost=0.05))
    with pytest.raises(BudgetSpent):
        [poor.ask([question()]) for _ in range(50)]
