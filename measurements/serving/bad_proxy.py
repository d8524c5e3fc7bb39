"""A proxy in front of one replica. It forwards requests and spoils a share of the replies, in seventeen ways in turn.

    python measurements/serving/bad_proxy.py UPSTREAM_PORT SHARE SEED

The command prints the port of the proxy. The proxy forwards bytes, so it costs little compared to the replica.
"""

import asyncio
import json
import random
import re
import sys
from collections.abc import Callable

_LENGTH = re.compile(rb"^content-length: *(\d+)", re.IGNORECASE | re.MULTILINE)
_WAYS: tuple[str, ...] = (
    *("500", "502", "503", "429", "hang", "reset", "close mid-body", "truncated", "HTML", "other type"),
    *("NaN", "out of range", "text", "missing item", "item twice", "unknown id", "other judge"),
)
_CHANGES: dict[str, Callable[[dict[str, list[dict[str, object]]]], object]] = {
    "NaN": lambda reply: reply["items"][0].update(scores={"score": float("nan")}),
    "out of range": lambda reply: reply["items"][0].update(scores={"score": 7.0}),
    "text": lambda reply: reply["items"][0].update(scores={"score": "0.5"}),
    "missing item": lambda reply: reply["items"].pop(),
    "item twice": lambda reply: reply["items"].append(reply["items"][0]),
    "unknown id": lambda reply: reply["items"][0].update(id="stranger"),
    "other judge": lambda reply: reply.update(judges={"digest": ["other"]}),  # type: ignore[dict-item]
}


async def message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Read the head and the body of a request or a reply. Raises IncompleteReadError at the end of the stream."""
    head = await reader.readuntil(b"\r\n\r\n")
    found = _LENGTH.search(head)
    return head, await reader.readexactly(int(found[1])) if found else b""


def spoiled(way: str, head: bytes, body: bytes) -> bytes | None:
    """The bytes to send instead of the reply; None means to close the connection."""
    if way.isdigit():
        return f"HTTP/1.1 {way} Bad\r\nContent-Length: 0\r\n\r\n".encode()
    match way:
        case "reset":
            return None
        case "close mid-body":
            return head + body[: len(body) // 2]
        case "truncated":
            body = body[: len(body) // 2]
        case "HTML":
            head, body = head.replace(b"application/json", b"text/html"), b"<html>Bad gateway</html>"
        case "other type":
            head = head.replace(b"application/json", b"text/plain")
        case _:
            reply = json.loads(body)
            _CHANGES[way](reply)
            body = json.dumps(reply).encode()
    return _LENGTH.sub(b"Content-Length: %d" % len(body), head) + body


async def serve(upstream: int, share: float, seed: int) -> None:
    """Run the proxy on a free port, in front of the server on the port ``upstream``; print the proxy's port."""
    draw = random.Random(seed)
    turn = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal turn
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", upstream)
        except OSError:
            writer.close()
            return
        try:
            while True:
                head, body = await message(reader)
                up_writer.write(head + body)
                answer = b"".join(reply := await message(up_reader))
                if head.startswith(b"POST") and draw.random() < share:
                    turn += 1
                    way = _WAYS[turn % len(_WAYS)]
                    if way == "hang":
                        await asyncio.sleep(60)
                        return
                    changed = spoiled(way, *reply)
                    if changed is None:
                        return
                    writer.write(changed)
                    if way == "close mid-body":
                        return
                else:
                    writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            up_writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, limit=2**24)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
