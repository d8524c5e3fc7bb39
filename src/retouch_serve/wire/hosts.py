"""Recognise the addresses of this machine, and requests that were sent by web pages of other origins.

A web page of another origin can send requests to a server on its visitor's machine; with DNS rebinding, it can do so under its own
host name. ``is_from_own_host`` detects both.
"""

import ipaddress
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Whether a server at this address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_from_own_host(hosts: Sequence[str], origins: Sequence[str], accepts: Callable[[str], bool]) -> bool:
    """Whether a request has exactly one ``Host`` header and at most one ``Origin`` header, all with accepted host names.

    ``accepts``: returns whether a host name, without its port, is accepted.
    """
    if len(hosts) != 1 or len(origins) > 1:
        return False
    return all(_has_host(url, accepts) for url in (f"http://{hosts[0]}", *origins))


def _has_host(url: str, accepts: Callable[[str], bool]) -> bool:
    try:
        return accepts(urlsplit(url).hostname or "")
    except ValueError:
        return False
