"""Writes the folder of an invented run with a run's classes: tasks, images and scores are real, the learning is made up."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image

from retouch.core.random import generator
from retouch.records.folder import RunFolder, SampleRecord, Summary
from retouch.types import Sample, Task
from retouch_worlds.data import PlaygroundData
from retouch_worlds.playground.rendering import render
from retouch_worlds.playground.scenes import Edit, Scene, apply
from retouch_worlds.rewards import PlaygroundReward


def edit_image(task: Task, skill: float, random: torch.Generator) -> Image.Image:
    """Make the image of an editor that makes each edit with probability ``skill`` and adds some noise."""
    scene = Scene.from_json(task.meta["scene"])
    draws = torch.rand(8, generator=random).tolist()
    edits = task.meta["edits"]
    assert isinstance(edits, list)
    done = [Edit.from_json(edit) for edit, draw in zip(edits, draws, strict=False) if draw < skill]
    clean = render(apply(scene, done)) if done else render(scene)
    pixels = torch.frombuffer(bytearray(clean.tobytes()), dtype=torch.uint8).view(24, 24, 3).float()
    pixels += 22 * (1 - skill) * torch.randn(24, 24, 3, generator=random)
    return Image.fromarray(pixels.round().clamp(0, 255).to(torch.uint8).numpy())


def judge(tasks: Sequence[Task], images: Sequence[Image.Image]) -> list[dict[str, float]]:
    scores = PlaygroundReward()([Sample(task, image) for task, image in zip(tasks, images, strict=True)])
    return [{name: float(column[row]) for name, column in scores.items()} for row in range(len(tasks))]


def evaluate(folder: RunFolder, step: int, skill: float, tasks: Sequence[Task]) -> float:
    """Write an evaluation and its images; return the mean of the column ``overall``."""
    images = [edit_image(task, skill, generator("eval", place)) for place, task in enumerate(tasks)]
    scores = judge(tasks, images)
    rows = {"all": list(range(len(tasks)))}
    for tag in ("complexity", "kinds"):
        for value in sorted({task.tags[tag] for task in tasks}):
            rows[f"{tag}={value}"] = [place for place, task in enumerate(tasks) if task.tags[tag] == value]
    table: dict[str, dict[str, float | int | None]] = {}
    ci95: dict[str, dict[str, tuple[float, float]]] = {}
    for row, places in rows.items():
        table[row], ci95[row] = {"n": len(places)}, {}
        for column in scores[0]:
            values = torch.tensor([scores[place][column] for place in places if not math.isnan(scores[place][column])])
            table[row][column] = float(values.mean()) if len(values) else None
            if len(values) > 1:
                half = 1.96 * float(values.std()) / math.sqrt(len(values))
                ci95[row][column] = (float(values.mean()) - half, float(values.mean()) + half)
    folder.write_eval(step, "heldout", table=table, ci95=ci95)
    shown = [
        SampleRecord(sample=Sample(task, image), group=place, slot=0, scores=score, reward=score["overall"])
        for place, (task, image, score) in enumerate(zip(tasks[:16], images, scores, strict=False))
    ]
    folder.write_samples(step, "heldout", shown)
    mean = table["all"]["overall"]
    assert mean is not None
    return float(mean)


def train(folder: RunFolder, step: int, skill: float, *, group_size: int = 10, group_count: int = 4) -> None:
    """Write the training groups of a step, with one missing score and one group whose rewards are all equal."""
    tasks = PlaygroundData(seed=step, count=group_count, complexity=[2, 3]).tasks(in_turn=True)[:]
    kept = []
    for group, task in enumerate(tasks):
        known = 2.0 if group == 1 else skill
        images = [edit_image(task, known, generator("train", step, group, 0 if group == 1 else slot)) for slot in range(group_size)]
        scores = judge([task] * group_size, images)
        rewards = torch.tensor([score["overall"] for score in scores])
        if group == 2:
            rewards[3] = math.nan
        centred = rewards - rewards.nanmean()
        spread = centred.nan_to_num().std()
        advantages = (centred / spread).nan_to_num() if spread > 1e-3 else torch.zeros(group_size)
        kept += [
            SampleRecord(
                sample=Sample(task, image), group=group, slot=slot, scores=score, reward=float(reward), advantage=float(advantage)
            )
            for slot, (image, score, reward, advantage) in enumerate(zip(images, scores, rewards, advantages, strict=True))
        ]
    folder.write_samples(step, "group", kept)


def metrics(step: int, skill: float) -> dict[str, float | int | None]:
    noise = torch.randn(8, generator=generator("metrics", step)).tolist()
    overall = 3.2 + 5.0 * skill
    return {
        "reward/mean": overall + 0.35 * noise[0],
        "reward/std": 1.9 - 0.6 * skill,
        "reward/count": 96,
        "reward/ci95": 0.4 - 0.1 * skill,
        "reward/overall": overall + 0.35 * noise[0],
        "reward/IF": overall - 0.6 + 0.4 * noise[1],
        "reward/IP": 9.3 - 0.2 * skill + 0.1 * noise[2],
        "reward/PQ": 8.6 + skill + 0.1 * noise[3],
        "reward/missing_fraction": 1 / 96 if step % 17 == 0 else 0.0,
        "policy/ratio_max_first": 2e-7 * abs(noise[4]),
        "policy/clip_fraction": 0.08 + 0.01 * noise[5],
        "policy/approx_kl": 1e-4 * (1 + 0.3 * noise[6]),
        "policy/grad_norm": math.nan if step == 31 else 0.4 + (3.0 if step == 77 else 0.0) + 0.05 * noise[7],
        "group/zero_std_fraction": round(max(0.0, skill - 0.4), 2),
        "optimizer/learning_rate": 2e-4,
    }


def skill_at(step: int) -> float:
    return 0.62 + 0.19 * (1 - math.exp(-step / 45))


def write_new_run(root: Path, *, name: str = "quickstart", steps: int = 120) -> RunFolder:
    """Write a run folder that contains only the recipe."""
    folder = RunFolder(root)
    folder.write_recipe(
        {
            "name": name,
            "seed": 7,
            "steps": steps,
            "tasks_per_step": 8,
            "group_size": 12,
            "learning_rate": 2e-4,
            "device": "cpu",
            "policy": {"model": "playground/editor", "lora": None, "rollout": {"steps": 6, "window": 2, "noise_level": 0.7}},
            "objective": {"kind": "clipped_policy_gradient", "clip_low": 1e-4, "clip_high": 1e-4},
            "data": {"kind": "playground", "complexity": [2, 3]},
            "eval": {"every": 30, "tasks": 80},
        }
    )
    return folder


def write_run(root: Path, *, steps: int = 120, tasks: int = 80, every: int = 30) -> RunFolder:
    """Write a whole run: ``steps`` steps, an evaluation every ``every`` steps, and training images of the first and last step."""
    folder = write_new_run(root, steps=steps)
    checks = (
        ("ratio before the first step", True, 2.4e-7, 1e-6, "largest |ratio - 1| on a trial step"),
        ("ratio after it", True, 3.1e-3, None, "the weights changed"),
        ("gradients finite and not zero", True, 0.41, None, "312 of 312 tensors"),
        ("frozen parts unchanged", True, None, None, "VAE and text encoder are bitwise equal"),
        ("KL has a gradient", False, 0.0, None, "no gradient: is the reference shared with the policy?"),
    )
    folder.write_preflight([dict(zip(("name", "ok", "value", "limit", "text"), check, strict=True)) for check in checks])
    heldout = PlaygroundData(seed=0, count=tasks, complexity=[1, 2, 3], split="test").tasks(in_turn=True)[:]
    before = evaluate(folder, 0, skill_at(0), heldout)
    train(folder, 1, skill_at(1))
    after = before
    for step in range(1, steps + 1):
        folder.append_metrics(step, "rl", metrics(step, skill_at(step)))
        wobble = torch.rand(1, generator=generator("time", step)).item()
        stages = {"time/rollout": 0.8 + 0.2 * wobble, "time/reward": 0.05, "time/update": 1.1 + 0.1 * wobble, "time/evaluate": 0.02}
        folder.append_timings(step, {**stages, "time/step": sum(stages.values()) * 1.04})
        if step % every == 0:
            after = evaluate(folder, step, skill_at(step), heldout)
    train(folder, steps, skill_at(steps))
    gain = after - before
    folder.write_summary(
        Summary(
            column="overall",
            on=f"{tasks} held-out tasks",
            before=before,
            after=after,
            steps=steps,
            ceiling=9.7,
            best_of_k=before + 0.7 * gain,
            k=6,
            gain_ci95=(gain - 0.2, gain + 0.2),
            cost={"samples judged": 11520, "minutes": 4.6},
        )
    )
    return folder
