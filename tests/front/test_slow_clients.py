"""Both servers answer honest clients while others attack them before authentication, with less memory and log than the attack."""

import threading
import time
from dataclasses import replace

import httpx
import pytest
import uvicorn

from live_server import body_of, host, live, samples_of
from retouch_serve.front import bounded_config
from retouch_serve.requests import Limits
from retouch_view.live.app import LIMITS, build_app
from served_rewards import Digest
from slow_clients import ATTACKS, attacking, honest
from slow_params import slow_after

CONNECTIONS = 40
ATTACKERS = 140  # more than the connections and the requests in progress of a server
HONEST = 10
TOKEN = "a-token-of-the-tests"


def answered(method, url, **options):
    try:
        return httpx.request(method, url, timeout=5, trust_env=False, **options).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def reward_server():
    body, kind = body_of(samples_of(1))
    with live(host(Digest()), limits=Limits(window=0.0, max_connections=CONNECTIONS, max_requests=16)) as server:
        yield server.url, lambda: answered("POST", f"{server.url}/v1/score", content=body, headers=kind)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    app = build_app(tmp_path_factory.mktemp("runs"), token=TOKEN, control=True)
    server = uvicorn.Server(bounded_config(app, replace(LIMITS, max_connections=CONNECTIONS), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    with httpx.Client(base_url=url, trust_env=False, follow_redirects=True) as client:
        client.get(f"/?token={TOKEN}")
        cookies = dict(client.cookies)

    yield url, lambda: answered("GET", f"{url}/api/runs", cookies=cookies)
    server.should_exit = True
    thread.join(timeout=30)


@pytest.mark.parametrize("name", slow_after(5, ATTACKS))
@pytest.mark.parametrize("server", ["reward_server", "page"])
def test_point_3_5_honest_requests_are_answered_under_attack(name, server, request):
    url, ask = request.getfixturevalue(server)
    with attacking(url, ATTACKS[name], ATTACKERS):
        replies, _ = honest(ask, HONEST)
    assert replies == HONEST
