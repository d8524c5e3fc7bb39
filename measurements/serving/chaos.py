"""Three replicas serve a scorer. One is killed every 2 seconds and 5 % of the replies are spoiled: is any score lost or wrong?

    python measurements/serving/chaos.py [--samples 10000]

Every score proves which image it belongs to. A proxy in front of each replica spoils replies, in 17 ways in turn. The supervisor of
`retouch serve` restarts dead replicas. At the end, the script measures how 5 % of spoiled replies change the advantages if
nothing is asked twice.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from urllib.parse import urlsplit

import numpy as np
import torch
from PIL import Image
from scorers import digest_score
from servers import HERE, Ours, ours

from retouch.core.advantages import group_relative
from retouch.types import Sample, Task
from retouch_serve.remote import RemoteReward

REPLICAS = 3
EACH = 0.01
KILL_SECONDS = 2.0
SHARE = 0.05
CALL = 256


def chaos(samples: Sequence[Sample]) -> Iterator[tuple[str, dict[str, float]]]:
    """For each kind of fault: the numbers of lost and wrong scores, and the throughput relative to that without faults."""
    true = torch.tensor([digest_score(sample) for sample in samples])
    clean = 0.0
    for name, kill, share in [("clean", False, 0.0), ("kills", True, 0.0), ("bad replies", False, SHARE), ("both", True, SHARE)]:
        figures = _one(samples, true, kill=kill, share=share)
        clean = clean or figures["images_per_second"]
        yield name, {**figures, "of_clean": figures["images_per_second"] / clean}


def advantages(samples: Sequence[Sample]) -> dict[str, float]:
    """The cosine between the advantages with and without faults, in groups of 8 samples with one attempt per sample.

    ``cosine_of_zeros``: the same if each missing score is replaced by 0.
    """
    with ours("Digest", {}, replicas=REPLICAS) as server, ExitStack() as stack:
        urls = [stack.enter_context(_proxy(url, SHARE, seed)) for seed, url in enumerate(server.urls)]
        reward = stack.enter_context(closing(RemoteReward(endpoints=tuple(urls), batch=1, attempts=1, timeout=2.0).build()))
        given = reward(samples)["score"]
    true = _advantages(torch.tensor([digest_score(sample) for sample in samples]))
    cosines = [torch.cosine_similarity(_advantages(each), true, dim=0).item() for each in (given, given.nan_to_num(0.0))]
    return {"missing": given.isnan().double().mean().item(), "cosine": cosines[0], "cosine_of_zeros": cosines[1]}


def _advantages(rewards: torch.Tensor) -> torch.Tensor:
    group = torch.arange(len(rewards)) // 8
    return group_relative(rewards, group, baseline="mean", scale="group", ddof=0, eps=1e-4, clip=None)


def pictures(count: int) -> list[Sample]:
    """Samples of one task with noise images of 16 x 16 px."""
    draw = np.random.default_rng(0)
    task = Task(id="task", instruction="judge")
    return [Sample(task, Image.fromarray(draw.integers(0, 256, (16, 16, 3), dtype=np.uint8))) for _ in range(count)]


def _one(samples: Sequence[Sample], true: torch.Tensor, *, kill: bool, share: float) -> dict[str, float]:
    with ours("Digest", {"each": EACH}, replicas=REPLICAS) as server, ExitStack() as stack:
        urls = [stack.enter_context(_proxy(url, share, seed)) for seed, url in enumerate(server.urls)]
        reward = RemoteReward(
            endpoints=tuple(urls), batch=8, concurrency=4, deadline=120.0, timeout=2.0, attempts=12, retry_share=0.2
        ).build()
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
    """Kill a random replica every ``KILL_SECONDS`` seconds, and append its process id to the list."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000)
    samples = pictures(parser.parse_args().samples)
    for name, figures in chaos(samples):
        print(f"{name}: {json.dumps(figures)}", flush=True)
    print(f"advantages: {json.dumps(advantages(samples[:4000]))}", flush=True)


if __name__ == "__main__":
    main()
