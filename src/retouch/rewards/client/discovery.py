"""What the servers say of themselves before they are asked: all that answer must be the same judge."""

import asyncio
import time
from collections.abc import Collection

from pydantic import ValidationError

from retouch.rewards.client.faults import Fault
from retouch.rewards.client.settings import Settings
from retouch.rewards.client.transport import Transport
from retouch.rewards.wire.replies import ExpectedReply
from retouch.rewards.wire.schema import ServerInfo
from retouch.types import Column

_ASK_SECONDS = 2.0
_POLL = 0.2


async def discover(settings: Settings, *, wait: float) -> tuple[ExpectedReply, int]:
    """What a true reply holds, and the most items of a request; from the first servers that answer within ``wait`` seconds.

    ValueError: none does, one refuses, they differ, or a reward is not there.
    """
    transport = Transport(token=settings.token, connections=1)
    until = time.monotonic() + wait
    try:
        while True:
            found = await asyncio.gather(*(_ask(transport, url) for url in settings.endpoints))
            known = {url: info for url, info in zip(settings.endpoints, found, strict=True) if info is not None}
            if known:
                break
            if time.monotonic() > until:
                raise ValueError(f"no reward server answers at {', '.join(settings.endpoints)}; start one with `retouch serve`")
            await asyncio.sleep(_POLL)
    finally:
        await transport.close()
    (first_url, first), *rest = known.items()
    expected = _expected(first, settings.rewards)
    for url, info in rest:
        if _expected(info, settings.rewards) != expected:
            raise ValueError(f"{url} judges by something else than {first_url}; serve the same rewards, code and arguments at both")
    return expected, min(info.limits.max_items for info in known.values())


async def read_info(transport: Transport, url: str, *, seconds: float) -> ServerInfo:
    """What the server says of itself. Fault where it cannot be had."""
    try:
        return ServerInfo.model_validate_json(await transport.get(f"{url}/v1/info", seconds=seconds))
    except ValidationError:
        raise Fault("wrong_shape") from None


def judges_of(info: ServerInfo, rewards: Collection[str] | None) -> dict[str, str]:
    """The fingerprints of the rewards that are asked."""
    return {each.name: each.fingerprint for each in info.rewards if rewards is None or each.name in rewards}


async def _ask(transport: Transport, url: str) -> ServerInfo | None:
    """None where the server is not there yet."""
    try:
        return await read_info(transport, url, seconds=_ASK_SECONDS)
    except Fault as fault:
        if fault.kind == "http_401":
            raise ValueError(f"{url} wants another token: set RETOUCH_TOKEN to the server's own") from None
        if fault.final or fault.kind in ("wrong_shape", "wrong_type"):
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
