"""Compares the reward server and its client to a plain FastAPI server with base64 PNGs in JSON.

    python measurements/serving/throughput.py [--only sending batching busy bomb]

Both sides of a comparison run in turn on this machine, and the times include the encoding by the client. Only the ratios can be
compared between machines.
"""

import argparse
import base64
import io
import json
import statistics
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TypeAlias

import httpx
import numpy as np
import psutil
from PIL import Image
from scorers import corner_score
from servers import ours, plain

from retouch.types import Sample, Task
from retouch_serve.remote import RemoteReward
from retouch_serve.requests import Limits, decode
from retouch_serve.wire import encode_body, pack

CLIENTS, BATCH, TURNS = 4, 8, 3
Ask: TypeAlias = Callable[[Sequence[Sample]], Sequence[float]]


def photos(count: int, side: int) -> list[Sample]:
    """Samples with images of smooth colours and a little noise, which compress like photographs."""
    draw = np.random.default_rng(0)
    made = []
    for number in range(count):
        coarse = Image.fromarray(draw.integers(0, 256, (side // 32, side // 32, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC)).astype(np.int16)
        noisy = np.clip(smooth + draw.normal(0, 4, smooth.shape), 0, 255).astype(np.uint8)
        made.append(Sample(Task(id=str(number), instruction="judge"), Image.fromarray(noisy)))
    return made


def ask_plain(client: httpx.Client, samples: Sequence[Sample]) -> list[float]:
    """Score samples with the plain server."""
    texts = []
    for sample in samples:
        buffer = io.BytesIO()
        assert sample.image is not None
        sample.image.save(buffer, "PNG")
        texts.append(base64.b64encode(buffer.getvalue()).decode())
    answer = client.post("/compute", json={"prompts": [sample.task.id for sample in samples], "images": texts})
    rewards: list[float] = answer.raise_for_status().json()["rewards"]
    return rewards


def timed(ask: Ask, batches: Sequence[Sequence[Sample]], clients: int, *, server: int) -> dict[str, float]:
    """Time ``ask`` on all batches.

    Returns the images per second, the 50th and 99th percentile of the seconds per batch, and the CPU milliseconds per image of the
    caller and of the server.
    """
    ask(batches[0])
    process = psutil.Process(server)
    before = sum(process.cpu_times()[:2])

    def one(samples: Sequence[Sample]) -> float:
        begun = time.monotonic()
        given = ask(samples)
        seconds = time.monotonic() - begun
        np.testing.assert_allclose(given, [corner_score(sample) for sample in samples], rtol=0, atol=1e-6)
        return seconds

    begun, ours_before = time.monotonic(), time.process_time()
    with ThreadPoolExecutor(clients) as callers:
        times = list(callers.map(one, batches))
    count = sum(len(samples) for samples in batches)
    p50, p99 = np.percentile(times, [50, 99])
    seconds = time.monotonic() - begun
    caller = (time.process_time() - ours_before) / count
    served = (sum(process.cpu_times()[:2]) - before) / count
    figures = {"images_per_second": count / seconds, "p50": float(p50), "p99": float(p99)}
    return {**figures, "caller_cpu_ms": 1000 * caller, "server_cpu_ms": 1000 * served}


class Health:
    """Requests a health page every 20 ms while its context is open, and records the seconds of each request."""

    def __init__(self, url: str) -> None:
        self._url, self._stop = url, threading.Event()
        self.times: list[float] = []
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> "Health":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _ask(self) -> None:
        with httpx.Client(timeout=60) as client:
            while not self._stop.wait(0.02):
                begun = time.monotonic()
                client.get(self._url)
                self.times.append(time.monotonic() - begun)


def sending(rounds: int) -> dict[str, object]:
    """Send 512 x 512 images to a scorer without cost. Each encoding is measured three times, and the result is the median."""
    batches = [photos(BATCH, 512)] * max(1, rounds // TURNS)
    turns: dict[str, list[dict[str, float]]] = {"plain": [], "webp": [], "raw": []}
    with (
        plain(0.0, 0.0) as (url, pid),
        httpx.Client(base_url=url, timeout=120) as client,
        ours("Fixed", {}) as server,
        closing(RemoteReward(endpoints=tuple(server.urls), encoding="webp", batch=BATCH).build()) as webp,
        closing(RemoteReward(endpoints=tuple(server.urls), encoding="raw", batch=BATCH).build()) as raw,
    ):
        for _ in range(TURNS):
            turns["plain"].append(timed(lambda samples: ask_plain(client, samples), batches, CLIENTS, server=pid))
            turns["webp"].append(timed(_scores(webp), batches, CLIENTS, server=server.pids()[0]))
            turns["raw"].append(timed(_scores(raw), batches, CLIENTS, server=server.pids()[0]))
    speeds = {name: [each["images_per_second"] for each in took] for name, took in turns.items()}
    ratios = {name: [ours / theirs for ours, theirs in zip(speeds[name], speeds["plain"], strict=True)] for name in ("webp", "raw")}
    medians = {name: {key: statistics.median(each[key] for each in took) for key in took[0]} for name, took in turns.items()}
    return {**medians, "beside plain": {name: statistics.median(each) for name, each in ratios.items()}, "turns": ratios}


def batching(rounds: int) -> dict[str, object]:
    """8 callers send 4 small images each to a scorer that takes 200 ms per call and 10 ms per image; health pages are timed too."""
    batches = [photos(4, 64)] * (8 * rounds)
    with plain(0.2, 0.01) as (url, pid), httpx.Client(base_url=url, timeout=120) as client, Health(f"{url}/health") as health:
        measured: dict[str, object] = {"plain": timed(lambda samples: ask_plain(client, samples), batches, 8, server=pid)}
    with ours("Fixed", {"base": 0.2, "each": 0.01}, limits=["max_batch=64"]) as server:
        reward = RemoteReward(endpoints=tuple(server.urls), batch=4, concurrency=8).build()
        with Health(f"{server.urls[0]}/livez") as livez:
            measured["ours"] = timed(_scores(reward), batches, 8, server=server.pids()[0])
        reward.close()
    for name, asked in (("plain", health), ("ours", livez)):
        measured[f"{name} health"] = dict(zip(("p50", "p99"), map(float, np.percentile(asked.times, [50, 99])), strict=True))
    return measured


def busy(rounds: int) -> dict[str, object]:
    """Time the health page while a scorer in plain Python computes without a pause."""
    batches = [photos(BATCH, 64)] * (2 * rounds)
    with (
        ours("Busy", {"each": 0.02}) as server,
        closing(RemoteReward(endpoints=tuple(server.urls), batch=BATCH).build()) as reward,
        Health(f"{server.urls[0]}/livez") as livez,
    ):
        figures = timed(_scores(reward), batches, CLIENTS, server=server.pids()[0])
    return {"ours": figures, "livez": dict(zip(("p50", "p99"), map(float, np.percentile(livez.times, [50, 99])), strict=True))}


def bomb(rounds: int, *, side: int = 13_000) -> dict[str, object]:
    """The milliseconds in which a PNG with half a GB of pixels is refused: when only decoding the request, and over HTTP."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(side * (1 + 3 * side)), 9)), (b"IEND", b"")]
    parts = [struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks]
    blob = b"".join([b"\x89PNG\r\n\x1a\n", *parts])
    document, _ = pack(photos(1, 64), ["0"], encoding="webp")
    body, kind = encode_body(document, [blob])
    reading, asking = [], []
    with ours("Fixed", {}) as server, httpx.Client(base_url=server.urls[0], timeout=60) as client:
        for _ in range(rounds):
            begun = time.perf_counter()
            (sample,) = decode(body, kind, Limits()).samples
            reading.append(time.perf_counter() - begun)
            reply = client.post("/v1/score", content=body, headers={"Content-Type": kind})
            asking.append(reply.elapsed.total_seconds())
            assert (sample, reply.status_code) == ("bad_picture", 422)
    refused, answered = (1000 * statistics.median(times) for times in (reading, asking))
    return {"file_kb": len(blob) / 1000, "refused_ms": refused, "over_http_ms": answered}


def _scores(reward: RemoteReward) -> Ask:
    return lambda samples: reward(samples)["score"].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["sending", "batching", "busy", "bomb"]
    parser.add_argument("--only", nargs="*", choices=parts, default=parts)
    parser.add_argument("--rounds", type=int, default=24, help="batches in `sending`; `batching` has a third of them")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    arguments = parser.parse_args()
    measured: dict[str, object] = {}
    if "sending" in arguments.only:
        measured["sending"] = show("sending", sending(arguments.rounds))
    if "batching" in arguments.only:
        measured["batching"] = show("batching", batching(max(1, arguments.rounds // 3)))
    if "busy" in arguments.only:
        measured["busy"] = show("busy", busy(arguments.rounds))
    if "bomb" in arguments.only:
        measured["bomb"] = show("bomb", {"13000 x 13000": bomb(arguments.rounds)})
    if arguments.json:
        arguments.json.write_text(json.dumps(measured, indent=2) + "\n")


def show(title: str, measured: dict[str, object]) -> dict[str, object]:
    """Print the measurements and return them."""
    print(title, flush=True)
    for name, figures in measured.items():
        print(f"  {name}: {json.dumps(figures)}", flush=True)
    return measured


if __name__ == "__main__":
    main()
