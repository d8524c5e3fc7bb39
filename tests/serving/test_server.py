"""The reward server: its replies, authentication, batching, rejection of requests, draining and reloading."""

import asyncio
import base64
import json
import math
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from PIL import Image
from starlette.routing import Route

import retouch
from live_server import LIMITS, body_of, host, live, samples_of
from pictures import encoded, picture
from ray_server import ON_RAY, RayServer, ray_server
from retouch.rewards.judging import CalibratedScores
from retouch.rewards.scoring import scores_of as scores_in_process
from retouch.types import Sample
from retouch_rewards.ocr import TextLine
from retouch_serve.hosted import build, fingerprint, parse_specs, rebuild
from retouch_serve.requests import Limits, SingleScore
from retouch_serve.service import Batcher, Metrics
from retouch_view.votes.commands import Calibration
from served_rewards import Digest, FailsOnText, digest_score

TOKEN = "a-token-of-enough-characters"


@pytest.fixture(scope="module", params=["own", pytest.param("ray", marks=ON_RAY)])
def digest(request):
    """The same endpoints, served by the built-in engine and by Ray."""
    if request.param == "ray":
        weights = ["--vlm", "digest", "--ocr", "odd", "--vlm-weight", "0.5", "--ocr-weight", "2"]
        with ray_server("served_rewards:FailsOnText", *weights) as served:
            yield served
    else:
        with live(
            host(FailsOnText(), "failsontext"), single_score=SingleScore(vlm="digest", ocr="odd", vlm_weight=0.5, ocr_weight=2.0)
        ) as server:
            yield server


def ask(server, samples, *, form="multipart", **headers):
    body, kind = body_of(samples, form=form)
    return server.client.post("/v1/score", content=body, headers={**kind, **headers})


def scores_of(response, column="digest"):
    assert response.status_code == 200, response.text
    return [item["scores"].get(column) for item in response.json()["items"]]


def test_each_body_form_returns_one_score_per_item_and_a_damaged_image_fails_only_its_own(digest):
    samples = samples_of(9)
    for form in ("multipart", "msgpack", "json"):
        response = ask(digest, samples, form=form)
        assert scores_of(response) == [digest_score(sample) for sample in samples]
        assert scores_of(response, "odd") == [1.0 if len(sample.task.id) % 2 else None for sample in samples]
        assert [item["id"] for item in response.json()["items"]] == [str(row) for row in range(9)]
    body, kind = body_of(samples, encoding="webp")
    place = body.index(b"WEBP", body.index(b'name="picture-1"'))  # the first sample's image, after the source
    damaged = body[:place] + b"WEBQ" + body[place + 4 :]
    items = digest.client.post("/v1/score", content=damaged, headers=kind).json()["items"]
    assert [item["errors"] for item in items] == [{"failsontext": "bad_picture"}, *[{}] * 8]
    assert [item["scores"].get("digest") for item in items] == [None, *map(digest_score, samples[1:])]


@pytest.mark.parametrize(
    ("text", "scores", "errors"),
    [
        ("raise", {}, {"failsontext": "reward_failed"}),
        ("lie", {}, {"failsontext": "reward_disagrees"}),
        ("unknown", {"digest": None}, {}),
    ],
)
def test_a_reward_that_fails_on_one_sample_scores_the_others(digest, text, scores, errors):
    samples = [*samples_of(5), *samples_of(1, text=text), *samples_of(2)]
    response = ask(digest, samples)
    items = response.json()["items"]
    rows = (0, 1, 2, 3, 4, 6, 7)
    assert [items[row]["scores"]["digest"] for row in rows] == [digest_score(samples[row]) for row in rows]
    assert items[5]["errors"] == errors
    assert items[5]["scores"].items() >= scores.items()
    assert "secret-of-the-server" not in response.text
    items = ask(digest, samples_of(2, text="short")).json()["items"]  # output of the wrong shape
    assert [item["scores"] for item in items] == [{}, {}]
    assert {code for item in items for code in item["errors"].values()} == {"reward_disagrees"}


def test_a_sample_without_an_image_is_not_passed_to_the_reward_and_gets_the_worst_scores():
    samples = [*samples_of(1), Sample(samples_of(1)[0].task, None)]
    with live(host(Digest())) as server:
        response, alone = ask(server, samples), ask(server, samples[1:])
        text = server.client.get("/metrics").text
        answer = server.client.post("/score", json={"image": "", "prompt": ""})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_configured")
    assert scores_of(response) == [digest_score(samples[0]), 0.0]
    assert scores_of(response, "odd")[1] is None
    assert (scores_of(alone), scores_of(alone, "odd")) == ([0.0], [None])
    in_process = scores_in_process(Digest(), samples)
    assert (in_process["digest"][1].item(), math.isnan(in_process["odd"][1].item())) == (0.0, True)
    assert 'retouch_items_total{outcome="scored",reward="digest"} 3.0' in text
    assert 'retouch_requests_total{page="/v1/score",status="200"} 2.0' in text
    assert "retouch_batch_items_bucket" in text


def test_several_rewards_score_under_their_names_and_one_can_be_selected():
    with live(host(Digest()), "a=share:red", "b=share:blue") as server:
        body, kind = body_of(samples_of(2))

        def select(name):
            return server.client.post(
                "/v1/score", content=body.replace(b'{"tasks"', b'{"rewards": %s, "tasks"' % name), headers=kind
            )

        assert set(select(b"null").json()["items"][0]["scores"]) == {"digest", "odd", "a/share", "b/share"}
        one = select(b'["b"]').json()
        assert set(one["items"][0]["scores"]) == {"b/share"}
        assert set(one["judges"]) == {"b"}
        none = select(b'["c"]')
        assert (none.status_code, none.json()["error"]["code"]) == (422, "bad_batch")


def test_single_score_page_returns_three_scores_or_an_error_code(digest):
    image = base64.b64encode(encoded(picture(0))).decode()
    good = digest.client.post("/score", json={"image": image, "prompt": "make it red", "source_image": image})
    vlm = good.json()["vlm_score"]
    assert good.status_code == 200
    assert good.json() == {"vlm_score": vlm, "ocr_confidence": 1.0, "combined_score": 0.5 * vlm + 2.0}
    for changes, status, code in (
        ({"image": image[:40]}, 422, "bad_picture"),
        ({"text": "raise"}, 500, "reward_failed"),
        ({"text": "unknown"}, 500, None),
    ):
        bad = digest.client.post("/score", json={"image": image, "prompt": "x", **changes})
        assert bad.status_code == status
        assert code in (None, bad.json()["error"]["code"])


def test_info_reports_columns_and_limits_and_openapi_the_paths_and_body_forms(digest):
    info = digest.client.get("/v1/info").json()
    assert info["rewards"][0]["columns"]["odd"] == {"low": 0.0, "high": 1.0, "diagnostic": True, "higher_is_better": True}
    assert info["limits"]["max_items"] == LIMITS.max_items
    document = digest.client.get("/openapi.json").json()
    assert {"/v1/score", "/v1/info", "/score", "/livez", "/readyz", "/metrics"} <= set(document["paths"])
    forms = document["paths"]["/v1/score"]["post"]["requestBody"]["content"]
    assert set(forms) == {"multipart/form-data", "application/msgpack", "application/json"}


def test_fault_6_the_text_for_ocr_is_the_quoted_text_of_the_prompt(monkeypatch):
    """Clients of the single-score page send a prompt without the text, and newer ones also a mask and a time step."""
    monkeypatch.setattr("retouch_rewards.ocr.RapidReader", lambda *given, **options: lambda image: [TextLine("AZIR", 1.0)])
    image, mask = (base64.b64encode(encoded(Image.new(mode, (32, 16), 255))).decode() for mode in ("RGB", "L"))
    columns = SingleScore(vlm="red/share", ocr="ocr/correctness", ocr_weight=1.0)
    with live("ocr", "red=share:red", single_score=columns) as server:

        def ask(**form):
            return server.client.post("/score", json={"image": image, **form}, timeout=120)

        for prompt in ("The text is 'AZIR'.", 'a sign that says "AZIR", please', "don't forget the word “AZIR”"):
            assert ask(prompt=prompt).json()["ocr_confidence"] == 1.0
            assert ask(prompt=prompt, mask=mask, timestep=999.0).json()["ocr_confidence"] == 1.0
        assert ask(prompt="The text is 'OTHER'.").json()["ocr_confidence"] < 0.5
        without = ask(prompt="a sign that doesn't say anything, don't you think")
        assert (without.status_code, without.json()["error"]["code"]) == (422, "no_text")
        twice = ask(prompt="The text is 'AZIR'.", mask=mask, mask_image=mask)
        assert (twice.status_code, twice.json()["error"]["code"]) == (422, "bad_batch")


def test_without_its_token_only_the_health_pages_answer():
    with live("share:red", token=TOKEN) as server:
        pages = {route.path for route in server.server.config.app._app.routes if isinstance(route, Route)}
        assert len(pages) >= 8
        for page in pages:
            for headers in ({}, {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": f"Basic {TOKEN}"}, {"Authorization": "ü"}):
                raw = {name: value.encode("latin-1") for name, value in headers.items()}
                for method in ("GET", "POST"):
                    status = server.client.request(method, page, headers=raw).status_code
                    assert (status == 401) is (page not in ("/livez", "/readyz")), page
        assert server.client.get("/v1/info", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_valid_request_id_is_kept_and_an_invalid_or_missing_one_is_replaced(digest):
    if isinstance(digest, RayServer):
        pytest.skip("Ray's proxy has ids of its own")
    given = digest.client.get("/livez", headers={"X-Request-Id": "run-7"})
    assert given.headers["x-request-id"] == "run-7"
    made = [digest.client.get("/livez", headers=headers).headers["x-request-id"] for headers in ({}, {"X-Request-Id": "a b"}) * 2]
    assert "a b" not in made
    assert len(set(made)) == 4


def test_internal_error_returns_only_the_request_id_and_logs_the_cause(caplog):
    with live("share:red") as server:
        server.service.info = lambda: {}["secret-of-the-server"]
        answer = httpx.get(f"{server.url}/v1/info", headers={"X-Request-Id": "run-8"})  # a connection that is then closed
        assert server.client.get("/livez").status_code == 200
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal"
    assert "secret-of-the-server" not in answer.text
    assert answer.headers["x-request-id"] == "run-8"
    assert "request run-8 to /v1/info failed: KeyError" in caplog.text


class WaitsForEvent(Digest):
    """Judges once ``go`` is set."""

    def __init__(self):
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self, samples):
        self.begun.set()
        assert self.go.wait(timeout=120)
        return super().__call__(samples)


def test_requests_of_many_callers_share_batches():
    reward = WaitsForEvent()
    with live(host(reward), limits=Limits(window=0.0, max_batch=16)) as server, ThreadPoolExecutor(12) as callers:
        groups = [samples_of(4, instruction=f"caller {k}") for k in range(12)]
        asked = [callers.submit(ask, server, samples) for samples in groups]
        while sum(batcher.load for batcher in server.service._batchers.values()) < 48:  # waiting or being judged
            time.sleep(0.01)
        reward.go.set()
        for samples, response in zip(groups, asked, strict=True):
            assert scores_of(response.result()) == [digest_score(sample) for sample in samples]
    assert sum(reward.sizes) == 48
    assert max(reward.sizes) == 16
    assert len(reward.sizes) <= 4


def test_batcher_waits_for_arriving_requests_and_recently_answered_callers():
    coming = 1
    reward = Digest()

    async def judge():
        nonlocal coming
        batcher = Batcher(host(reward), Limits(window=0.0), Metrics(), arriving=lambda: coming)
        batcher._max_wait = 120.0
        working = asyncio.create_task(batcher.run())

        def ask(count):
            return batcher.submit(samples_of(count), expires=time.monotonic() + 120)

        first = ask(3)
        await asyncio.sleep(0.01)
        second = ask(2)
        coming = 0
        await asyncio.gather(first, second)
        batcher._max_wait = 120.0
        third = ask(1)
        await asyncio.sleep(0.01)
        fourth = ask(4)
        await asyncio.gather(third, fourth)
        working.cancel()
        batcher.close()
        return reward.sizes

    assert asyncio.run(judge()) == [5, 5]


def test_a_full_queue_returns_429_and_an_expired_deadline_504():
    reward = WaitsForEvent()
    with live(host(reward), limits=Limits(window=0.0, max_batch=4, max_queue=4)) as server, ThreadPoolExecutor(1) as other:
        first = other.submit(ask, server, samples_of(4))
        assert reward.begun.wait(timeout=120)
        full = ask(server, samples_of(1))
        assert (full.status_code, full.json()["error"]["code"]) == (429, "busy")
        assert int(full.headers["retry-after"]) >= 1
        assert server.client.get("/readyz").status_code == 503
        assert server.client.get("/livez").status_code == 200
        reward.go.set()
        assert None not in scores_of(first.result())
        assert server.client.get("/readyz").status_code == 200
    reward = WaitsForEvent()
    with live(host(reward), limits=Limits(window=0.0, max_batch=4)) as server, ThreadPoolExecutor(1) as other:
        first = other.submit(ask, server, samples_of(4))
        assert reward.begun.wait(timeout=120)
        late = ask(server, samples_of(3), **{"X-Deadline-Seconds": "0.05"})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline")
        reward.go.set()
        first.result()
        ask(server, samples_of(2))
    assert reward.sizes == [4, 2]  # the samples of the late request are not scored


def test_draining_server_completes_requests_in_flight_and_rejects_new_ones():
    reward = WaitsForEvent()
    with live(host(reward)) as server, ThreadPoolExecutor(32) as callers:
        waiting = [callers.submit(ask, server, samples_of(1)) for _ in range(32)]
        assert reward.begun.wait(timeout=120)
        while server.service._requests < 32:
            time.sleep(0.01)
        server.service.draining = True
        refused = ask(server, samples_of(1))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert server.client.get("/readyz").status_code == 503
        server.server.should_exit = True
        reward.go.set()
        assert [len(scores_of(future.result())) for future in waiting] == [1] * 32


@pytest.fixture
def write_reward(tmp_path, monkeypatch):
    """Writes the module ``user_reward``, whose function and class return the given score."""
    source = """
from retouch.types import Column
def constant(images): return [VALUE] * len(images)
class Constant:
    columns = {"own": Column(0.0, HIGH)}
    def __call__(self, samples): return [VALUE] * len(samples)
"""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "user_reward.py"
    yield lambda value, high="1.0": file.write_text(source.replace("VALUE", value).replace("HIGH", high))
    sys.modules.pop("user_reward", None)


def test_a_reload_takes_the_new_code_and_keeps_the_old_reward_if_it_fails_or_its_columns_change(write_reward):
    write_reward("0.25")
    specs = parse_specs(["user_reward:Constant"])
    with live("user_reward:Constant") as server:

        def reloaded():
            asyncio.run(server.service.reload(specs))
            return scores_of(ask(server, samples_of(1)), "own"), server.service.hosted[0].fingerprint

        assert scores_of(ask(server, samples_of(1)), "own") == [0.25]
        old = server.service.hosted[0].fingerprint
        write_reward("0.75")
        scores, new = reloaded()
        assert (scores, new == old) == ([0.75], False)
        write_reward("no number")
        assert reloaded() == ([0.75], new)
        write_reward("0.5", "2.0")
        assert reloaded() == ([0.75], new)


@pytest.mark.parametrize(
    "word", ["user_reward:constant", '{"kind": "several", "rewards": {"own": {"kind": "import", "class": "user_reward:Constant"}}}']
)
def test_a_reload_takes_the_new_code_of_functions_and_of_rewards_inside_a_reward(word, write_reward):
    write_reward("0.25")
    (spec,) = parse_specs([word])
    old = build(spec, sole=True)
    write_reward("0.75")
    new = rebuild(spec, old)
    (scores,) = scores_in_process(new.reward, samples_of(2)).values()
    assert scores.tolist() == [0.75, 0.75]
    assert new.fingerprint != old.fingerprint


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plaground"], "plaground"),
        (["photos:mauve"], "give a colour"),
        (["share:ultraviolet"], "channel"),
        (["share:red", "share:blue"], "two rewards have the name share"),
        (['{"kind": "photos"'], "not JSON"),
        (['{"kind": "photos", "coluor": [1, 2, 3]}'], "coluor|colour"),
        (["a b=share:red"], "'a b' cannot be a reward's name"),
        (["nothing.jsonnet"], "no such file"),
        ({"max_pixels": 0}, "max_pixels 0"),
        ({"max_batch": 64, "max_queue": 32}, "no batch would ever be full"),
        ({"max_memory_bytes": 2**20}, "less than one request may take"),
    ],
)
def test_invalid_reward_specs_and_limits_raise(words, says):
    with pytest.raises(ValueError, match=says):
        Limits(**words) if isinstance(words, dict) else parse_specs(words)


def test_rewards_that_compare_the_images_of_a_task_are_not_served():
    votes = {"kind": "votes", "queue": "nowhere"}
    for section in (votes, {"kind": "several", "rewards": {"people": votes, "red": {"kind": "photos", "colour": [255, 0, 0]}}}):
        (spec,) = parse_specs([json.dumps(section)])
        with pytest.raises(ValueError, match="compares the images of a task, but a server scores batches that split groups"):
            build(spec, sole=True)
        with pytest.raises(ValueError, match="put this reward into the recipe of the run instead"):
            retouch.serve(json.dumps(section), port=0)
    calibration = Calibration("preference", (0.0,), (0.5,), (0.1,), (0.4,), (0.6,), votes=10, tasks=10)
    assert CalibratedScores(retouch.rewards.Votes(queue="nowhere"), "preference", calibration).compares_groups


def test_fingerprint_depends_on_arguments_and_class_and_is_reproducible():
    red, red_again, blue = (
        build(spec, sole=True).fingerprint for spec in parse_specs(["a=photos:red", "b=photos:#ff0000", "c=photos:blue"])
    )
    assert red == red_again != blue
    assert fingerprint({}, Digest()) != fingerprint({}, FailsOnText())
