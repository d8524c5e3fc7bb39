"""``retouch serve`` as a process: replicas restart, drain and reload, a reward that hangs, and the end with the supervisor."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import torch

from live_server import body_of, host, live, remote, samples_of
from retouch import cli
from retouch_serve.replicas import _reserved_ports, bind
from retouch_serve.requests import Limits
from retouch_serve.wire import is_loopback
from served_rewards import Digest, Sleeps, digest_score
from warm_python import python

SUPPORT = Path(__file__).parents[1] / "support"
EIGHT_GPUS = """
import torch

torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 8
from retouch import cli

raise SystemExit(cli.main())
"""
STARTED = re.compile(r"^replica (\d+): (http://\S+), pid (\d+)(?:, GPU (\d+))?, log (\S+)$")


def wait_until(true):
    """Wait for something that is going to happen; ten minutes at most."""
    end = time.monotonic() + 600
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@dataclass
class Serving:
    process: "subprocess.Popen[str]"
    lines: list[str] = field(default_factory=list)

    def starts(self):
        return [found for line in [*self.lines] if (found := STARTED.match(line))]

    def ready(self, count):
        return sum(line.endswith("is ready") for line in self.lines) >= count or self.process.poll() is not None

    def read(self):
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())


@contextmanager
def serving(folder, *words, ready=1, program=("-m", "retouch.cli"), executable=sys.executable, **environment):
    path = os.pathsep.join([str(SUPPORT), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [executable, *program, "serve", *words, "--port", "0", "--logs", str(folder / "logs")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **environment},
    )
    serve = Serving(process)
    reader = threading.Thread(target=serve.read)
    reader.start()
    try:
        wait_until(lambda: serve.ready(ready))
        yield serve
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(timeout=600)
        finally:
            process.kill()
            process.wait()
            reader.join()
            assert process.stdout is not None
            process.stdout.close()


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_replicas_have_own_ports_logs_and_gpus_and_a_killed_one_is_restarted(tmp_path):
    words = ("share:red", "--replicas", "2", "--gpus", "3,5")
    with serving(tmp_path, *words, ready=2, program=("-c", EIGHT_GPUS)) as serve:
        starts = serve.starts()
        assert [(found[1], found[4]) for found in starts] == [("0", "3"), ("1", "5")]
        assert len({found[2] for found in starts}) == 2
        assert all(Path(found[5]).is_file() for found in starts)
        with closing(remote([found[2] for found in starts], batch=2)) as reward:
            samples = samples_of(12)
            before = reward(samples)["share"]
            os.kill(int(starts[1][3]), signal.SIGKILL)
            torch.testing.assert_close(reward(samples)["share"], before, rtol=0, atol=0)
        wait_until(lambda: serve.ready(3))
        again = serve.starts()[-1]
        assert again[1] == "1"
        assert again[2] == starts[1][2]
        assert again[3] != starts[1][3]
        assert httpx.get(f"{again[2]}/readyz").status_code == 200
    assert serve.process.returncode == 0
    assert not any(alive(int(found[3])) for found in serve.starts())


def test_sigterm_completes_requests_in_flight(tmp_path):
    gate = tmp_path / "gate"
    gated = json.dumps({"kind": "import", "class": "served_rewards:WaitsForFile", "args": {"gate": str(gate)}})
    with serving(tmp_path, gated, executable=python()) as serve, httpx.Client(timeout=120) as client:
        (start,) = serve.starts()
        samples = samples_of(32)

        def ask(row):
            body, kind = body_of([samples[row]])
            reply = client.post(f"{start[2]}/v1/score", content=body, headers=kind)
            assert reply.status_code == 200
            return float(reply.json()["items"][0]["scores"]["digest"])

        def taken():
            text = client.get(f"{start[2]}/metrics").text
            found = re.search(r"^retouch_requests_in_flight (\d+)", text, re.MULTILINE)
            return found is not None and int(found[1]) >= 33  # with this one

        with ThreadPoolExecutor(32) as callers:
            asked = [callers.submit(ask, row) for row in range(32)]
            wait_until(taken)
            serve.process.terminate()
            wait_until(lambda: client.get(f"{start[2]}/readyz").status_code == 503)
            assert not any(future.done() for future in asked)
            gate.touch()
            assert [future.result() for future in asked] == [digest_score(sample) for sample in samples]
        wait_until(lambda: serve.process.poll() is not None)
    assert serve.process.returncode == 0


@pytest.mark.slow
def test_rolling_restarts_lose_no_sample_and_reload_replaces_the_reward(tmp_path):
    source = (SUPPORT / "served_rewards.py").read_text()
    (tmp_path / "my_judge.py").write_text(source)
    with serving(tmp_path, "my_judge:Digest", "--replicas", "2", ready=2) as serve:
        urls = [found[2] for found in serve.starts()]
        samples = samples_of(40)
        wanted = torch.tensor([digest_score(sample) for sample in samples], dtype=torch.float64)
        with closing(remote(urls, batch=1)) as reward:
            for turn in range(4):
                future = reward.submit(samples)
                pid = [found[3] for found in serve.starts() if found[1] == str(turn % 2)][-1]
                os.kill(int(pid), signal.SIGTERM)
                torch.testing.assert_close(future.result()["digest"], wanted, rtol=0, atol=0)
                wait_until(lambda turn=turn: serve.ready(3 + turn))
        old = {httpx.get(f"{url}/v1/info").json()["rewards"][0]["fingerprint"] for url in urls}
        (tmp_path / "my_judge.py").write_text(source + "\n# another rubric\n")
        serve.process.send_signal(signal.SIGHUP)
        wait_until(lambda: all(httpx.get(f"{url}/v1/info").json()["rewards"][0]["fingerprint"] not in old for url in urls))
    assert len(old) == 1


def test_server_exits_with_the_reason_if_the_reward_cannot_be_built(tmp_path):
    with serving(tmp_path, "no_such_module:Judge", executable=python()) as serve:
        wait_until(lambda: serve.process.poll() is not None)
    assert serve.process.returncode == 2
    assert "there is no module no_such_module" in serve.lines[-1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plaground"], "plaground"),
        (["share:red", "--host", "0.0.0.0"], "is reachable from other machines: set RETOUCH_TOKEN"),
        (["share:red", "--replicas", "0"], "at least 1"),
        (["share:red", "--port", "65535", "--replicas", "2"], "--port 65535 --replicas 2: the last replica's port is above 65535"),
        (["share:red", "--limit", "max_bach=3"], "did you mean 'max_batch'"),
        (["share:red", "--limit", "max_batch=x"], "max_batch must be a whole number"),
        (["share:red", "--limit", "window=-1"], "window"),
        (["share:red", "--ocr", "share"], "--ocr needs --vlm"),
        (["share:red", "--token-file", "nothing"], "no such file"),
        (["share:red", "--most-replicas", "3"], "need --engine ray"),
        (["share:red", "--ray-address", "auto"], "need --engine ray"),
        (["share:red", "--engine", "ray", "--host", "0.0.0.0"], "is reachable from other machines"),
    ],
)
def test_invalid_serve_options_are_reported_before_anything_starts(words, says, capsys):
    assert cli.main(["serve", *words]) == 2
    assert says in capsys.readouterr().err


def test_a_port_in_use_a_short_token_a_wrong_host_and_a_missing_ray_are_refused(tmp_path, capsys, monkeypatch):
    def said(*words):
        assert cli.main(["serve", "share:red", *words, "--logs", str(tmp_path)]) == 2
        return capsys.readouterr().err

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} is in use" in said("--port", str(port))
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'retouch[ray]'" in said("--engine", "ray")
    monkeypatch.setenv("RETOUCH_TOKEN", "a-token-of-enough-characters")
    absent = said("--host", "nosuch.invalid")
    assert "--host nosuch.invalid --port 8700: " in absent
    assert "Unknown error" not in absent
    monkeypatch.setenv("RETOUCH_TOKEN", "short")
    assert "at least 16 characters" in said()
    assert [is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "")] == [False] * 5


def test_reserved_port_stays_in_use_while_no_replica_listens():
    with _reserved_ports("127.0.0.1", 0, 2) as ports:
        for port in ports:
            with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
                stranger.bind(("127.0.0.1", port))
            with bind("127.0.0.1", port) as replica:
                replica.listen()
                with pytest.raises(ValueError, match=f"port {port} is in use"), _reserved_ports("127.0.0.1", port, 1):
                    pass


def test_accepted_connections_have_tcp_nodelay():
    """Without this option an answer's last bytes wait until the caller acknowledges its first, 40 ms later."""

    async def option_of_a_connection():
        async def answer(reader, writer):
            found.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()
            await writer.wait_closed()

        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        async with await asyncio.start_server(answer, sock=bind("127.0.0.1", 0)) as server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            option = await found
            writer.close()
            await writer.wait_closed()
        return option

    assert asyncio.run(option_of_a_connection())


def test_a_token_is_in_no_log_and_replicas_end_when_their_supervisor_is_killed(tmp_path):
    token = "canary-7f3a9d2e51b84c06"
    with serving(tmp_path, "share:red", "--host", "0.0.0.0", RETOUCH_TOKEN=token) as serve:
        (start,) = serve.starts()
        url = start[2].replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{url}/v1/info").status_code == 401
        assert httpx.get(f"{url}/v1/info", headers={"Authorization": f"Bearer {token}"}).status_code == 200
        httpx.post(f"{url}/v1/score", content=b"x", headers={"Authorization": f"Bearer {token}"})
        command = Path(f"/proc/{start[3]}/cmdline")
        assert token not in (command.read_text() if command.exists() else "")
        serve.process.kill()
        serve.process.wait()
        wait_until(lambda: not alive(int(start[3])))
    assert token not in "".join(serve.lines) + "".join(log.read_text() for log in (tmp_path / "logs").iterdir())


LIMITS = Limits(window=0.0, stall_seconds=0.2, deadline_seconds=2.0)


@pytest.fixture
def server():
    Sleeps.wake.clear()
    with live(host(Sleeps()), limits=LIMITS) as made:
        try:
            yield made
        finally:
            Sleeps.wake.set()


def ask(server, text=None, *, deadline=30.0):
    body, kind = body_of(samples_of(1, text=text))
    return httpx.post(f"{server.url}/v1/score", content=body, headers={**kind, "X-Deadline-Seconds": str(deadline)}, timeout=60)


def page(server, path):
    return httpx.get(f"{server.url}{path}", timeout=10).status_code


def test_a_server_whose_reward_hangs_is_not_ready_and_refuses_at_once(server):
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


def test_slow_reward_does_not_make_the_server_reject_requests():
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
def test_a_replica_that_hangs_is_replaced(tmp_path):
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


@pytest.mark.slow
def test_a_server_whose_reward_hangs_can_be_stopped(tmp_path):
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
