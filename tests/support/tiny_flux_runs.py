"""A folder of triplets and a recipe of two small steps on it, for tests of complete runs."""

from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

SIZE = (48, 32)
BOX = (8, 8, 31, 23)


def make_triplets(root: Path, texts: dict[int, str]) -> Path:
    """Write a folder of items; the number of each item is encoded in its colours."""
    root.mkdir(parents=True, exist_ok=True)
    for number in texts:
        source = Image.new("RGB", SIZE, (10 * number % 256, 100, 200))
        ImageDraw.Draw(source).ellipse(BOX, fill=(250, 10 * number % 256, 30))
        mask = Image.new("L", SIZE)
        ImageDraw.Draw(mask).rectangle(BOX, fill=255)
        source.save(root / f"test{number}_source.png")
        mask.save(root / f"test{number}_mask.png")
        source.crop(BOX).save(root / f"test{number}_ref.png")
    (root / "self_bench.txt").write_text("".join(f"{number}-{text}\n" for number, text in texts.items()), encoding="utf-8")
    return root


def small(model: dict[str, Any], data: Path, out: Path, **changes: Any) -> dict[str, Any]:
    """Return a recipe of two steps, with two tasks per step and groups of two."""
    return {
        "name": "small",
        "steps": 2,
        "out": str(out),
        "tasks_per_step": 2,
        "group_size": 2,
        "learning_rate": 1e-2,
        "device": "cpu",
        "policy": {"kind": "denoising", "model": {"dtype": "float32", **model}, "train": {"kind": "lora", "rank": 4, "alpha": 8}},
        "rollout": {"num_steps": 3, "transition": {"kind": "sde", "noise_level": 0.7}, "window": {"mode": "window", "size": 1}},
        "data": {"kind": "triplets", "path": str(data), "held_out": 1, "allow_test_sets": True},
        "reward": {"kind": "share", "combine": {"share": 1}},
        "objective": {"kind": "policy_gradient", "clip_low": 1e-4, "clip_high": 1e-4},
        "eval": {"tasks": 1},
        "trackers": [],
        **changes,
    }
