"""Three replicas of a scorer of fixed cost, one killed every 2 seconds, 5 % of the replies spoiled: is any score lost or wrong?"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

import numpy as np
import torch
from PIL import Image
from scorers import digest_score
from servers import HERE, Ours, ours

from retouch.rewards.remote.client import RemoteReward
from retouch.types import Sample, Task

REPLICAS = 3
EACH = 0.01
KILL_SECONDS = 2.0
SHARE = 0.05
CALL = 256


def chaos(count: int) -> dict[str, object]:
    """For each kind of fault: what became of ``count`` samples, and the throughput beside that without faults."""
    draw = np.random.default_rng(0)
    task = Task(id="task", instruction="judge")
    samples = [Sample(task, Image.fromarray(draw.integers(0, 256, (16, 16, 3), dtype=np.uint8))) for _ in range(count)]
    true = torch.tensor([digest_score(sample) for sample in samples])
    results: dict[str, object] = {}
    clean = 0.0
    for name, kill, share in [("clean", False, 0.0), ("kills", True, 0.0), ("bad replies", False, SHARE), ("both", True, SHARE)]:
        figures = _one(samples, true, kill=kill, share=share)
        clean = clean or figures["images_per_second"]
        results[name] = {**figures, "of_clean": figures["images_per_second"] / clean}
    return results


def _one(samples: Sequence[Sample], true: torch.Tensor, *, kill: bool, share: float) -> dict[str, float]:
    with ours("Digest", {"each": EACH}, replicas=REPLICAS) as server, ExitStack() as stack:
        urls = [stack.enter_context(_proxy(url, share, seed)) for seed, url in enumerate(server.urls)]
        reward = RemoteReward(urls, batch=8, concurrency=4, deadline=120.0, timeout=2.0, attempts=12, retry_share=0.2, hedge=True)
        reward(samples[:32])
        before = reward.stats()["calls"]
        killed = stack.enter_context(_killer(server)) if kill else []
        begun = time.monotonic()
        futures = [reward.submit(samples[first : first + CALL]) for first in range(0, len(samples), CALL)]
        given = torch.cat([future.result()["score"] for future in futures])
        seconds = time.monotonic() - begun
        stats = reward.stats()
        reward.close()
    lost = given.isnan()
    return {
        "images_per_second": len(samples) / seconds,
        "lost": int(lost.sum()),
        "given": len(given),
        "wrong": int((given[~lost] != true[~lost]).sum()),
        "kills": len(killed),
        "failed_attempts": sum(value for name, value in stats.items() if name.startswith("faults/")),
        "calls_per_request": (stats["calls"] - before) / (len(samples) / 8),
    }


@contextmanager
def _proxy(url: str, share: float, seed: int) -> Iterator[str]:
    command = [sys.executable, str(HERE / "bad_proxy.py"), str(urlsplit(url).port), str(share), str(seed)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextmanager
def _killer(server: Ours) -> Iterator[list[int]]:
    """Kill one replica after another, in random order; the list grows with their process ids."""
    stop, killed, draw = threading.Event(), [], random.Random(0)

    def work() -> None:
        while not stop.wait(KILL_SECONDS):
            pid = server.pids()[draw.randrange(REPLICAS)]
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            killed.append(pid)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield killed
    finally:
        stop.set()
        thread.join()
