"""Payloads of strangers against `retouch serve` as a process of its own: what it answers, what it grows by, what a bomb costs.

    python benchmarks/serving/hostile.py

The payloads are those of tests/serving/test_hostile.py, sent three times over. Linux alone (memory is read from /proc).
"""

import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

from retouch.data.images import EncodedImage, read_header
from retouch.rewards.wire.bodies import encode_body

HERE = Path(__file__).parent
sys.path += [str(HERE.parents[1] / "tests" / "support"), str(HERE.parents[1] / "tests" / "serving")]
import test_hostile as hostile  # noqa: E402
from servers import ours  # noqa: E402

LIMITS = ("window=0", "max_items=64", "max_pixels=1048576", "max_total_pixels=4194304", "max_body_bytes=8388608", "body_seconds=1")
ROUNDS = 3
TRACES = re.compile(r"Traceback|File \"|0x[0-9a-f]{6,}|site-packages|\.py\b")


def payloads() -> Iterator[tuple[str, bytes | Callable[[], bytes | Iterator[bytes]], dict[str, str]]]:
    """Name, body (or what makes it) and headers."""
    for name, picture in hostile.PICTURES.items():
        body, kind = encode_body(json.dumps(hostile.batch()).encode(), [picture], "multipart")
        yield f"picture: {name}", body, {"Content-Type": kind}
    for name, document in hostile.DOCUMENTS.items():
        text = document if isinstance(document, bytes) else json.dumps(document).encode()
        body, kind = encode_body(text, [hostile.GOOD], "multipart")
        yield f"document: {name}", body, {"Content-Type": kind}
    for name, (make, headers) in hostile.BODIES.items():
        yield f"body: {name}", make, headers


def memory(pid: int) -> tuple[float, float]:
    """Resident MB now, and the most there ever was."""
    status = Path(f"/proc/{pid}/status").read_text()
    return tuple(int(re.search(rf"{key}:\s+(\d+) kB", status)[1]) / 1e3 for key in ("VmRSS", "VmHWM"))  # type: ignore[index,return-value]


def main() -> None:
    listed = list(payloads())
    bomb = hostile.PICTURES["PNG bomb of 13000 x 13000"]
    refusals = [_refused(bomb) for _ in range(200)]
    with ours("Digest", {}, limits=LIMITS) as server:
        (pid,), url = server.pids().values(), server.urls[0]
        good, kind = hostile.body_of(hostile.samples_of(8))
        for _ in range(20):
            assert httpx.post(f"{url}/v1/score", content=good, headers=kind).status_code == 200
        before, _ = memory(pid)
        wrong, traced, sent = [], [], 0
        for _ in range(ROUNDS):
            for name, body, headers in listed:
                answer = httpx.post(f"{url}/v1/score", content=body() if callable(body) else body, headers=headers, timeout=60)
                sent += 1
                wrong += [] if 400 <= answer.status_code < 500 else [(name, answer.status_code)]
                traced += [name] if TRACES.search(answer.text) else []
        after, most = memory(pid)
        alive = httpx.post(f"{url}/v1/score", content=good, headers=kind).status_code == 200
        body, head = encode_body(json.dumps(hostile.batch()).encode(), [bomb], "multipart")
        times = [_seconds(lambda: httpx.post(f"{url}/v1/score", content=body, headers={"Content-Type": head})) for _ in range(50)]
    print(f"{len(listed)} payloads, {sent} sent, alive afterwards: {alive}")
    print(f"not refused: {len(wrong)} {wrong[:3]}; with a traceback: {len(traced)} {traced[:3]}")
    print(
        f"memory: {before:.0f} MB before, {after:.0f} MB after ({after - before:+.0f}), at most {most:.0f} ({most - before:+.0f})"
    )
    median, longest, http = (1e3 * seconds for seconds in (statistics.median(refusals), max(refusals), statistics.median(times)))
    print(f"13000 x 13000 PNG of {len(bomb)} bytes, refused from its header: median {median:.3f} ms, longest {longest:.3f} ms")
    print(f"the same over HTTP, connection and all: median {http:.1f} ms")


def _refused(picture: bytes) -> float:
    """Seconds until the image is refused."""

    def refuse() -> None:
        try:
            read_header(EncodedImage("picture", picture), max_pixels=2**24)
        except ValueError:
            return
        raise AssertionError("it was taken")

    return _seconds(refuse)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
