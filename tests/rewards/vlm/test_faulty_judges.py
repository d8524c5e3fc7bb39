"""Hostile judge servers: no reply becomes a wrong score, uses much memory, redirects a request or lowers the recorded cost."""

import resource
import sys

import numpy as np
import pytest
from PIL import Image

from faulty_judge import REDIRECTS, SCORES, USAGE, WIRE, WORDS, Reply, _json, completion, faulty_judge
from retouch.rewards.base import BudgetSpent
from retouch_judge.chat_client import ChatClient, retry_after
from retouch_judge.kinds import Endpoint
from retouch_judge.models import JudgeQuota, Prices
from retouch_judge.questions import ChoiceForm, JudgeReply, Question, ScoresForm, WordForm
from retouch_judge.quota import Quota
from retouch_judge.wording import Scale

QUICK = {"key": None, "timeout": 30.0, "deadline": 60.0, "attempts": 1, "pause": 0.001, "longest_pause": 0.01}
SCORE = ScoresForm({"score": Scale(0, 10)})
WORD = WordForm("yes", {"yes": 1.0, "no": 0.0})
ROUND_TRIP = 20.0  # seconds: far less than the 15 s of one regular expression times the attempts, and enough for a busy machine


def question(form=SCORE) -> Question:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8))
    return Question("Judge.", ("Picture:", picture), form, seed=0, temperature=0.0)


@pytest.fixture(scope="module")
def judge():
    with faulty_judge() as made:
        yield made


@pytest.fixture
def open_client(judge):
    opened = []

    def make(**changes):
        opened.append(ChatClient(Endpoint(model="judge", base_url=judge.url, **{**QUICK, **changes})))
        return opened[-1]

    judge.make_reply = _json
    yield make
    for client in opened:
        client.close()


def test_a_valid_reply_is_read(judge, open_client):
    (answer,) = open_client().ask([question()])
    assert answer.scores == {"score": 7.0}
    assert (answer.input_tokens, answer.output_tokens) == (100, 10)


@pytest.mark.parametrize(
    ("lies", "form"),
    [(SCORES, SCORE), pytest.param(WIRE, SCORE, marks=pytest.mark.slow), (WORDS, WORD)],
    ids=["scores", "wire", "words"],
)
def test_invalid_replies_give_no_score_and_raise_nothing(judge, open_client, lies, form):
    """One client reads all replies, so state that an invalid reply leaves behind would affect the next one."""
    client = open_client(deadline=ROUND_TRIP, timeout=ROUND_TRIP / 2)
    accepted, raised = [], []
    for name, make_reply in lies.items():
        judge.make_reply = make_reply
        if name.startswith("429"):  # does not count as an attempt, so only the deadline ends it
            client.endpoint = client.endpoint.model_copy(update={"attempts": 1})
            continue
        try:
            (answer,) = client.ask([question(form)])
        except Exception as error:  # noqa: BLE001  (which ones is the point)
            raised.append((name, repr(error)[:200]))
            continue
        accepted += [(name, answer.scores)] if answer.scores or not answer.fault else []
    assert (accepted, raised) == ([], [])
    judge.make_reply = _json
    assert client.ask([question()])[0].scores == {"score": 7.0}


@pytest.mark.parametrize("name", [name for name in WIRE if name.startswith("429")])
def test_http_429_with_an_invalid_retry_after_ends_at_the_deadline(judge, open_client, name):
    judge.make_reply = WIRE[name]
    (answer,) = open_client(deadline=0.3).ask([question()])
    assert not answer.scores
    assert answer.fault in ("HTTP 429", "deadline")


@pytest.mark.parametrize("status", REDIRECTS)
def test_a_redirect_is_never_followed(judge, open_client, status):
    with faulty_judge() as elsewhere:
        judge.make_reply = lambda true: Reply(b"", status, {"Location": f"{elsewhere.url}/chat/completions"})
        (answer,) = open_client(attempts=3).ask([question()])
        assert not answer.scores
        assert elsewhere.questions == 0


def test_compression_bombs_and_large_replies_use_little_memory(judge, open_client):
    client = open_client()
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
    client = open_client(prices=Prices(input=1.0, output=10.0), quota=JudgeQuota(cost=1.0))
    for _ in range(2):
        (answer,) = client.ask([question()])
        assert answer.scores == {"score": 7.0}
        assert 1 <= answer.input_tokens < 100
        assert 1 <= answer.output_tokens <= 100
        assert answer.cost > 0
    assert client.quota.spent()[1] == pytest.approx(2 * answer.cost)
    assert len([record for record in caplog.records if "usage" in record.message]) == 1


def test_a_cost_budget_ends_even_if_the_judge_reports_negative_usage(judge, open_client):
    judge.make_reply = lambda true: _json({**true, "usage": {"prompt_tokens": -(10**9), "completion_tokens": 0}})
    client = open_client(prices=Prices(input=1000.0, output=1000.0), quota=JudgeQuota(cost=0.05))

    def ask_until_spent():
        for _ in range(50):
            client.ask([question()])

    with pytest.raises(BudgetSpent):
        ask_until_spent()


@pytest.mark.parametrize(("used", "cost"), [(-1.0, 0.0), (1.0, -1.0), (float("nan"), 0.0), (1.0, float("inf"))])
def test_negative_or_non_finite_usage_raises_and_keeps_the_spent_cost(used, cost):
    quota = Quota(cost=1.0)
    quota.settle(quota.turn(1.0), used=1.0, cost=0.5)
    with pytest.raises(ValueError, match="cannot have used"):
        quota.settle(quota.turn(1.0), used=used, cost=cost)
    assert quota.spent()[1] == 0.5


@pytest.mark.parametrize("text", ['{"answer":' * 50_000, '{"answer": "' + "y" * 10**6, "{" * 900_000, "{" + " " * 10**6 + "}"])
def test_long_invalid_choice_answers_give_no_score(text):
    form = ChoiceForm("yes", {"yes": 1.0, "no": 0.0})
    assert form.read(JudgeReply(text, "stop")) is None


@pytest.mark.parametrize(
    "value",
    [
        "Mon, 99 Foo 99999 99:99:99 GMT",
        "Fri, 31 Dec 9999 23:59:59 -2359",
        "Mon, 01 Jan 2024 00:00:00 +99999999999999999",
        "9" * 5000,
        "\0",
        "1_0",
        "٣",
    ],
)
def test_hostile_retry_after_values_give_seconds_or_none(value):
    seconds = retry_after(value)
    assert seconds is None or seconds >= 0
