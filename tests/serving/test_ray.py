"""``retouch serve --engine ray``: replicas restart, drain and reload. `test_server` and `test_hostile` test its endpoints."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import psutil
import torch

from live_server import body_of, remote, samples_of
from ray_server import ON_RAY, ray_server
from served_rewards import digest_score

SUPPORT = Path(__file__).parents[1] / "support"


pytestmark = ON_RAY


def test_killed_replica_is_restarted_and_no_sample_is_lost():
    words = ["served_rewards:WithPid", "--replicas", "2"]
    samples = samples_of(40)
    wanted = torch.tensor([digest_score(sample) for sample in samples], dtype=torch.float64)
    with ray_server(*words) as server, closing(remote([server.url], batch=1, attempts=20)) as reward:
        pids = set()
        while len(pids) < 2:
            pids |= {int(pid) for pid in reward(samples)["pid"].tolist()}
        os.kill(pids.pop(), signal.SIGKILL)
        (left,) = pids
        while len(pids) < 2:
            scores = reward(samples)
            torch.testing.assert_close(scores["digest"], wanted, rtol=0, atol=0)
            pids |= {int(pid) for pid in scores["pid"].tolist()}
        assert left in pids


def test_sigterm_completes_requests_in_flight_and_rejects_new_ones(tmp_path):
    gate = tmp_path / "gate"
    gated = json.dumps({"kind": "import", "class": "served_rewards:WaitsForFile", "args": {"gate": str(gate)}})
    samples = samples_of(32)
    with ray_server(gated) as server, ThreadPoolExecutor(32) as callers:

        def ask(row):
            body, kind = body_of([samples[row]])
            reply = server.client.post("/v1/score", content=body, headers=kind)
            assert reply.status_code == 200
            return float(reply.json()["items"][0]["scores"]["digest"])

        asked = [callers.submit(ask, row) for row in range(32)]
        while "retouch_requests_in_flight 33.0" not in server.client.get("/metrics").text:
            time.sleep(0.05)
        server.process.terminate()
        while server.client.get("/readyz").status_code != 503:
            time.sleep(0.05)
        body, kind = body_of(samples[:1])
        assert server.client.post("/v1/score", content=body, headers=kind).status_code == 503
        assert not any(future.done() for future in asked)
        gate.touch()
        assert [future.result() for future in asked] == [digest_score(sample) for sample in samples]
        assert server.process.wait(timeout=300) == 0


def test_replicas_scale_up_with_the_load(tmp_path):
    gate = tmp_path / "gate"
    gated = json.dumps({"kind": "import", "class": "served_rewards:WaitsForFile", "args": {"gate": str(gate)}})
    samples = samples_of(48)
    with ray_server(gated, "--replicas", "1", "--most-replicas", "2") as server:

        def replicas():
            return sum(any("ServeReplica" in word for word in words) for words in processes_of(server))

        assert replicas() == 1
        with closing(remote([server.url], batch=1, concurrency=48, timeout=600, deadline=600)) as reward:
            asked = reward.submit(samples)
            while replicas() < 2:
                assert not asked.done()
                time.sleep(0.2)
            gate.touch()
            assert asked.result()["digest"].tolist() == [digest_score(sample) for sample in samples]


def test_reload_replaces_the_reward_and_loses_no_request(tmp_path, monkeypatch):
    source = (SUPPORT / "served_rewards.py").read_text()
    module = tmp_path / "my_judge.py"
    module.write_text(source)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with ray_server("my_judge:Digest", "--replicas", "2") as server:

        def fingerprints():
            return {server.client.get("/v1/info").json()["rewards"][0]["fingerprint"] for _ in range(8)}

        (old,) = fingerprints()
        module.write_text(source + "\n# another rubric\n")
        server.process.send_signal(signal.SIGHUP)
        body, kind = body_of(samples_of(2))
        while old in fingerprints():
            assert server.client.post("/v1/score", content=body, headers=kind).status_code == 200


def test_failed_reload_keeps_the_old_reward(tmp_path, monkeypatch):
    source = (SUPPORT / "served_rewards.py").read_text()
    module = tmp_path / "broken_judge.py"
    module.write_text(source)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with ray_server("broken_judge:Digest") as server:
        module.write_text("raise ValueError('no weights')\n")
        server.process.send_signal(signal.SIGHUP)
        server.wait_for("the old ones stay in use")
        body, kind = body_of(samples_of(2))
        assert server.client.post("/v1/score", content=body, headers=kind).status_code == 200


def test_ray_cluster_rejects_a_client_with_a_wrong_token():
    """A client that is connected to the cluster can run code on it."""
    ask = "import ray, sys; ray.init(address=sys.argv[1], logging_level='ERROR')"
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    with ray_server("share:red") as server:
        (cluster,) = {word for line in processes_of(server) for word in line if word.startswith("--gcs-address=")}
        address = cluster.removeprefix("--gcs-address=")
        done = subprocess.run([sys.executable, "-c", ask, address], capture_output=True, text=True, env=environment, check=False)
        assert done.returncode != 0
        assert "InvalidAuthToken" in done.stderr


def processes_of(server):
    """The words with which its child processes were started."""
    found = []
    for child in psutil.Process(server.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found.append(child.cmdline())
    return found


def test_server_exits_with_the_reason_if_the_reward_cannot_be_built():
    with ray_server("no_such_module:Judge", ready="cannot be served") as server:
        assert server.process.wait(timeout=300) == 2
        assert "there is no module no_such_module" in "".join(server.lines)
