"""Compares runs whose judge fails at one question in ten to runs with a faultless judge: the learning, and the missing scores.

    python measurements/judging/judge_faults.py [--steps 60] [--seeds 0 1 2]

The tiny SD3 learns to make its images redder. Its judge is an OpenAI-compatible server on loopback (the strict double from the
tests), which scores how red an image is. In some runs the judge fails at a tenth of the requests, in 23 ways: errors, resets, cut
and empty replies, refusals, prose, scores off the scale. A passing fault affects a single request, and the client asks again. A
lasting fault affects every request for the same question, so the score is missing. Held-out images are scored by their pixels.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from judge_double import FAULTS, KEY, Double, judged_pixels  # noqa: E402

KINDS = [kind for kind in FAULTS if kind != "time-out"]  # a time-out would dominate the measured time
LAST = 10
Fault = Callable[[str, int], str | None]


class Redness(Double):
    """A judge whose score is the red channel's share of the sum of all channels."""

    def content(self, body: dict[str, Any]) -> tuple[str, None]:
        pixels = judged_pixels(body["messages"][-1]["content"][-1])
        return json.dumps({"reasoning": "", "alignment": round(sum(pixels[::3]) / max(sum(pixels), 1), 6)}), None


def drawn(text: str) -> str | None:
    """A kind of fault for a tenth of all texts, None for the others; both depend only on the text."""
    number = int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)
    return KINDS[number // 10 % len(KINDS)] if number % 10 == 0 else None


CASES: dict[str, Fault] = {
    "none": lambda digest, times: None,
    "passing": lambda digest, times: drawn(f"{digest} {times}"),
    "lasting": lambda digest, times: drawn(digest),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    with TemporaryDirectory() as folder:
        for seed in arguments.seeds:
            for case in CASES:
                found[case].append(measured(case, seed, steps=arguments.steps, folder=Path(folder)))
                print(f"seed {seed}, faults {case}: {found[case][-1]}", flush=True)
    print("\n" + "\n".join(table(found)))


def measured(case: str, seed: int, *, steps: int, folder: Path) -> dict[str, float]:
    """Make one run.

    Returns the share of red in held-out images before and after training and in the training images of the last steps, the share of
    missing scores, and the number of requests.
    """
    name = f"{case}-{seed}"
    with Redness(CASES[case]) as double:
        judge = {"kind": "endpoint", "model": "redness", "base_url": double.url, "pause": 0.01, "longest_pause": 0.1}
        asks = {"kind": "aspects", "aspects": ["alignment"], "n_evals": 1, "judge": judge}
        rewards = {"judge": asks, "pixels": {"kind": "share", "channel": "red"}}
        reward = {"kind": "several", "rewards": rewards, "combine": {"judge/alignment": 1.0}, "max_missing": 0.5}
        settings = {
            **{"name": name, "out": str(folder), "seed": seed, "steps": steps, "reward": reward, "trackers": []},
            **{"eval.column": "pixels/share", "data.held_out": 4},
        }
        changes = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
        environment = {
            **os.environ,
            "OPENAI_API_KEY": KEY,
            "RETOUCH_KEYS": "OPENAI_API_KEY=http://127.0.0.1:*",
            "PYTHONPATH": str(ROOT / "src"),
        }
        command = [sys.executable, "-m", "retouch.cli", "train", str(ROOT / "recipes" / "tiny-sd3.jsonnet"), *changes]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        asked = len(double.requests)
    summary = json.loads((folder / name / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    last = statistics.fmean(line["reward/pixels/share"] for line in lines[-LAST:])
    missing = statistics.fmean(line["missing/judge/alignment"] for line in lines)
    return {"before": summary["before"], "after": summary["after"], "last": last, "missing": missing, "requests": asked}


def table(found: dict[str, list[dict[str, float]]]) -> list[str]:
    """A Markdown table of the results, with their spread over the seeds."""
    lines = [f"| faults | held-out red before | after | in the last {LAST} steps | missing | requests |", "| --- " * 6 + "|"]
    for case, runs in found.items():
        cells = [_spread([run[name] for run in runs]) for name in ("before", "after", "last")]
        means = {name: statistics.fmean(run[name] for run in runs) for name in ("missing", "requests")}
        lines.append(f"| {case} | " + " | ".join([*cells, f"{means['missing']:.1%}", f"{means['requests']:.0f}"]) + " |")
    return lines


def _spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.4f} ({min(values):.4f} to {max(values):.4f})"


if __name__ == "__main__":
    main()
