"""A real reward server on the loopback interface, on a thread of the test process."""

import base64
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import httpx
import uvicorn

from pictures import picture
from retouch.types import Sample, Task
from retouch_serve.app import build_app
from retouch_serve.client import RemoteClient
from retouch_serve.front import bounded_config
from retouch_serve.hosted import HostedReward, build, parse_specs
from retouch_serve.remote import RemoteReward
from retouch_serve.requests import Limits, SingleScore
from retouch_serve.service import Service
from retouch_serve.wire import ImageEncoding, encode_body, pack

BodyForm = Literal["multipart", "msgpack", "json"]
LIMITS = Limits(window=0.001)


def remote(urls: Sequence[str], **settings: object) -> RemoteClient:
    """Make a client for the servers at these addresses."""
    made = RemoteReward(endpoints=tuple(urls), **settings).build()
    assert isinstance(made, RemoteClient)
    return made


@dataclass(frozen=True)
class LiveServer:
    """A running server. ``client`` reuses its connections; opening one for each request would take longer than the request."""

    url: str
    service: Service
    server: uvicorn.Server
    client: httpx.Client


@contextmanager
def live(
    *rewards: str | HostedReward,
    limits: Limits = LIMITS,
    token: str | None = None,
    single_score: SingleScore | None = None,
    port: int = 0,
) -> Iterator[LiveServer]:
    words = [each for each in rewards if isinstance(each, str)]
    specs = parse_specs(words)
    hosted = [
        *(build(spec, sole=len(rewards) == 1) for spec in specs),
        *(each for each in rewards if isinstance(each, HostedReward)),
    ]
    service = Service(hosted, limits)
    server = uvicorn.Server(bounded_config(build_app(service, token=token, single_score=single_score), limits, port=port))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
            yield LiveServer(url, service, server, client)
    finally:
        server.should_exit = True
        thread.join(timeout=120)
        assert not thread.is_alive()


def host(reward: object, name: str = "digest") -> HostedReward:
    """Wrap a reward as a server hosts it."""
    return HostedReward(name, reward, {column: column for column in reward.columns}, f"fingerprint-{name}")


def samples_of(count: int, *, group: int = 4, **task: object) -> list[Sample]:
    """Make samples in groups; the samples of a group share a task with a source image. Some tests need their number of bytes."""
    images = [picture(1000 + k, (24, 24)) for k in range(count)]
    tasks = [Task(id=f"task/{k}" + "x" * (k % 2), instruction="make it red", images=(images[k],)) for k in range(count)]
    return [Sample(replace(tasks[row // group], **task), picture(row, (24, 24))) for row in range(count)]


def encode(document: bytes, images: Sequence[bytes], form: BodyForm) -> tuple[bytes, str]:
    """Encode a batch document in any form that a server reads; Retouch's own client sends only multipart."""
    if form == "multipart":
        return encode_body(document, images)
    if form == "msgpack":
        binary = [b"\xc6" + len(data).to_bytes(4, "big") + data for data in (document, *images)]
        parts = [b"\x82\xa5batch", binary[0], b"\xa8pictures\xdc", len(images).to_bytes(2, "big"), *binary[1:]]
        return b"".join(parts), "application/msgpack"
    pictures = [base64.b64encode(data).decode() for data in images]
    return b'{"batch":%b,"pictures":%b}' % (document, json.dumps(pictures).encode()), "application/json"


def body_of(
    samples: Sequence[Sample], *, form: BodyForm = "multipart", encoding: ImageEncoding = "raw"
) -> tuple[bytes, dict[str, str]]:
    """Return the body and headers of a request; the ids are "0", "1", ..."""
    document, blobs = pack(samples, [str(row) for row in range(len(samples))], encoding=encoding)
    body, kind = encode(document, blobs, form)
    return body, {"Content-Type": kind}
