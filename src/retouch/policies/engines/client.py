"""HTTP with a vLLM server: what passes is tried again until patience ends, what stays is said at once."""

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import httpx
import torch

from retouch.core.random import generator
from retouch.policies.autoregressive.mismatch import EngineFault

KEY = "VLLM_API_KEY"
"""The server's own variable for the key that it asks for."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_TRIES_OF_500 = 3
_MOST_BYTES = 64 * 2**20
_TOLD = 300
T = TypeVar("T")
log = logging.getLogger("retouch")


@dataclass(eq=False)
class Refused(Exception):
    """The server will not: an answer that stays the same however often it is asked."""

    status: int
    text: str

    def __str__(self) -> str:
        return f"HTTP {self.status}: {self.text}"


class _Passing(Exception):
    """Away, busy, slow or cut off: worth another try."""


class _Broken(_Passing):
    """HTTP 500: worth a few more tries, since some of them stay."""


class Client:
    """Connections to the server at ``url``; a context, usable from several threads.

    ``seconds``: the longest silence in an exchange. ``patience``: seconds over which a fault that may pass is tried again, with
    jittered pauses that double; HTTP 500 is tried three times. The key comes from ``VLLM_API_KEY`` alone, where it is set.
    """

    def __init__(
        self,
        url: str,
        *,
        seconds: float,
        patience: float,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.patience = patience
        self._sleep = sleep
        self._clock = clock
        key = os.environ.get(KEY, "").strip()
        self._http = httpx.Client(
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {}),
            timeout=httpx.Timeout(seconds, connect=min(seconds, 10.0)),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
            follow_redirects=False,
        )

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the connections."""
        self._http.close()

    def post(self, path: str, document: dict[str, Any]) -> bytes:
        """The answer's body. Refused; EngineFault where patience ended."""
        return self._insist(path, lambda: self._once("POST", path, document))

    def get(self, path: str) -> bytes:
        """A page's body, as ``post``."""
        return self._insist(path, lambda: self._once("GET", path, None))

    def _insist(self, path: str, exchange: Callable[[], T]) -> T:
        began, tries, broken = self._clock(), 0, 0
        while True:
            try:
                return exchange()
            except _Passing as fault:
                tries, broken = tries + 1, broken + isinstance(fault, _Broken)
                if broken == _TRIES_OF_500:
                    raise Refused(500, str(fault)) from None
                left = began + self.patience - self._clock()
                if left <= 0:
                    raise EngineFault(
                        f"the vLLM server at {self.url} did not answer {path} within {self.patience:g} s "
                        f"(rollout.engine.patience), tried {tries} times; the last time: {fault}"
                    ) from None
                if tries == 1:
                    log.warning("the vLLM server at %s, %s: %s; trying again for %g s", self.url, path, fault, self.patience)
            self._sleep(min(left, _pause(path, tries)))

    def _once(self, method: str, path: str, document: dict[str, Any] | None) -> bytes:
        try:
            with self._http.stream(method, self.url + path, json=document) as response:
                body = _body(response)
        except httpx.TimeoutException:
            raise _Passing("no answer in time") from None
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise _Passing(type(error).__name__) from None
        if response.status_code == 200:
            return body
        if response.status_code == 500:
            raise _Broken(_said(body))
        if response.status_code in (408, 425, 429) or response.status_code > 500:
            raise _Passing(f"HTTP {response.status_code}: {_said(body)}")
        raise Refused(response.status_code, _said(body))


def _body(response: httpx.Response) -> bytes:
    parts, size = [], 0
    for part in response.iter_raw():
        parts.append(part)
        size += len(part)
        if size > _MOST_BYTES:
            raise _Passing(f"an answer of more than {_MOST_BYTES} bytes")
    return b"".join(parts)


def _said(body: bytes) -> str:
    """The message of an error, as the server words it, cut short."""
    text = body.decode("utf-8", "replace")
    try:
        said = json.loads(text)
        text = said["error"]["message"]
    except (ValueError, KeyError, TypeError):
        pass
    return " ".join(str(text).split())[:_TOLD]


def _pause(path: str, tries: int) -> float:
    """Between half and all of what doubles each time."""
    draw = torch.rand((), generator=generator("engine", "pause", path, os.getpid(), tries)).item()
    return (0.5 + 0.5 * draw) * min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(tries - 1, 16))
