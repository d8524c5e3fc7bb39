"""Which addresses are this machine's own, and which requests come from it.

A web page of another origin can send requests to a server on its visitor's machine, and by DNS rebinding under a host name of its
own; ``is_from_own_host`` recognises both.
"""

import ipaddress
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Whether a server at this address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_from_own_host(hosts: Sequence[str], origins: Sequence[str], accepts: Callable[[str], bool]) -> bool:
    """Whether a request's ``Host`` and ``Origin`` headers are exactly one host and at most one origin, all of names that are taken.

    ``accepts``: whether a host name, without its port, is taken.
    """
    if len(hosts) != 1 or len(origins) > 1:
        return False
    return all(_has_host(url, accepts) for url in (f"http://{hosts[0]}", *origins))


def _has_host(url: str, accepts: Callable[[str], bool]) -> bool:
    try:
        return accepts(urlsplit(url).hostname or "")
    except ValueError:
        return False
