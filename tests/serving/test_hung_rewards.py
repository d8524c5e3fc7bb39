"""A reward that does not return: the server reports it, rejects requests at once and is replaced; clients use other servers."""

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import pytest
import torch
from test_replicas import serving, wait_until

from bad_server import bad_server
from live_server import LiveServer, body_of, host, live, remote, samples_of
from retouch_serve.client import EndpointPool, RequestFault, fault_of_status
from retouch_serve.requests import Limits
from served_rewards import Digest, Sleeps, digest_score

LIMITS = Limits(window=0.0, stall_seconds=0.2, deadline_seconds=2.0)


@pytest.fixture
def server() -> Iterator[LiveServer]:
    Sleeps.wake.clear()
    with live(host(Sleeps()), limits=LIMITS) as made:
        try:
            yield made
        finally:
            Sleeps.wake.set()


def ask(server: LiveServer, text: str | None = None, *, deadline: float = 30.0) -> httpx.Response:
    body, kind = body_of(samples_of(1, text=text))
    return httpx.post(f"{server.url}/v1/score", content=body, headers={**kind, "X-Deadline-Seconds": str(deadline)}, timeout=60)


def page(server: LiveServer, path: str) -> int:
    return httpx.get(f"{server.url}{path}", timeout=10).status_code


def test_a_server_whose_reward_hangs_is_not_ready_and_refuses_at_once(server: LiveServer) -> None:
    assert (page(server, "/readyz"), page(server, "/livez")) == (200, 200)
    assert ask(server, "sleep", deadline=0.5).status_code == 504
    assert page(server, "/readyz") == 503
    began = time.monotonic()
    refused = ask(server)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stalled")
    assert time.monotonic() - began < 5  # and not the deadline of 30 s
    wait_until(lambda: page(server, "/livez") == 503)
    Sleeps.wake.set()
    wait_until(lambda: page(server, "/readyz") == 200)
    assert page(server, "/livez") == 200
    assert ask(server).status_code == 200


def test_slow_reward_does_not_make_the_server_reject_requests() -> None:
    """A caller with a short deadline gets status 504; the others are served."""
    with live(host(Digest(base=0.3)), limits=Limits(window=0.0, stall_seconds=0.2)) as server, ThreadPoolExecutor() as pool:
        assert ask(server).status_code == 200
        slow = pool.submit(ask, server)
        while not server.service.call_seconds:
            time.sleep(0.005)
        assert ask(server, deadline=0.05).status_code == 504
        assert page(server, "/readyz") == 200
        assert ask(server).status_code == 200
        assert slow.result().status_code == 200


@pytest.mark.slow
def test_a_replica_that_hangs_is_replaced(tmp_path: Path) -> None:
    section = json.dumps({"kind": "import", "class": "served_rewards:Sleeps"})
    limits = [word for limit in ("stall_seconds=0.2", "deadline_seconds=2") for word in ("--limit", limit)]
    with serving(tmp_path, section, *limits) as serve:
        url = serve.starts()[0][2]
        body, kind = body_of(samples_of(1, text="sleep"))
        assert httpx.post(f"{url}/v1/score", content=body, headers=kind, timeout=60).status_code == 504
        wait_until(lambda: serve.ready(2))
        assert any("did not return within 2 s; killing it" in line for line in serve.lines)
        body, kind = body_of(samples_of(1))
        assert httpx.post(f"{url}/v1/score", content=body, headers=kind, timeout=60).status_code == 200
    assert serve.process.returncode == 0


def test_a_server_whose_reward_hangs_can_be_stopped(tmp_path: Path) -> None:
    section = json.dumps({"kind": "import", "class": "served_rewards:Sleeps"})
    limits = [word for limit in ("deadline_seconds=300", "drain_seconds=4") for word in ("--limit", limit)]
    with serving(tmp_path, section, *limits) as serve:
        url, log = serve.starts()[0][2], Path(serve.starts()[0][5])
        body, kind = body_of(samples_of(1, text="sleep"))
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{url}/v1/score", content=body, headers=kind, timeout=0.5)
        serve.process.terminate()
        assert serve.process.wait(timeout=120) == 0
        assert re.search("still running; exiting without its result", log.read_text())


# The client


def test_a_time_out_excludes_a_server_at_once_until_a_probe_finds_it_ready() -> None:
    clock = [0.0]
    pool = EndpointPool(["http://a", "http://b"], clock=lambda: clock[0])
    a, b = pool.endpoints
    pool.failed(a, RequestFault("timeout"))
    assert (a.excluded, pool.choose()) == (True, b)
    pool.failed(b, RequestFault("timeout"))
    assert pool.choose() is None  # even the last server is excluded: a probe takes 2 s, a request its whole time limit
    clock[0] = 1.0
    assert pool.probes_due() == [a, b]
    pool.probed(b, succeeded=True)
    assert pool.choose() is b
    pool.failed(b, RequestFault("http_500"))
    assert not b.excluded


def test_status_504_and_time_outs_are_slow_faults_and_500_is_not() -> None:
    assert fault_of_status(504, 0.0).slow
    assert RequestFault("timeout").slow
    assert not fault_of_status(500, 0.0).slow


def test_client_avoids_a_hanging_server_after_its_first_time_out(tmp_path: Path) -> None:
    """One of two servers takes every request and never answers: of many requests, only those already sent wait for it."""
    samples = samples_of(40)
    with (
        bad_server("hang", ready=lambda: False) as bad,
        bad_server("none") as good,
        closing(remote([bad.url, good.url], batch=1, concurrency=1, attempts=4, timeout=1.0, deadline=60.0)) as reward,
    ):
        began = time.monotonic()
        for part in range(0, 40, 4):
            scores = reward(samples[part : part + 4])["digest"]
            assert torch.equal(scores, torch.tensor([digest_score(sample) for sample in samples[part : part + 4]]))
        assert bad.request_count <= 2
        assert time.monotonic() - began < 30


def test_client_of_a_single_hanging_server_retries_when_it_is_ready() -> None:
    state = {"kind": "hang", "ready": False}
    with (
        bad_server(lambda: state["kind"], ready=lambda: state["ready"]) as server,
        closing(remote([server.url], batch=1, concurrency=1, attempts=4, timeout=0.5, deadline=60.0)) as reward,
    ):
        waiting = reward.submit(samples_of(2))
        wait_until(lambda: reward.stats().get("faults/timeout"))
        time.sleep(1.5)
        assert server.request_count <= 2  # and not once in each half second
        state |= {"kind": "none", "ready": True}
        assert not waiting.result(timeout=60)["digest"].isnan().any()
