"""Voting through the page's endpoints: blind pairs, hidden repeats, one vote per pair; cross-site requests are rejected."""

import io
import json

import pytest
from conftest import TOKEN
from PIL import Image
from starlette.testclient import TestClient

from retouch.records.folder import RunFolder, SampleRecord
from retouch.types import Sample, Task
from retouch_view.live.app import build_app
from retouch_view.votes.log import VoteLog
from retouch_view.votes.queue import REPEAT_EVERY, VoteQueue
from retouch_view.votes.statistics import voters

ORIGIN = {"Origin": "http://127.0.0.1:8765"}
STEPS = {"run": "one", "step": "0", "other": "one", "other_step": "4"}


@pytest.fixture
def runs(tmp_path):
    return tmp_path / "runs"


@pytest.fixture
def write_samples(runs):
    """A run with held-out images after steps 0 and 4: the later images are brighter and have the higher judge scores."""

    def write(name, *, tasks=6, instruction="make it red"):
        folder = RunFolder(runs / name)
        folder.write_recipe({"name": name, "steps": 4})
        for step in (0, 4):
            records = []
            for number in range(tasks):
                task = Task(f"t/{number}", instruction, images=(Image.new("RGB", (8, 8), (number, 0, 0)),), tags={"kind": "add"})
                made = Image.new("RGB", (8, 8), (40 * step + number, len(name), 9))
                records.append(
                    SampleRecord(sample=Sample(task, made), group=number, slot=0, scores={"judge": float(step)}, reward=float(step))
                )
            folder.write_samples(step, "heldout", records)
        return folder

    return write


@pytest.fixture
def client(runs):
    runs.mkdir(exist_ok=True)
    with TestClient(build_app(runs, token=TOKEN, vote=True, poll_seconds=0.02), base_url="http://127.0.0.1:8765") as made:
        assert made.get(f"/?token={TOKEN}").status_code == 200
        yield made


def question(client, voter="ann", **poll):
    return client.get("/api/next-pair", params={**(poll or STEPS), "voter": voter}).json()


def answer(client, given, choice):
    return client.post("/api/votes", json={"question": given["question"]["id"], "choice": choice}, headers=ORIGIN)


def red(client, given, which):
    reply = client.get(f"/pair-images/{given['question']['id']}/{which}")
    assert reply.headers["cache-control"] == "no-store"
    with Image.open(io.BytesIO(reply.content)) as image:
        return int(image.getpixel((0, 0))[0])


def prefer_later(client, given):
    return "left" if red(client, given, "left") > red(client, given, "right") else "right"


def test_results_report_win_rates_judge_agreement_and_voter_consistency(write_samples, client, runs):
    write_samples("one", tasks=20)
    found = client.get("/api/votes/one").json()
    assert (found["waiting"], found["steps"], found["others"]) == (None, [0, 4], [])
    sides = []
    for _ in range(40):
        given = question(client)
        if given["question"] is None:
            break
        sides.append(prefer_later(client, given))
        assert answer(client, given, sides[-1]).status_code == 200
    assert (given["question"], given["done"], given["total"]) == (None, 20, 20)
    assert {"left", "right"} == set(sides)
    votes = VoteLog(runs / "one").read().votes
    assert sum(vote.repeat for vote in votes) == 20 // REPEAT_EVERY == len(votes) - 20
    results = client.get("/api/votes/one/results").json()
    (rate,) = results["win_rates"]
    assert (rate["arm"], rate["other"], rate["share"]["value"]) == ("one step 4", "one step 0", 1.0)
    assert {row["category"]: row["share"]["value"] for row in results["judges"]} == {"all": 1.0, "kind=add": 1.0}
    assert results["voters"][0]["consistency"]["value"] == 1.0


def test_repeated_pair_has_its_sides_swapped(write_samples, client, runs):
    write_samples("one", tasks=30)
    while (given := question(client))["question"] is not None:
        answer(client, given, "left")
    (row,) = voters(VoteLog(runs / "one").read().votes)
    assert (row.consistency.value, row.consistency.count) == (0.0, 30 // REPEAT_EVERY)


def test_pair_reveals_neither_run_nor_step_and_its_sides_vary_by_voter(write_samples, client):
    write_samples("one")
    given = question(client)
    assert given["question"].keys() == {"id", "instruction", "source"}
    assert "step" not in json.dumps(given)
    assert "run" not in json.dumps(given)
    again = question(client)
    assert [red(client, each, "left") for each in (given, again)] == [red(client, given, "left")] * 2
    orders = {tuple(red(client, question(client, voter=name), side) for side in ("left", "right")) for name in "abcdefgh"}
    assert len(orders) > 2


def test_vote_counts_once_and_can_be_undone(write_samples, client, runs):
    write_samples("one")
    given = question(client)
    assert answer(client, given, "leftish").status_code == 409
    assert answer(client, given, "tie").status_code == 200
    assert answer(client, given, "tie").status_code == 409
    assert [client.get(f"/pair-images/{given['question']['id']}/{side}").status_code for side in ("left", "right")] == [200, 200]
    assert question(client)["done"] == 1
    undone = client.post("/api/undo-vote", json={**STEPS, "voter": "ann"}, headers=ORIGIN)
    assert undone.status_code == 200
    assert VoteLog(runs / "one").read().undone == 1
    assert question(client)["done"] == 0
    for voter in ("ann", "bob"):
        reply = client.post("/api/undo-vote", json={**STEPS, "voter": voter}, headers=ORIGIN)
        assert (reply.status_code, reply.json()["error"]) == (409, "you have no vote to undo")


def test_two_runs_are_compared_and_equal_images_are_not_shown(write_samples, client, runs):
    write_samples("one")
    write_samples("three")
    two = {"run": "one", "step": "4", "other": "three", "other_step": "4"}
    assert question(client, **two)["total"] == 6
    assert question(client, **{**two, "other": "one"})["total"] == 0
    given = question(client, **two)
    answer(client, given, "both_bad")
    (vote,) = VoteLog(runs / "one").read().votes
    assert {vote.left.arm, vote.right.arm} == {"one step 4", "three step 4"}
    assert (runs / "one" / vote.left.file).resolve().is_file()


def test_queued_pairs_of_a_training_run_are_voted_on_once(write_samples, client, runs):
    write_samples("one")
    queue = VoteQueue(runs / "one" / "queue")
    images = [Image.new("RGB", (8, 8), (60 * k, 0, 0)) for k in range(3)]
    group = queue.put(Task("q", "make it red", (images[0],)), images, pairs=None)
    assert client.get("/api/votes/one").json()["waiting"] == 3
    live = {"run": "one", "live": "1"}
    while (given := question(client, **live))["question"] is not None:
        assert answer(client, given, prefer_later(client, given)).status_code == 200
    assert queue.unanswered(group) == []
    assert question(client, voter="bob", **live)["done"] == 3
    assert client.get("/api/votes/one/results").json()["votes"] == 3


def test_invalid_voter_names_and_missing_runs_and_steps_are_rejected(write_samples, client):
    write_samples("one")
    for name in ("", " ", "\u202e", "x" * 65):
        reply = client.get("/api/next-pair", params={**STEPS, "voter": name})
        assert (reply.status_code, reply.json()["error"]) == (409, "give a name of 1 to 64 characters")
    for changed in ({"run": "none"}, {"run": "../one"}, {"step": "7"}, {"step": "-1"}, {"other": "none"}, {"other_step": "x"}):
        assert client.get("/api/next-pair", params={**STEPS, **changed, "voter": "ann"}).status_code == 409


def test_no_file_outside_the_runs_is_shown(write_samples, client, runs):
    folder = write_samples("one", tasks=4)
    Image.new("RGB", (8, 8), (200, 1, 2)).save(runs.parent / "secret.png")
    lines = folder.samples(4) / "samples.jsonl"
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    for line, name in zip(found, ["../../../../secret.png", str(runs.parent / "secret.png"), "linked.png", 7], strict=True):
        line["image"] = name
    lines.write_text("".join(json.dumps(line) + "\n" for line in found))
    (folder.samples(4) / "linked.png").symlink_to(runs.parent / "secret.png")
    given = question(client)
    assert given["total"] == 1
    codes = [client.get(f"/pair-images/{given['question']['id']}/{side}").status_code for side in ("left", "right")]
    assert sorted(codes) == [200, 404]
    for path in ("/pair-images/x/left", f"/pair-images/{given['question']['id']}/../left", "/pair-images/%2e%2e/left"):
        assert client.get(path).status_code == 404


@pytest.mark.parametrize(
    "headers",
    [
        {}, *({"Origin": o} for o in ("https://attacker.example", "null", "http://127.0.0.1:9999", "http://localhost:8765")),
        *({**ORIGIN, "Content-Type": content} for content in ("text/plain", "application/x-www-form-urlencoded")),
        {**ORIGIN, "Host": "attacker.example:8765"}, {**ORIGIN, "Cookie": "retouch_view_8765=wrong"},
    ],
    ids=str,
)  # fmt: skip
def test_other_sites_cannot_vote(write_samples, client, runs, headers):
    write_samples("one")
    given = question(client)["question"]["id"]
    if "Cookie" in headers:
        client.cookies.clear()
    for path in ("/api/votes", "/api/undo-vote"):
        body = json.dumps({"question": given, "choice": "left", **STEPS, "voter": "ann"})
        reply = client.post(path, content=body, headers={"Content-Type": "application/json", **headers})
        assert reply.status_code in (403, 421)
    assert not (runs / "one" / "votes.jsonl").exists()


def test_voting_is_disabled_without_the_vote_option(write_samples, browser, runs):
    write_samples("one")
    assert browser.get("/api/features").json()["vote"] is False
    assert browser.get("/api/next-pair", params={**STEPS, "voter": "ann"}).status_code == 404
    assert browser.post("/api/votes", json={}, headers=ORIGIN).status_code == 405
    assert browser.get("/api/votes/one/results").json()["votes"] == 0
    assert not (runs / "one" / "votes.jsonl").exists()


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"nan", b"[" * 9000, b'{"question": 1}', b'{"choice": "left", "question": []}', b"x" * 99_999]
)
def test_malformed_vote_bodies_return_4xx_with_an_error(write_samples, client, body):
    write_samples("one")
    for path in ("/api/votes", "/api/undo-vote"):
        reply = client.post(path, content=body, headers={**ORIGIN, "Content-Type": "application/json"})
        assert reply.status_code in (400, 409, 413)
        assert reply.json()["error"]
