"""The client of reward servers: the scores equal those of the reward itself, in order, or are missing, whatever the servers do."""

import math
import subprocess
import sys
import time
import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest
import torch

from bad_server import ALL_FAULTS, HARMLESS, STATUSES, TRANSPORT_FAULTS, WRONG_INFOS, WRONG_REPLIES, bad_server
from live_server import live, remote, samples_of
from retouch.protocols import AsyncReward
from retouch.rewards.base import BudgetSpent
from retouch.rewards.judging import RewardScorer
from retouch.types import Column, Sample
from retouch_serve.client import EndpointPool, RequestFault, RetryBudget, fault_of_status
from retouch_serve.remote import RemoteReward
from retouch_serve.wire import ExpectedReply, InvalidReply, read_reply
from retouch_worlds.data import PlaygroundData
from retouch_worlds.rewards import PlaygroundReward
from retouch_worlds.testing import check_reward
from served_rewards import digest_score
from slow_params import slow_after

SUPPORT = Path(__file__).parents[3] / "tests" / "support"


def expected(samples):
    return torch.tensor([digest_score(sample) for sample in samples], dtype=torch.float64)


def equal(given, wanted):
    torch.testing.assert_close(given, wanted, rtol=0, atol=0, equal_nan=True)


DEADLINE = 60.0
FINAL = {"404", "400", "401"}  # not retried by design: the status says that the request itself is wrong
EXPECTED = ExpectedReply(
    {"digest": Column(0.0, 1.0), "odd": Column(0.0, 1.0)},
    dict.fromkeys(("digest", "odd"), "digest"),
    {"digest": "fingerprint-digest"},
)


@pytest.fixture(scope="module")
def server():
    """A server that falsifies its replies as ``lies["now"]`` says, which can be changed between two requests."""
    lies = {"now": "none"}
    with bad_server(lambda: lies["now"]) as made:
        made.lies = lies
        yield made


def test_remote_scores_equal_local_scores_and_pass_the_contract_checks():
    tasks = PlaygroundData(seed=0, count=5, complexity=[1, 2]).tasks(in_turn=True)
    samples = [Sample(task, task.images[0] if row % 2 else task.target) for row, task in enumerate(tasks)]
    with live("playground") as server, closing(remote([server.url], batch=2)) as reward:
        assert isinstance(reward, AsyncReward)
        check_reward(reward, samples)
        assert dict(reward.columns) == dict(PlaygroundReward.columns)
        for name, column in PlaygroundReward()(samples).items():
            equal(reward(samples)[name], column.double())  # a fp32 score is the same number in fp64
        judged = RewardScorer(reward, {"overall": 1.0})([*samples, Sample(tasks[0], None)])
        assert judged.rewards[-1] == 0  # the policy's own fault, detected by the scorer
        assert not judged.rewards.isnan().any()
    samples = samples_of(7)
    with bad_server("another order") as server, closing(remote([server.url], batch=4)) as reward:
        assert {name: column.shape for name, column in reward([]).items()} == {"digest": (0,), "odd": (0,)}
        assert server.request_count == 0
        equal(reward(samples)["digest"], expected(samples))
        assert reward.stats() == {"calls": 2.0}


def test_servers_that_cannot_be_used_are_refused_at_the_start(monkeypatch, caplog):
    monkeypatch.setattr("retouch_serve.client._ASK_SECONDS", 30.0)  # so that both servers answer in time on a busy machine
    token, none = "a-token-of-enough-characters", "http://127.0.0.1:9"
    with live("share:red", token=token) as closed, live("a=share:blue", "b=share:blue") as blue, live("share:red") as red:
        for url, keys, says in (
            ([closed.url], {}, "another token: set RETOUCH_TOKEN"),
            ([blue.url, red.url], {}, "has other rewards"),
            ([blue.url], {"rewards": ("c",)}, "no reward c; they have a, b"),
            ([none], {"wait": 0.5}, r"no reward server replies at http://127\.0\.0\.1:9 within 0\.5 s \(`wait`"),
        ):
            with pytest.raises(ValueError, match=says):
                remote(url, **keys)
        waits = [record.message for record in caplog.records if record.name == "retouch.rewards"]
        assert waits == ["waiting for the reward server at http://127.0.0.1:9 (up to 0.5 s)"]
        monkeypatch.setenv("RETOUCH_TOKEN", "")  # an empty variable is no token, so the server does reply
        with pytest.raises(ValueError, match="another token: set RETOUCH_TOKEN"):
            remote([closed.url], wait=0.1)
        monkeypatch.setenv("RETOUCH_TOKEN", token)
        with closing(remote([closed.url])) as reward:
            assert not reward(samples_of(2))["share"].isnan().any()
        monkeypatch.delenv("RETOUCH_TOKEN")
        with closing(remote([blue.url], rewards=("b",))) as reward:
            assert list(reward.columns) == ["b/share"]
            assert not reward(samples_of(3))["b/share"].isnan().any()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"endpoints": ()}, "at least 1"),
        ({"endpoints": ("127.0.0.1:80",)}, "give an address"),
        ({"endpoints": ("http://a", "http://a/")}, "each address once"),
        ({"endpoints": ("http://a",), "batch": 0}, "batch"),
        ({"endpoints": ("http://a",), "deadline": 0.0}, "deadline"),
        ({"endpoints": ("http://a",), "retry_share": 2.0}, "retry_share"),
        ({"endpoints": ("http://a",), "encoding": "jpeg"}, "'auto', 'webp' or 'raw'"),
        ({"endpoints": ("http://a",), "rate_file": "x"}, "samples_per_minute"),
        ({"endpoints": ("http://a",), "columns": {"digest": (0, math.inf)}}, "finite"),
        ({"endpoints": ("http://a",), "columns": {"digest": (-1e308, 1)}}, "1000000000"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        RemoteReward(**arguments)


def test_the_rate_limit_is_obeyed_and_samples_past_the_deadline_are_missing():
    samples = samples_of(4)
    with (
        bad_server("none") as server,
        closing(remote([server.url], batch=2, concurrency=1, samples_per_minute=2.0, deadline=60.0)) as reward,
    ):
        scores = reward(samples)["digest"]  # the second turn would come a minute after the first
        equal(scores[:2], expected(samples)[:2])
        assert scores[2:].isnan().all()
        assert reward.stats()["faults/rate_limit"] == 1
        assert server.request_count == 1


def test_retries_count_against_the_call_budget_and_requests_beyond_it_raise(tmp_path):
    turns = iter(["500", "none", "500"])
    samples = samples_of(4)
    with (
        bad_server(lambda: next(turns, "none")) as server,
        closing(remote([server.url], batch=2, concurrency=1, calls=5, rate_file=str(tmp_path / "quota"))) as reward,
    ):
        equal(reward(samples)["digest"], expected(samples))
        assert server.request_count == 4
        with pytest.raises(BudgetSpent, match=r"5 calls .* 4 were made, 2 more are needed"):
            reward(samples)
        equal(reward(samples[:2])["digest"], expected(samples)[:2])
        with pytest.raises(BudgetSpent):
            reward.submit(samples[:1]).result()
        assert server.request_count == 5


def test_a_remote_reward_works_in_a_forked_child_and_in_its_parent():
    samples = samples_of(4)
    code = f"""
import os, sys
sys.path.insert(0, {str(SUPPORT)!r})
from live_server import remote, samples_of
reward = remote([sys.argv[1]])
samples = samples_of(4)
first = reward(samples)["digest"].tolist()
child = os.fork()
if child == 0:
    os._exit(0 if reward(samples)["digest"].tolist() == first else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert reward(samples)["digest"].tolist() == first
print(first)
"""
    with bad_server("none") as server:
        done = subprocess.run([sys.executable, "-c", code, server.url], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == str(expected(samples).tolist()), done.stderr


# The parts


def test_a_failing_endpoint_is_excluded_unless_it_is_the_last_one_until_a_probe_finds_it_ready():
    clock = [0.0]
    pool = EndpointPool(["http://a", "http://b", "http://c"], clock=lambda: clock[0])
    a, b, c = pool.endpoints
    for endpoint in pool.endpoints:
        pool.failed(endpoint, RequestFault("broken"))
    assert [each.excluded for each in pool.endpoints] == [True, True, False]
    assert pool.choose() is c
    assert pool.probes_due() == []
    clock[0] = 100.0
    assert pool.probes_due() == [a, b]
    pool.probed(a, succeeded=True)
    pool.probed(b, succeeded=False)
    assert pool.probes_due() == []
    pool.failed(c, RequestFault("broken"))
    assert [each.excluded for each in pool.endpoints] == [False, True, True]
    pool.failed(a, RequestFault("timeout"))
    assert pool.choose() is None  # also the last server: a probe takes 2 s, a request its whole time limit
    clock[0] = 200.0
    assert pool.probes_due() == [a, b, c]
    pool.probed(b, succeeded=True)
    assert pool.choose() is b
    pool.failed(b, RequestFault("http_500"))
    assert not b.excluded


def test_the_pool_prefers_the_least_loaded_endpoint_that_has_not_failed():
    clock = [0.0]
    pool = EndpointPool(["http://a", "http://b", "http://c"], clock=lambda: clock[0])
    a, b, c = pool.endpoints
    a.in_progress, b.in_progress, c.in_progress = 5, 2, 9
    assert pool.choose() is b
    assert pool.choose([b]) is a
    assert pool.choose([a, b, c]) is b
    pool.failed(b, fault_of_status(429, 3.0))
    assert not b.excluded
    assert pool.choose() is a
    a.in_progress = c.in_progress = 0
    assert {pool.choose() for _ in range(50)} == {a, c}
    for endpoint in (a, c):
        pool.failed(endpoint, fault_of_status(429, 3.0))
    assert pool.choose() is None
    clock[0] = 3.0
    assert pool.choose() in (a, b, c)
    assert [fault_of_status(status, 0.0).final for status in (400, 401, 404, 413, 422)] == [True] * 5
    assert [fault_of_status(status, 0.0).final for status in (408, 429, 500, 502, 503, 504)] == [False] * 6
    assert not fault_of_status(429, 1.0).blames_server
    assert not fault_of_status(503, 1.0).tried
    assert fault_of_status(504, 0.0).slow
    assert RequestFault("timeout").slow
    assert not fault_of_status(500, 0.0).slow


def test_the_retry_budget_allows_a_share_of_requests_and_a_number_per_second():
    budget = RetryBudget(share=0.1, per_second=0.0, max_saved=3.0)
    assert [budget.take(0.0) for _ in range(4)] == [True, True, True, False]
    for _ in range(100):
        budget.first_request()
    assert [budget.take(0.0) for _ in range(4)] == [True, True, True, False]
    slow = RetryBudget(share=0.0, per_second=2.0, max_saved=1.0)
    assert [slow.take(now) for now in (0.0, 0.1, 0.5, 0.7, 1.1)] == [True, False, True, False, True]


@pytest.mark.parametrize("kind", slow_after(25, [*ALL_FAULTS, *HARMLESS]))
def test_scores_come_from_another_server_after_a_faulty_reply(kind):
    samples = samples_of(16)
    timeout = 1.0 if kind in ("hang", "slow drip") else 10.0
    with (
        bad_server(kind) as bad,
        bad_server("none") as good,
        closing(remote([bad.url, good.url], batch=4, attempts=20, timeout=timeout, deadline=DEADLINE)) as reward,
    ):
        scores = reward(samples)["digest"]
        assert bad.request_count > 0
    there = ~scores.isnan() if kind in FINAL else slice(None)
    equal(scores[there], expected(samples)[there])


@pytest.mark.parametrize("kind", slow_after(12, ["an error of the reward", "NaN", *TRANSPORT_FAULTS, *STATUSES]))
def test_scores_are_missing_if_the_only_server_is_faulty(kind):
    samples = samples_of(6)
    timeout = 0.3 if kind in ("hang", "slow drip") else 10.0
    deadline = 1.0 if kind in ("429", "503") else DEADLINE  # these do not count as attempts, so only the deadline ends them
    with bad_server(kind) as bad, closing(remote([bad.url], batch=3, attempts=2, timeout=timeout, deadline=deadline)) as reward:
        scores = reward(samples)
        assert ("faults/out_of_time" in reward.stats()) is (kind in ("429", "503"))
    missing = scores["digest"].isnan()
    equal(scores["digest"][~missing], expected(samples)[~missing])
    assert missing.tolist() == [False, False, True] * 2 if kind == "an error of the reward" else missing.all()
    if kind in FINAL:
        assert bad.request_count == 2  # one for each request


@pytest.mark.parametrize("lie", WRONG_INFOS)
def test_an_invalid_server_description_raises_before_any_request(lie):
    with bad_server("none", info=WRONG_INFOS[lie]) as server:
        with pytest.raises(ValueError, match="is not a reward server of Retouch"):
            remote([server.url])
        assert server.request_count == 0


@pytest.mark.parametrize("lie", slow_after(40, WRONG_REPLIES))
def test_an_invalid_reply_is_rejected_as_a_whole(server, lie):
    samples = samples_of(4)
    server.lies["now"] = WRONG_REPLIES[lie]
    with closing(remote([server.url], batch=4, attempts=1, timeout=20.0)) as reward:
        missing = reward(samples)["digest"]
        server.lies["now"] = "none"
        equal(reward(samples)["digest"], expected(samples))
    assert missing.isnan().all()


def test_a_reply_with_too_many_values_is_rejected_with_little_memory():
    body = b'{"judges": {"digest": ["fingerprint-digest"]}, "items": [' + b"[]," * 5_000_000 + b"[]]}"
    tracemalloc.start()
    try:
        with pytest.raises(InvalidReply, match="too_many_values"):
            read_reply(body, ["0"], EXPECTED)
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()


def test_client_avoids_a_hanging_server_after_its_first_time_out(tmp_path):
    """One of two servers takes every request and never answers: of many requests, only those already sent wait for it."""
    samples = samples_of(20)
    with (
        bad_server("hang", ready=lambda: False) as bad,
        bad_server("none") as good,
        closing(remote([bad.url, good.url], batch=1, concurrency=1, attempts=4, timeout=0.5, deadline=60.0)) as reward,
    ):
        began = time.monotonic()
        for part in range(0, 20, 4):
            scores = reward(samples[part : part + 4])["digest"]
            equal(scores, expected(samples[part : part + 4]))
        assert bad.request_count <= 2
        assert time.monotonic() - began < 30


def test_client_of_a_single_hanging_server_retries_when_it_is_ready():
    state = {"kind": "hang", "ready": False}
    with (
        bad_server(lambda: state["kind"], ready=lambda: state["ready"]) as server,
        closing(remote([server.url], batch=1, concurrency=1, attempts=4, timeout=0.2, deadline=60.0)) as reward,
    ):
        waiting = reward.submit(samples_of(2))
        ends = time.monotonic() + 60
        while not reward.stats().get("faults/timeout"):
            assert time.monotonic() < ends
            time.sleep(0.02)
        time.sleep(0.7)
        assert server.request_count <= 2  # and not once in each fifth of a second
        state |= {"kind": "none", "ready": True}
        assert not waiting.result(timeout=60)["digest"].isnan().any()
