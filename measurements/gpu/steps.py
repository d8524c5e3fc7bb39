"""Steps at full size with random weights: time, MFU and peak memory of each stage, compared to a rehearsal of the same step.

    python measurements/gpu/steps.py

The command above rehearses the cases for an H100, and writes rehearsed.json next to this file.
"""

import json
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from cases import FLUX_FILL, QWEN, QWEN_IMAGE, QWEN_IMAGE_2, QWEN_IMAGE_384, SD3, Built, build
from findings import Finding, at_most, measured, near
from target import PUBLISHED_FLOPS, Target

from retouch.run.preflight import ROWS, preflight
from retouch.run.step import collect, update

KEPT = Path(__file__).with_name("rehearsed.json")
MEASURED = json.loads(Path(__file__).with_name("measured.json").read_text(encoding="utf-8"))
"""What one H100 measured: its rates ("profile"), the seconds of stages, and those of a token of the check `writer`."""
MEMORY = 75e9
PEAK_SHARE = 0.05
"""The largest allowed difference between a measured and a rehearsed peak, as a share of the rehearsed peak."""
PEAK_SHARES = {("sd3", "render"): 0.1}
"""The same for single stages. SD3's render took 21.9 of 20.3 GB on an H100. Its rollout was .41 GB above the rehearsal as well. The
other 1.20 GB are the size of one more copy of the decoder's largest activation, 9 x 256 channels x 512 x 512 in 16 bits (1.21 GB):
probably cuDNN's, because a rehearsal counts no workspace of a convolution."""
CASES = {
    **{"sd3": SD3, "qwen": QWEN, "flux-fill": FLUX_FILL},
    **{"qwen-image-512": QWEN_IMAGE, "qwen-image-384": QWEN_IMAGE_384, "qwen-image-2": QWEN_IMAGE_2},
}
STAGES = ("preflight", "rollout", "render", "update")
GOAL = 2.0
"""The most GPU-seconds of an image on an H100 with verl-omni's settings for Qwen-Image, for which it publishes 3.28."""
PER_IMAGE = "GPU-seconds per image with a made-up reward"
Rehearsed = dict[str, dict[str, float]]
"""For each stage: "peak" in bytes, "flops", and "modelled" in seconds."""


def sd3(target: Target) -> Iterator[Finding]:
    """Stable Diffusion 3.5 Medium: nine images, with the settings of its recipe."""
    target.require_memory(MEMORY)
    built = build(SD3, target)
    _make_moments(built)
    _preflight(built, 0)  # also a warm-up for the step
    take_step(built, 0)
    yield from _findings("sd3", built, target)
    _write_kernels(built, target)


def qwen(target: Target) -> Iterator[Finding]:
    """Qwen-Image-Edit with its 20 B transformer: four images at 1024 px, three denoising steps, of which one trains."""
    target.require_memory(MEMORY)
    built = build(QWEN, target)
    _make_moments(built)
    take_step(built, 0)
    yield from _findings("qwen", built, target)


def flux_fill(target: Target) -> Iterator[Finding]:
    """FLUX.1-Fill with its IP-Adapter: the trial step of RL, whose rows are images with references."""
    target.require_memory(MEMORY)
    built = build(FLUX_FILL, target, phase=1)
    _make_moments(built)
    _preflight(built, built.phase.steps.start)
    yield from _findings("flux-fill", built, target)


def qwen_image(target: Target) -> Iterator[Finding]:
    """Qwen-Image with verl-omni's public settings: one of the 32 groups of a step, at both sizes that verl-omni names.

    A step takes 32 times as long as the group, except that it has two optimizer steps in all, and the group has two as well.
    """
    target.require_memory(MEMORY)
    built = build(QWEN_IMAGE, target)
    _make_moments(built)
    limit = GOAL if target.machine in ("h100", "h200") and not target.tiny else None
    for side in (512, 384):
        built.parts.model.size = (side // 8, side // 8) if target.tiny else (side, side)
        built.clock.clear()
        take_step(built, 0)
        yield at_most(f"{side} px: {PER_IMAGE}, of 3.28 of verl-omni with its judge on H800", _per_image(built), limit)
        yield from _findings(f"qwen-image-{side}", built, target, prefix=f"{side} px, ")


def qwen_image_2(target: Target) -> Iterator[Finding]:
    """Qwen-Image-2.1 with Miles-Diffusion's public settings: eight images, of which a step has 256. No time is published."""
    target.require_memory(MEMORY)
    built = build(QWEN_IMAGE_2, target)
    _make_moments(built)
    take_step(built, 0)
    yield measured(PER_IMAGE, _per_image(built))
    yield from _findings("qwen-image-2", built, target)


def _per_image(built: Built) -> float:
    """Seconds of all stages of the measured step, divided by its images."""
    return sum(built.clock.seconds.values()) / len(built.phase.batch(0))


def _preflight(built: Built, step: int) -> None:
    with built.clock("preflight"):
        preflight(built.run, built.phase, step=step, rows=min(ROWS, len(built.phase.batch(step))))


def _make_moments(built: Built) -> None:
    """Make the optimizer's moments, which a rehearsal counts too, by a step with learning rate 0, which changes no weight."""
    trained = [weight for weight in built.stepper.module.parameters() if weight.requires_grad]
    built.stepper.backward(sum(weight.float().flatten()[:1].sum() for weight in trained))
    built.stepper.step(0.0)


def take_step(built: Built, number: int) -> None:
    """Do a whole training step with the code of the library."""
    update(built.run, built.phase, number, collect(built.run, built.phase, number))


def _findings(name: str, built: Built, target: Target, *, prefix: str = "") -> Iterator[Finding]:
    """Time, MFU and peak memory of each stage. The peaks are compared to the rehearsed peaks."""
    rehearsed: Rehearsed = {} if target.tiny else json.loads(KEPT.read_text(encoding="utf-8"))[name]
    published = PUBLISHED_FLOPS.get(target.machine)
    for stage in STAGES:
        if stage not in built.clock.seconds:
            continue
        seconds = built.clock.seconds[stage]
        yield measured(f"{prefix}{stage}: time", seconds, "s")
        expected = rehearsed.get(stage)
        if expected is None:
            continue
        yield measured(f"{prefix}{stage}: modelled time on an H100", expected["modelled"], "s")
        if published is not None:
            yield measured(f"{prefix}{stage}: MFU", 100 * expected["flops"] / seconds / published, "%")
        share = PEAK_SHARES.get((name, stage), PEAK_SHARE)
        yield near(f"{prefix}{stage}: peak", built.clock.peaks[stage] / 1e9, expected["peak"] / 1e9, share=share, unit="GB")


def _write_kernels(built: Built, target: Target) -> None:
    """Profile one denoising step and write its kernels to ``sd3-kernels.txt``."""
    from torch.profiler import ProfilerActivity, profile

    policy, batch = built.run.policy, built.phase.batch(2)
    conditioning = policy.model.encode(batch.tasks).take(torch.tensor(batch.group, device=target.device))
    noise = policy.model.initial_noise(conditioning, [torch.Generator().manual_seed(0)] * len(batch))
    sigma = torch.full((len(batch),), 0.5, device=target.device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if target.is_cuda else [])]
    with profile(activities=activities) as profiled, torch.no_grad():
        policy.model.velocity(policy.model.module, noise, sigma, conditioning)
        target.synchronize()
    order = "self_cuda_time_total" if target.is_cuda else "self_cpu_time_total"
    text = profiled.key_averages().table(sort_by=order, row_limit=25)
    (target.folder / "sd3-kernels.txt").write_text(text, encoding="utf-8")


def rehearse_case(name: str) -> Rehearsed:
    """Rehearse a case with the measured rates of an H100, and return the figures of each stage of its last phase."""
    from retouch_plan.dry_run import dry_run, seconds
    from retouch_plan.machines import MACHINES

    machine = replace(MACHINES["h100"], **MEASURED["profile"])
    with tempfile.TemporaryDirectory() as folder:
        found = dry_run(CASES[name].load(Path(folder), tiny=False), machine)
    last = f"{found.phases[-1].name}: " if len(found.phases) > 1 else ""
    return {
        stage: {
            "peak": float(found.stages[last + stage].peak),
            "flops": float(sum(found.stages[last + stage].work.flops.values())),
            "modelled": seconds(found.stages[last + stage].work, machine),
        }
        for stage in STAGES
        if last + stage in found.stages
    }


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    figures = {name: rehearse_case(name) for name in CASES}
    KEPT.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n", encoding="utf-8")
