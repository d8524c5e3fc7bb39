"""What engines of all servers share: requests that are retried, the rows of a batch as requests, and publishing weights."""

import hashlib
import json
import logging
import os
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import torch
from torch import Tensor

from retouch.config import keys
from retouch.core.random import backoff_pause
from retouch.policies.engine import EngineFault
from retouch.records.files import strict_json
from retouch.types import Batch
from retouch_serve.http import client_options

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


class InvalidResponse(Exception):
    """A response with a fault, which the message describes."""


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
        self.server = f"the {kind} server at {self.url}"
        self._max_bytes = max_bytes
        self._sleep = sleep
        self._clock = clock
        secret = "" if key is None else os.environ.get(key, "").strip()
        if key is not None and secret:
            keys.require_bound(key, self.url)
        self._options = client_options(secret, timeout=httpx.Timeout(timeout, connect=min(timeout, 10.0)))
        self._http = httpx.Client(**self._options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def get(self, path: str) -> bytes:
        """Like ``post``, but a GET request."""
        return self._request(path, None, _TRIES_OF_500)

    def post(self, path: str, document: dict[str, Any], *, tries_of_500: int = _TRIES_OF_500) -> bytes:
        """Return the body of the response. Raises RequestRefused, or EngineFault after ``patience``. ``tries_of_500``: after this
        number of HTTP 500 answers, RequestRefused is raised."""
        return self._request(path, document, tries_of_500)

    def refusal(self, path: str, document: dict[str, Any] | None = None, *, tries_of_500: int = _TRIES_OF_500) -> int | None:
        """The status with which the server refuses a request; None if it accepts it. Raises RequestRefused if it wants a key."""
        try:
            self._request(path, document, tries_of_500)
        except RequestRefused as refused:
            if refused.status == 401:
                raise
            return refused.status
        return None

    def _request(self, path: str, document: dict[str, Any] | None, tries_of_500: int) -> bytes:
        began, tries, errors = self._clock(), 0, 0
        while True:
            try:
                return self._once(path, document)
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
            pause = backoff_pause(
                "engine", "pause", path, os.getpid(), attempt=tries - 1, base=_FIRST_PAUSE, longest=_LONGEST_PAUSE
            )
            self._sleep(min(left, pause))

    def _once(self, path: str, document: dict[str, Any] | None) -> bytes:
        parts, size = [], 0
        try:
            with self._http.stream("GET" if document is None else "POST", self.url + path, json=document) as response:
                for part in response.iter_raw():
                    parts.append(part)
                    size += len(part)
                    if size > self._max_bytes:
                        raise _Temporary(f"an answer of more than {self._max_bytes} bytes")
        except httpx.TimeoutException:
            raise _Temporary("no answer in time") from None
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise _Temporary(type(error).__name__) from None
        body, status = b"".join(parts), response.status_code
        if status == 200:
            return body
        text = body.decode("utf-8", "replace")
        with suppress(ValueError, KeyError, TypeError):
            text = json.loads(text)["error"]["message"]
        text = " ".join(str(text).split())[:_MAX_MESSAGE]
        if status == 500:
            raise (_ServerError if self._is_healthy() else _Temporary)(f"HTTP 500: {text}")
        if status in (408, 425, 429) or status > 500:
            raise _Temporary(f"HTTP {status}: {text}")
        raise RequestRefused(status, text)

    def _is_healthy(self) -> bool:
        # A new connection: a server may close the old one after an error, which would look as if the engine were dead.
        try:
            with httpx.Client(**self._options) as http:
                return http.get(f"{self.url}/health").status_code != 503
        except (httpx.HTTPError, httpx.StreamError):
            return False


def json_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a response; an empty one if the body is anything else."""
    with suppress(ValueError):
        document = strict_json(body)
        if isinstance(document, dict):
            return document
    return {}


def on_all_ranks(work: Callable[[], T], any_rank: Callable[[bool], bool], *, otherwise: str) -> T:
    """The result of ``work``. All ranks must call this. Raises EngineFault on all ranks if ``work`` raised it on any rank.
    ``any_rank``: tells whether a flag is true on at least one rank. ``otherwise``: the message on ranks that had no fault."""
    fault: EngineFault | None = None
    try:
        result = work()
    except EngineFault as found:
        fault = found
    if any_rank(fault is not None):
        raise fault or EngineFault(otherwise)
    return result


@dataclass(frozen=True, slots=True)
class TaskRows:
    """``count`` consecutive rows of the batch, which belong to task number ``task`` and have the slots from ``slot`` on."""

    task: int
    slot: int
    count: int


def consecutive_rows(batch: Batch, *, most: int | None = None) -> list[TaskRows]:
    """The rows of the batch, split where the task changes, where slots are not consecutive, and after ``most`` rows."""
    found: list[TaskRows] = []
    for task, slot in zip(batch.group, batch.slot, strict=True):
        last = found[-1] if found else None
        if last is not None and task == last.task and slot == last.slot + last.count and last.count != most:
            found[-1] = replace(last, count=last.count + 1)
        else:
            found.append(TaskRows(task, slot, count=1))
    return found


def group_seed(batch: Batch, group: int, engine: str) -> int:
    """The seed of slot 0 of a group; slot k adds k. It has 62 bits, because servers accept non-negative seeds below 2**63."""
    key = hashlib.sha256(repr((batch.seed, engine, batch.step, group)).encode()).digest()
    return int.from_bytes(key[:8], "big") >> 2


def concurrently(ask: Callable[[TaskRows], Sequence[T]], requests: Sequence[TaskRows], *, most: int) -> list[T]:
    """The results of ``ask`` in the order of the requests, with at most ``most`` at a time. An error cancels the other requests."""
    with ThreadPoolExecutor(most) as pool:
        futures = [pool.submit(ask, rows) for rows in requests]
        try:
            return [one for future in futures for one in future.result()]
        finally:
            pool.shutdown(cancel_futures=True)


class WeightPublisher(ABC):
    """Writes the weights to a folder that the server reads too, and loads them into the server whenever they have changed.

    ``weights``: the trained parameters, by name. ``save``: writes them to a folder. ``folder``: a folder that the server sees under
    the same path. ``prefix``: the beginning of the names; a digest of the weights follows it. ``first``: whether this rank writes
    and loads the weights; all ranks have the same weights. ``any_rank``: tells whether a flag is true on at least one rank.
    """

    def __init__(
        self,
        *,
        weights: Mapping[str, Tensor],
        save: Callable[[Path], None],
        folder: Path,
        prefix: str,
        first: bool = True,
        any_rank: Callable[[bool], bool] = bool,
    ) -> None:
        self.loaded: str | None = None  # the name of the weights that the server has from this publisher
        self._weights = weights
        self._save = save
        self._folder = folder
        self._prefix = prefix
        self._first = first
        self._any_rank = any_rank
        self._restoring = threading.Lock()

    def publish(self, client: Client) -> str:
        """Load the current weights if the server does not have them; returns their name. Raises EngineFault on all ranks."""
        digest = hashlib.sha256()
        for key, tensor in self._weights.items():
            digest.update(json.dumps([key, str(tensor.dtype), list(tensor.shape)]).encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        name = f"{self._prefix}-{digest.hexdigest()[:16]}"
        if name != self.loaded:
            otherwise = f"rank 0 could not load the weights into the {client.kind} server; its log says why"
            on_all_ranks(lambda: self._replace(client, name), self._any_rank, otherwise=otherwise)
            self.loaded = name
        return name

    def _replace(self, client: Client, name: str) -> None:
        if not self._first:
            return
        target = self._folder / name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        self._save(target)
        self.load(client, name)
        if self.loaded is not None:
            self.unload(client, self.loaded)
            shutil.rmtree(self._folder / self.loaded, ignore_errors=True)

    def restore(self, client: Client) -> None:
        """Load the weights of the last ``publish`` again, into a server that was restarted. Raises EngineFault if this fails."""
        assert self.loaded is not None
        with self._restoring:
            self.load(client, self.loaded)

    def close(self, client: Client) -> None:
        """Remove the run's weights from the server and the folder. If the server cannot be reached, this is only logged."""
        if self.loaded is None or not self._first:
            return
        name, self.loaded = self.loaded, None
        try:
            self.unload(client, name)
        except EngineFault as fault:
            log.warning("%s may still have %s: %s", client.server, name, fault)
        shutil.rmtree(self._folder / name, ignore_errors=True)

    @abstractmethod
    def load(self, client: Client, name: str) -> None:
        """Load weights from their folder, unless the server has them. Raises EngineFault if this fails."""

    @abstractmethod
    def unload(self, client: Client, name: str) -> None:
        """Remove unused weights, if the server keeps several. Raises EngineFault if the server cannot be reached."""


def release_weights(publisher: WeightPublisher, connect: Callable[[], Client], folder: Path | None) -> None:
    """Unload the run's weights from the server, and remove ``folder`` if it is given."""
    if publisher.loaded is not None:
        with connect() as client:
            publisher.close(client)
    if folder is not None:
        remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Remove the folder of the adapters, and the run's folder if it is then empty, which it is after ``retouch doctor``."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()
