"""One HTTP exchange with a reward server: everything that can go wrong with it is a ``Fault``."""

import asyncio
import math
import ssl
from functools import cache

import httpx

from retouch.rewards.client.faults import Fault, of_status

MAX_REPLY_BYTES = 16 * 2**20
_CONNECT_SECONDS = 5.0


class Transport:
    """Kept-alive connections to all endpoints. Made and used on one event loop."""

    def __init__(self, *, token: str | None, connections: int) -> None:
        headers = {"Accept-Encoding": "identity", "Accept": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        # No proxies from the environment: a judge stands at the address that was named.
        self._client = httpx.AsyncClient(
            headers=headers,
            verify=_certificates(),
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=connections, keepalive_expiry=4.0),
            trust_env=False,
            follow_redirects=False,
        )

    async def post(self, url: str, body: bytes, content_type: str, *, seconds: float) -> bytes:
        """The reply's body within ``seconds``, of which the server is told."""
        headers = {"Content-Type": content_type, "X-Deadline-Seconds": f"{seconds:.3f}"}
        return await self._exchange(self._client.build_request("POST", url, content=body, headers=headers), seconds)

    async def get(self, url: str, *, seconds: float) -> bytes:
        """A page's body within ``seconds``."""
        return await self._exchange(self._client.build_request("GET", url), seconds)

    async def close(self) -> None:
        """End the connections."""
        await self._client.aclose()

    async def _exchange(self, request: httpx.Request, seconds: float) -> bytes:
        try:
            async with asyncio.timeout(seconds):
                response = await self._client.send(request, stream=True)
                try:
                    return await _read(response)
                finally:
                    await response.aclose()
        except TimeoutError:
            raise Fault("timeout") from None
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise Fault("unreachable", tried=False) from None
        except (httpx.HTTPError, httpx.StreamError):
            raise Fault("broken") from None


@cache
def _certificates() -> ssl.SSLContext:
    """Read once for all clients: it takes longer than a request does."""
    return httpx.create_ssl_context(trust_env=False)


async def _read(response: httpx.Response) -> bytes:
    if response.status_code != 200:
        raise of_status(response.status_code, _seconds(response.headers.get("retry-after")))
    if response.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Fault("wrong_type")
    if response.headers.get("content-encoding", "identity") != "identity":
        raise Fault("wrong_type")
    parts, size = [], 0
    async for part in response.aiter_raw():
        size += len(part)
        if size > MAX_REPLY_BYTES:
            raise Fault("too_large")
        parts.append(part)
    return b"".join(parts)


def _seconds(text: str | None) -> float:
    """Of a Retry-After header; 0 where it gives none."""
    try:
        seconds = float(text or 0)
    except ValueError:
        return 0.0
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0
