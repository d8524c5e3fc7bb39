"""Reward servers with false but well-formed HTTP answers: descriptions are rejected at the start, replies as a whole."""

import json
import tracemalloc
from contextlib import closing

import pytest
import torch

from bad_server import bad_server
from faulty_server import WRONG_INFOS, WRONG_REPLIES
from live_server import remote, samples_of
from retouch.types import Column
from retouch_serve.remote import RemoteReward
from retouch_serve.wire import ExpectedReply, InvalidReply, read_reply
from served_rewards import digest_score

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


@pytest.mark.parametrize("lie", WRONG_INFOS)
def test_an_invalid_server_description_raises_before_any_request(lie: str) -> None:
    with bad_server("none", info=WRONG_INFOS[lie]) as server:
        with pytest.raises(ValueError, match="is not a reward server of Retouch"):
            remote([server.url])
        assert server.request_count == 0


@pytest.mark.parametrize("lie", WRONG_REPLIES)
def test_an_invalid_reply_is_rejected_as_a_whole(server, lie: str) -> None:
    samples = samples_of(4)
    server.lies["now"] = WRONG_REPLIES[lie]
    with closing(remote([server.url], batch=4, attempts=1, timeout=20.0)) as reward:
        missing = reward(samples)["digest"]
        server.lies["now"] = "none"
        after = reward(samples)["digest"]
    assert missing.isnan().all()
    assert torch.equal(after, torch.tensor([digest_score(sample) for sample in samples]))


def test_a_reply_with_too_many_values_is_rejected_with_little_memory() -> None:
    body = b'{"judges": {"digest": ["fingerprint-digest"]}, "items": [' + b"[]," * 5_000_000 + b"[]]}"
    tracemalloc.start()
    try:
        with pytest.raises(InvalidReply, match="too_many_values"):
            read_reply(body, ["0"], EXPECTED)
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("low", "high"), [("0", "1e309"), ("-1e308", "1"), ("0", "1e10")])
def test_declared_columns_with_an_infinite_or_huge_range_raise(low: str, high: str) -> None:
    columns = {"digest": (json.loads(low), json.loads(high))}
    with pytest.raises(ValueError, match=r"1000000000|finite"):
        RemoteReward(endpoints=("http://127.0.0.1:1",), columns=columns)
