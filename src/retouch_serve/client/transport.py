"""One HTTP exchange with a reward server. Each failure is raised as a ``RequestFault``."""

import asyncio
import math
import ssl
from dataclasses import dataclass, field
from functools import cache

import httpx

MAX_REPLY_BYTES = 16 * 2**20
MAX_INFO_BYTES = 2**20
_CONNECT_SECONDS = 5.0
_FINAL_STATUSES = frozenset({400, 401, 403, 404, 405, 411, 413, 414, 415, 421, 422, 431})


@dataclass(slots=True, eq=False)
class RequestFault(Exception):
    """The reason why a request returned no scores.

    ``kind``: a short code. ``final``: a retry cannot help. ``tried``: the server may have worked on the request, so it counts as an
    attempt. ``blames_server``: the server is excluded until it is ready, unless it is the last one. ``retry_after``: seconds to
    wait, as the server asked. ``slow``: the request used up its whole time limit, so even the last server is excluded.
    """

    kind: str
    final: bool = False
    tried: bool = True
    blames_server: bool = True
    retry_after: float = 0.0
    slow: bool = field(init=False)

    def __post_init__(self) -> None:
        self.slow = self.kind in ("timeout", "deadline")
        Exception.__init__(self, self.kind)


def fault_of_status(status: int, retry_after: float) -> RequestFault:
    """The fault of a reply with a status other than 200."""
    if status == 429:
        return RequestFault("busy", tried=False, blames_server=False, retry_after=max(retry_after, 0.05))
    if status == 503:
        return RequestFault("unavailable", tried=False, retry_after=retry_after)
    if status == 504:
        return RequestFault("deadline", blames_server=False)
    return RequestFault(f"http_{status}", final=status in _FINAL_STATUSES)


class Transport:
    """Keep-alive connections to all servers, created and used on one event loop. ``connections``: how many are kept open at
    most."""

    def __init__(self, *, token: str | None, connections: int) -> None:
        headers = {"Accept-Encoding": "identity", "Accept": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        # Proxies in the environment are ignored: requests go to the address in the recipe.
        self._client = httpx.AsyncClient(
            headers=headers,
            verify=_certificates(),
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=connections, keepalive_expiry=4.0),
            trust_env=False,
            follow_redirects=False,
        )

    async def post(self, url: str, body: bytes, content_type: str, *, seconds: float) -> bytes:
        """The body of the reply. ``seconds``: the time limit, which is also sent to the server. Raises RequestFault if there is no
        valid reply."""
        headers = {"Content-Type": content_type, "X-Deadline-Seconds": f"{seconds:.3f}"}
        request = self._client.build_request("POST", url, content=body, headers=headers)
        return await self._exchange(request, seconds, most=MAX_REPLY_BYTES)

    async def get(self, url: str, *, seconds: float) -> bytes:
        """The body of the reply. ``seconds``: the time limit. Raises RequestFault if there is no valid reply."""
        return await self._exchange(self._client.build_request("GET", url), seconds, most=MAX_INFO_BYTES)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _exchange(self, request: httpx.Request, seconds: float, *, most: int) -> bytes:
        try:
            async with asyncio.timeout(seconds):
                response = await self._client.send(request, stream=True)
                try:
                    return await _read(response, most)
                finally:
                    await response.aclose()
        except TimeoutError:
            raise RequestFault("timeout") from None
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise RequestFault("unreachable", tried=False) from None
        except (httpx.HTTPError, httpx.StreamError):
            raise RequestFault("broken") from None


@cache
def _certificates() -> ssl.SSLContext:
    """The certificates, loaded once for all clients, because loading them takes longer than a request."""
    return httpx.create_ssl_context(trust_env=False)


async def _read(response: httpx.Response, most: int) -> bytes:
    """The body, at most ``most`` bytes. A compressed body is refused, so nothing is ever decompressed."""
    if response.status_code != 200:
        raise fault_of_status(response.status_code, _seconds(response.headers.get("retry-after")))
    if response.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestFault("wrong_type")
    if response.headers.get("content-encoding", "identity") != "identity":
        raise RequestFault("wrong_type")
    parts, size = [], 0
    async for part in response.aiter_raw():
        size += len(part)
        if size > most:
            raise RequestFault("too_large")
        parts.append(part)
    return b"".join(parts)


def _seconds(text: str | None) -> float:
    """The seconds of a Retry-After header, 0 if it has none."""
    try:
        seconds = float(text or 0)
    except ValueError:
        return 0.0
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0
