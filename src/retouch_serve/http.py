"""What all HTTP clients of servers share: they follow no redirect, use no proxy of the environment, and decompress nothing."""

import ssl
from functools import cache
from typing import Any

import httpx


def client_options(token: str | None, *, timeout: httpx.Timeout, connections: int = 20) -> dict[str, Any]:
    """The arguments of ``httpx.Client`` and ``httpx.AsyncClient``. ``connections``: how many are kept open at most."""
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {})
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=connections, keepalive_expiry=4.0)
    # Only the server in the recipe may answer: a redirect or a proxy would get the token and the images too.
    own = {"trust_env": False, "follow_redirects": False, "verify": _certificates()}
    return {"headers": headers, "timeout": timeout, "limits": limits, **own}


@cache
def _certificates() -> ssl.SSLContext:
    """The certificates, loaded once for all clients, because loading them takes longer than a request."""
    return httpx.create_ssl_context(trust_env=False)


def status(url: str, *, seconds: float) -> int | None:
    """The status of the reply to GET ``url``; None if there is no reply within ``seconds``."""
    try:
        with httpx.Client(**client_options(None, timeout=httpx.Timeout(seconds))) as http, http.stream("GET", url) as response:
            return response.status_code
    except (httpx.HTTPError, httpx.StreamError):
        return None
