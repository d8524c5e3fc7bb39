"""The client of reward servers: the scores equal those of the reward itself, in order, whatever happens to the servers."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

from bad_server import bad_server
from live_server import live, remote, samples_of
from retouch.protocols import AsyncReward
from retouch.rewards.base import BudgetSpent
from retouch.rewards.judging import RewardScorer
from retouch.types import Sample
from retouch_serve.client import EndpointPool, RequestFault, RetryBudget, fault_of_status
from retouch_serve.remote import RemoteReward
from retouch_worlds.data import PlaygroundData
from retouch_worlds.rewards import PlaygroundReward
from retouch_worlds.testing import check_reward
from served_rewards import digest_score

SUPPORT = Path(__file__).parents[3] / "tests" / "support"


def expected(samples: list[Sample]) -> torch.Tensor:
    return torch.tensor([digest_score(sample) for sample in samples], dtype=torch.float64)


def equal(given: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(given, wanted, rtol=0, atol=0, equal_nan=True)


def test_remote_scores_equal_local_scores_and_pass_the_contract_checks() -> None:
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


def test_an_empty_batch_sends_no_request() -> None:
    with bad_server("none") as server, closing(remote([server.url])) as reward:
        assert {name: column.shape for name, column in reward([]).items()} == {"digest": (0,), "odd": (0,)}
        assert server.request_count == 0


def test_one_of_several_rewards_of_a_server_can_be_selected() -> None:
    with live("a=share:red", "b=share:blue") as server:
        with closing(remote([server.url], rewards=("b",))) as reward:
            assert list(reward.columns) == ["b/share"]
            assert not reward(samples_of(3))["b/share"].isnan().any()
        with pytest.raises(ValueError, match="no reward c; they have a, b"):
            remote([server.url], rewards=("c",))


def test_the_wait_for_a_server_is_logged_once_with_its_length(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=r"no reward server replies at http://127\.0\.0\.1:9 within 0\.5 s \(`wait`"):
        remote(["http://127.0.0.1:9"], wait=0.5)
    with live("share:red") as server, closing(remote([server.url])):
        waits = [record.message for record in caplog.records if record.name == "retouch.rewards"]
    assert waits == ["waiting for the reward server at http://127.0.0.1:9 (up to 0.5 s)"]


def test_servers_that_cannot_be_used_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retouch_serve.client._ASK_SECONDS", 30.0)  # so that both servers answer in time on a busy machine
    with live("share:red", token="a-token-of-enough-characters") as closed, live("share:blue") as blue, live("share:red") as red:
        with pytest.raises(ValueError, match="another token: set RETOUCH_TOKEN"):
            remote([closed.url])
        monkeypatch.setenv("RETOUCH_TOKEN", "")  # an empty variable is no token, so the server does reply
        with pytest.raises(ValueError, match="another token: set RETOUCH_TOKEN"):
            remote([closed.url], wait=0.1)
        with pytest.raises(ValueError, match="has other rewards"):
            remote([blue.url, red.url])
        monkeypatch.setenv("RETOUCH_TOKEN", "a-token-of-enough-characters")
        with closing(remote([closed.url])) as reward:
            assert not reward(samples_of(2))["share"].isnan().any()
    with pytest.raises(ValueError, match="no reward server replies"):
        remote(["http://127.0.0.1:9"], wait=0.1)


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
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RemoteReward(**arguments)


def test_the_rate_limit_is_obeyed_and_samples_past_the_deadline_are_missing() -> None:
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


def test_retries_count_against_the_call_budget_and_requests_beyond_it_raise(tmp_path: Path) -> None:
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


def test_a_remote_reward_works_in_a_forked_child_and_in_its_parent() -> None:
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


def test_a_failing_endpoint_is_excluded_unless_it_is_the_last_one() -> None:
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


def test_the_pool_prefers_the_least_loaded_endpoint_that_has_not_failed() -> None:
    pool = EndpointPool(["http://a", "http://b", "http://c"], clock=lambda: 0.0)
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


def test_the_pool_chooses_no_endpoint_until_its_retry_after_time() -> None:
    clock = [0.0]
    pool = EndpointPool(["http://a"], clock=lambda: clock[0])
    pool.failed(pool.endpoints[0], fault_of_status(429, 2.0))
    assert pool.choose() is None
    clock[0] = 2.0
    assert pool.choose() is pool.endpoints[0]


def test_the_retry_budget_allows_a_share_of_requests_and_a_number_per_second() -> None:
    budget = RetryBudget(share=0.1, per_second=0.0, max_saved=3.0)
    assert [budget.take(0.0) for _ in range(4)] == [True, True, True, False]
    for _ in range(100):
        budget.first_request()
    assert [budget.take(0.0) for _ in range(4)] == [True, True, True, False]
    slow = RetryBudget(share=0.0, per_second=2.0, max_saved=1.0)
    assert [slow.take(now) for now in (0.0, 0.1, 0.5, 0.7, 1.1)] == [True, False, True, False, True]


def test_http_status_codes_are_classified_as_final_or_retryable() -> None:
    assert [fault_of_status(status, 0.0).final for status in (400, 401, 404, 413, 422)] == [True] * 5
    assert [fault_of_status(status, 0.0).final for status in (408, 429, 500, 502, 503, 504)] == [False] * 6
    assert not fault_of_status(429, 1.0).blames_server
    assert not fault_of_status(503, 1.0).tried
