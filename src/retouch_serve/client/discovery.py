"""Read which rewards the servers host, before the first request. All servers that reply must host the same rewards."""

import asyncio
import logging
import time
from collections.abc import Collection

from pydantic import ValidationError

from retouch.types import Column
from retouch_serve.client.settings import RemoteSettings
from retouch_serve.client.transport import RequestFault, Transport
from retouch_serve.wire.replies import ExpectedReply
from retouch_serve.wire.schema import ServerInfo

_LOG = logging.getLogger("retouch.rewards")
_ASK_SECONDS = 2.0
_POLL = 0.2


async def discover(settings: RemoteSettings, *, wait: float) -> tuple[ExpectedReply, int]:
    """What a valid reply contains, and the largest number of items per request, from the servers that reply first.

    ``wait``: seconds to wait for a reply; a line is logged if the first attempt fails. Raises ValueError if no server replies, a
    server refuses the token or is not a reward server, the servers have different rewards, or a reward does not exist.
    """
    transport = Transport(token=settings.token, connections=1)
    until = time.monotonic() + wait
    places, announced = " or ".join(settings.endpoints), False
    try:
        while True:
            found = await asyncio.gather(*(_try_info(transport, url) for url in settings.endpoints))
            known = {url: info for url, info in zip(settings.endpoints, found, strict=True) if info is not None}
            if known:
                break
            if time.monotonic() > until:
                raise ValueError(
                    f"no reward server replies at {places} within {wait:g} s (`wait` of the remote reward); start one with "
                    "`retouch serve`"
                )
            if not announced:
                _LOG.warning("waiting for the reward server at %s (up to %g s)", places, wait)
                announced = True
            await asyncio.sleep(_POLL)
    finally:
        await transport.close()
    (first_url, first), *rest = known.items()
    expected = _expected(first, settings.rewards)
    for url, info in rest:
        if _expected(info, settings.rewards) != expected:
            raise ValueError(f"{url} has other rewards than {first_url}; serve the same rewards, code and arguments at both")
    return expected, min(info.limits.max_items for info in known.values())


async def read_info(transport: Transport, url: str, *, seconds: float) -> ServerInfo:
    """The reply of ``GET /v1/info``. ``seconds``: the time limit. Raises RequestFault if there is no valid reply."""
    try:
        return ServerInfo.model_validate_json(await transport.get(f"{url}/v1/info", seconds=seconds))
    except ValidationError:
        raise RequestFault("wrong_shape") from None


def judges_of(info: ServerInfo, rewards: Collection[str] | None) -> dict[str, str]:
    """The fingerprints of ``rewards`` by name; of all rewards if it is None."""
    return {each.name: each.fingerprint for each in info.rewards if rewards is None or each.name in rewards}


async def _try_info(transport: Transport, url: str) -> ServerInfo | None:
    """The server's info; None if the server cannot be reached. Raises ValueError if it refuses the token or is no reward server."""
    try:
        return await read_info(transport, url, seconds=_ASK_SECONDS)
    except RequestFault as fault:
        if fault.kind == "http_401":
            raise ValueError(f"{url} requires another token: set RETOUCH_TOKEN to the server's token") from None
        if fault.final or fault.kind in ("wrong_shape", "wrong_type", "too_large"):
            raise ValueError(f"{url} is not a reward server of Retouch: {fault.kind} for /v1/info") from None
        return None


def _expected(info: ServerInfo, rewards: Collection[str] | None) -> ExpectedReply:
    names = [each.name for each in info.rewards]
    unknown = [name for name in rewards or () if name not in names]
    if unknown:
        raise ValueError(f"the servers have no reward {', '.join(unknown)}; they have {', '.join(names)}")
    columns: dict[str, Column] = {}
    owner: dict[str, str] = {}
    for each in info.rewards:
        if rewards is None or each.name in rewards:
            columns |= {name: Column(**column.model_dump()) for name, column in each.columns.items()}
            owner |= dict.fromkeys(each.columns, each.name)
    return ExpectedReply(columns, owner, judges_of(info, rewards))
