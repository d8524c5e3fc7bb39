"""Compares a step of Stable Diffusion 3.5 Medium to plain loops over the same weights: a bare loop, and one like Flow-GRPO's."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from cases import SD3, Built, build
from findings import Finding, at_most, measured, near
from plain_loops import PlainLoop, Settings, Style
from target import Target

from retouch.run.step import Run, collect, update

MOST = 1.05
"""The longest allowed step of the library, as a multiple of the step of the bare loop."""
ROUNDS = 2


def run(target: Target) -> Iterator[Finding]:
    """Time steps of the library and of the plain loops in turn."""
    target.require_memory(75e9)
    built = build(SD3, target)
    library = replace(built.run, clock=lambda stage: nullcontext())
    bare = _plain(built, Style.BARE)
    prompt = built.phase.batch(0).tasks[0].instruction
    library_rows = _rows(built, partial(_step, library, built, 0))  # this step is also a warm-up
    bare_rows = _rows(built, partial(bare.step, prompt))
    yield near("rows through the transformer in the bare loop", bare_rows, library_rows, share=0.0)
    library_times, bare_times = [], []
    for number in range(1, ROUNDS + 1):
        library_times.append(target.elapsed(partial(_step, library, built, number)))
        bare_times.append(target.elapsed(partial(bare.step, prompt)))
    ours, theirs = min(library_times), min(bare_times)
    images = len(built.phase.batch(0))
    yield measured("library", ours / images, "s per image")
    yield measured("bare diffusers loop", theirs / images, "s per image")
    yield at_most("library over bare", ours / theirs, None if target.tiny else MOST)
    del bare
    yield from _flow_grpo(built, target, prompt, ours)


def _rows(built: Built, call: Callable[[], object]) -> int:
    """The number of rows that go through the transformer during ``call``; a guided row counts as two."""
    rows: list[int] = []
    hook = built.parts.model.module.register_forward_pre_hook(
        lambda module, args, given: rows.append(len(given["hidden_states"])), with_kwargs=True
    )
    try:
        call()
    finally:
        hook.remove()
    return sum(rows)


def _step(library: Run, built: Built, number: int) -> None:
    update(library, built.phase, number, collect(library, built.phase, number))


def _flow_grpo(built: Built, target: Target, prompt: str, ours: float) -> Iterator[Finding]:
    """Measure the loop like Flow-GRPO's. Call this last: it changes the dtype of the adapters and allows TF32."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    loop = _plain(built, Style.FLOW_GRPO)
    loop.step(prompt)  # a warm-up
    seconds = target.elapsed(partial(loop.step, prompt))
    yield measured("loop as Flow-GRPO computes", seconds / len(built.phase.batch(0)), "s per image")
    yield measured("library over that loop", ours / seconds)


def _plain(built: Built, style: Style) -> PlainLoop:
    model, rollout, objective = built.parts.model, built.recipe.resolved_phases()[0].rollout, built.phase.objective
    latents, batch = model.latents, built.phase.batch(0)
    settings = Settings(
        rows=len(batch),
        latent=(latents.channels, *(side // latents.latent_pixels for side in model.size)),
        sigmas=model.sigmas(rollout.num_steps, model.encode(batch.tasks)).to(built.parts.ranks.device),
        guidance_scale=rollout.guidance_scale,
        noise_level=rollout.transition.noise_level,
        clip=objective.clip_high,
        kl_weight=objective.kl.weight,
        learning_rate=built.phase.learning_rate(0),
    )
    return PlainLoop(model.module, latents.vae, model.text.embed, settings, style)
