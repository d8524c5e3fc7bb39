"""An HTTP client for judges that limits replies: redirects are not followed, and the size is bounded before and after
decompression."""

import zlib
from collections.abc import AsyncIterator
from typing import Any

import httpx2

MAX_REPLY_BYTES = 4 * 2**20
_GZIP_OR_ZLIB = 47  # wbits of zlib: the format is read from the header
_CODINGS = frozenset({"gzip", "x-gzip", "deflate"})


class UnboundedReply(httpx2.TransportError):
    """A reply has more than ``MAX_REPLY_BYTES`` bytes, or a compression whose size cannot be bounded."""


class BoundedClient(httpx2.AsyncClient):
    """An HTTP client that never follows a redirect and bounds the size of replies.

    Reading a reply raises ``UnboundedReply`` at the first byte above the limit, counted both compressed and decompressed.
    """

    def __init__(self, *, timeout: float, connections: int) -> None:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=connections)
        super().__init__(timeout=timeout, limits=limits, follow_redirects=False, headers={"Accept-Encoding": "identity"})

    async def send(self, request: httpx2.Request, *, stream: bool = False, **options: Any) -> httpx2.Response:
        """Send a request and return the reply. The option ``follow_redirects`` has no effect: a redirect is returned as a reply."""
        response = await super().send(request, stream=True, **{**options, "follow_redirects": False})
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        coding = response.headers.pop("content-encoding", "identity").strip().lower()
        if coding not in ("identity", *_CODINGS):
            await response.aclose()
            raise UnboundedReply(f"a reply in the compression {coding[:20]!r}")
        # The reply's charset may name a codec that does not decode to text. JSON is always UTF-8.
        response.encoding = "utf-8"
        response.stream = _BoundedStream(response.stream, zlib.decompressobj(_GZIP_OR_ZLIB) if coding in _CODINGS else None)
        if not stream:
            try:
                await response.aread()
            finally:
                await response.aclose()
        return response


class _BoundedStream(httpx2.AsyncByteStream):
    """A stream of the bytes of ``inner``, decompressed if there is a decompressor."""

    def __init__(self, inner: httpx2.AsyncByteStream, decompressor: "zlib._Decompress | None") -> None:
        self._inner, self._decompressor = inner, decompressor

    async def __aiter__(self) -> AsyncIterator[bytes]:
        received = passed = 0
        async for part in self._inner:
            received += len(part)
            plain = self._plain(part, MAX_REPLY_BYTES + 1 - passed)
            passed += len(plain)
            if received > MAX_REPLY_BYTES or passed > MAX_REPLY_BYTES:
                raise UnboundedReply(f"a reply of more than {MAX_REPLY_BYTES} bytes")
            yield plain

    async def aclose(self) -> None:
        """Close the connection, or return it to the pool if the whole reply was read."""
        await self._inner.aclose()

    def _plain(self, part: bytes, most: int) -> bytes:
        """Decompress the part, to at most ``most`` bytes. Without a decompressor, return the part unchanged."""
        if self._decompressor is None:
            return part
        try:
            return self._decompressor.decompress(part, most)
        except zlib.error:
            raise UnboundedReply("a reply that is not what its Content-Encoding says") from None
