"""Requests to runs from the page: only with the flag, only from the page itself, and only to a run that is training."""

import json

import pytest
from conftest import TOKEN
from starlette.testclient import TestClient

from retouch.records.control import answer_request, read_requests
from retouch_view.live.app import build_app

SAME_ORIGIN = {"Origin": "http://127.0.0.1:8765"}
CONTROL_PATH = "/api/runs/one/control"


@pytest.fixture
def control_client(tmp_path):
    """A browser on a page with ``--control``, with the token."""
    (tmp_path / "runs").mkdir(exist_ok=True)
    app = build_app(tmp_path / "runs", token=TOKEN, control=True, poll_seconds=0.02)
    with TestClient(app, base_url="http://127.0.0.1:8765") as client:
        client.get(f"/?token={TOKEN}")
        yield client


def test_control_request_is_stored_and_returned_with_its_answer(running, control_client):
    assert control_client.get("/api/features").json()["control"] is True
    reply = control_client.post(CONTROL_PATH, json={"action": "samples", "value": 3}, headers=SAME_ORIGIN)
    assert reply.status_code == 202
    ((name, request),) = read_requests(running).items()
    assert (name, request.action, request.value) == (reply.json()["id"], "samples", 3)
    assert request.by.endswith("(page)")
    answer_request(running, name, request, taken=True, step=3, answer="samples are stored every 3 steps from now on")
    (shown,) = control_client.get("/api/runs/one").json()["requests"]
    assert (shown["taken"], shown["step"], shown["value"]) == (True, 3, 3)
    hostile = "<script>alert(1)</script>\u202e" + "x" * 5000
    stored = {"action": "stop", "value": None, "by": hostile, "at": "<b>", "taken": False, "step": 1, "answer": hostile[:40]}
    (running.control / "0.json").write_text(json.dumps(stored))
    assert hostile in [each["by"] for each in control_client.get("/api/runs/one").json()["requests"]]


def test_control_requests_without_the_flag_are_rejected(running, browser):
    assert browser.get("/api/features").json() == {"vote": False, "control": False, "try": False}
    assert browser.post(CONTROL_PATH, json={"action": "stop"}, headers=SAME_ORIGIN).status_code == 405
    assert not running.control.exists()


@pytest.mark.parametrize(
    "headers",
    [
        {}, {"Origin": "http://127.0.0.1:9999"}, {"Origin": "https://attacker.example"}, {"Origin": "null"},
        {"Origin": "http://localhost:8765"}, {"Origin": "http://127.0.0.1:8765.attacker.example"},
        {"Origin": "http://user@127.0.0.1:8765"}, SAME_ORIGIN | {"Host": "attacker.example"},
        SAME_ORIGIN | {"Cookie": "retouch_view_8765=wrong"}, SAME_ORIGIN | {"Content-Type": "text/plain"},
        SAME_ORIGIN | {"Content-Type": "application/x-www-form-urlencoded"},
        SAME_ORIGIN | {"Content-Type": "multipart/form-data; boundary=x"},
    ],
    ids=str,
)  # fmt: skip
def test_other_sites_cannot_make_requests(running, control_client, headers):
    content = b'{"action": "stop"}'
    reply = control_client.post(CONTROL_PATH, content=content, headers={"Content-Type": "application/json", **headers})
    assert reply.status_code in (403, 421)
    control_client.cookies.clear()
    assert control_client.post(f"{CONTROL_PATH}?token={TOKEN}", json={"action": "stop"}, headers=SAME_ORIGIN).status_code == 403
    assert not running.control.exists()


def test_other_http_methods_and_paths_return_405(running, control_client):
    for method in ("PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
        for place in ("/api/runs", CONTROL_PATH):
            assert control_client.request(method, place, headers=SAME_ORIGIN).status_code == 405
    assert control_client.post("/api/runs", json={}, headers=SAME_ORIGIN).status_code == 405


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400), (b"[]", 400), (b"\0\xff", 400), (b"[" * 9_000, 400), (b'"' + b"x" * 1_000_000 + b'"', 413), (b"{}", 409),
        (b'{"action": "kill"}', 409), (b'{"action": "samples", "value": "<b>"}', 409), (b'{"action": {"a": 1}}', 409),
        ('{"action": "\u202e<script>"}'.encode(), 409),
    ],
    ids=range(10),
)  # fmt: skip
def test_malformed_control_requests_are_rejected(running, control_client, content, status):
    reply = control_client.post(CONTROL_PATH, content=content, headers={**SAME_ORIGIN, "Content-Type": "application/json"})
    assert reply.status_code == status
    assert reply.json()["error"]
    assert not running.control.exists()


def test_control_requests_to_runs_that_are_not_training_are_rejected(write_run, control_client):
    write_run("one")
    reply = control_client.post(CONTROL_PATH, json={"action": "stop"}, headers=SAME_ORIGIN)
    assert (reply.status_code, reply.json()) == (409, {"error": "run one is not training, so nothing would take the request"})
    assert control_client.post("/api/runs/..%2fother/control", json={"action": "stop"}, headers=SAME_ORIGIN).status_code == 404
    assert control_client.post("/api/runs/other/control", json={"action": "stop"}, headers=SAME_ORIGIN).status_code == 404
