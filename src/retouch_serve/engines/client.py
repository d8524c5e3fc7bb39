"""HTTP requests to the server of an engine: temporary faults are retried for some time, permanent faults are raised at once."""

import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import httpx
import torch

from retouch.config import keys
from retouch.core.random import generator
from retouch.policies.engine import EngineFault

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_TRIES_OF_500 = 3
_MAX_BYTES = 64 * 2**20
_MAX_MESSAGE = 300
T = TypeVar("T")
log = logging.getLogger("retouch")


@dataclass(eq=False)
class RequestRefused(Exception):
    """The server refused the request; a retry would be refused too."""

    status: int
    text: str

    def __str__(self) -> str:
        return f"HTTP {self.status}: {self.text}"


class _Temporary(Exception):
    """The server is unreachable, busy or slow, or the connection broke; a retry may succeed."""


class _ServerError(_Temporary):
    """HTTP 500 from a server whose engine is alive. It is retried only a few times, because most such errors are permanent."""


class Client:
    """Connections to the server at ``url``; a context manager that several threads may use.

    ``timeout``: the longest time without any data, in seconds. ``patience``: seconds over which a temporary fault is retried, with
    jittered pauses that double. HTTP 500 is tried three times, or for ``patience`` if the server's engine is dead, because the
    server may then be restarted. ``kind``: the server's name in messages. ``key``: the environment variable with the server's key;
    no key is sent if it is not set. Raises ValueError if the key is not bound to this address (``retouch.config.keys``).
    ``max_bytes``: the largest size of a response.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float,
        patience: float,
        kind: str = "vLLM",
        key: str | None = keys.VLLM_KEY,
        max_bytes: int = _MAX_BYTES,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.patience = patience
        self.kind = kind
        self._max_bytes = max_bytes
        self._sleep = sleep
        self._clock = clock
        secret = "" if key is None else os.environ.get(key, "").strip()
        if key is not None and secret:
            keys.require_bound(key, self.url)
        self._http = httpx.Client(
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {secret}"} if secret else {}),
            timeout=httpx.Timeout(timeout, connect=min(timeout, 10.0)),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
            follow_redirects=False,
        )

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def server(self) -> str:
        """The name of the server in messages."""
        return f"the {self.kind} server at {self.url}"

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def post(self, path: str, document: dict[str, Any], *, tries_of_500: int = _TRIES_OF_500) -> bytes:
        """Return the body of the response. Raises RequestRefused, or EngineFault after ``patience``.

        ``tries_of_500``: after this number of HTTP 500 answers, RequestRefused is raised.
        """
        return self._retry(path, lambda: self._once("POST", path, document), tries_of_500)

    def get(self, path: str) -> bytes:
        """Like ``post``, but a GET request."""
        return self._retry(path, lambda: self._once("GET", path, None), _TRIES_OF_500)

    def _retry(self, path: str, exchange: Callable[[], T], tries_of_500: int) -> T:
        began, tries, errors = self._clock(), 0, 0
        while True:
            try:
                return exchange()
            except _Temporary as fault:
                tries, errors = tries + 1, errors + isinstance(fault, _ServerError)
                if errors == tries_of_500:
                    raise RequestRefused(500, str(fault).removeprefix("HTTP 500: ")) from None
                left = began + self.patience - self._clock()
                if left <= 0:
                    raise EngineFault(
                        f"{self.server} did not answer {path} within {self.patience:g} s "
                        f"(rollout.engine.patience), tried {tries} times; the last time: {fault}"
                    ) from None
                if tries == 1:
                    until = f"at most {tries_of_500 - 1} times" if errors else f"for {self.patience:g} s"
                    log.warning("%s, %s: %s; trying again %s", self.server, path, fault, until)
            self._sleep(min(left, _pause(path, tries)))

    def _once(self, method: str, path: str, document: dict[str, Any] | None) -> bytes:
        try:
            with self._http.stream(method, self.url + path, json=document) as response:
                body = self._body(response)
        except httpx.TimeoutException:
            raise _Temporary("no answer in time") from None
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise _Temporary(type(error).__name__) from None
        if response.status_code == 200:
            return body
        if response.status_code == 500:
            raise (_ServerError if self._is_healthy() else _Temporary)(f"HTTP 500: {_message(body)}")
        if response.status_code in (408, 425, 429) or response.status_code > 500:
            raise _Temporary(f"HTTP {response.status_code}: {_message(body)}")
        raise RequestRefused(response.status_code, _message(body))

    def _is_healthy(self) -> bool:
        """Whether the server's engine is alive; if it is dead, vLLM and SGLang answer with HTTP 503."""
        # A new connection: a server may close the old one after an error, which would look as if the engine were dead.
        try:
            with httpx.Client(headers=self._http.headers, timeout=self._http.timeout, trust_env=False) as http:
                return http.get(f"{self.url}/health").status_code != 503
        except (httpx.HTTPError, httpx.StreamError):
            return False

    def _body(self, response: httpx.Response) -> bytes:
        parts, size = [], 0
        for part in response.iter_raw():
            parts.append(part)
            size += len(part)
            if size > self._max_bytes:
                raise _Temporary(f"an answer of more than {self._max_bytes} bytes")
        return b"".join(parts)


def _message(body: bytes) -> str:
    """The error message of a response, truncated."""
    text = body.decode("utf-8", "replace")
    with suppress(ValueError, KeyError, TypeError):
        text = json.loads(text)["error"]["message"]
    return " ".join(str(text).split())[:_MAX_MESSAGE]


def _pause(path: str, tries: int) -> float:
    """Seconds before the next try: a random share, from half to all, of a time that doubles."""
    draw = torch.rand((), generator=generator("engine", "pause", path, os.getpid(), tries)).item()
    return (0.5 + 0.5 * draw) * min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(tries - 1, 16))
