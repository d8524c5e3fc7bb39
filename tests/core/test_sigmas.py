"""Schedules against diffusers' scheduler, bit for bit."""

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift as flux_shift
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_shift as qwen_shift
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from retouch.core.sigmas import calculate_shift, dynamic, static

REFUSED = (ValueError, TypeCheckError)  # the second where annotations are checked at run time
properties = settings(deadline=None, max_examples=60, derandomize=True)
steps = st.integers(2, 60)
terminal = st.none() | st.sampled_from([0.02, 0.1])


def theirs(num_steps: int, grid: str, mu: float | None = None, **config: object) -> torch.Tensor:
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=mu is not None, **config)
    if grid == "steps":
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps), mu=mu)
    else:
        scheduler.set_timesteps(num_steps, mu=mu)
    return scheduler.sigmas


@properties
@given(steps, st.floats(0.3, 12.0), st.sampled_from(["train", "steps"]), terminal)
def test_static_is_the_scheduler(num_steps, shift, grid, shift_terminal):
    expected = theirs(num_steps, grid, shift=shift, shift_terminal=shift_terminal)
    assert torch.equal(static(num_steps, shift, grid=grid, shift_terminal=shift_terminal), expected)


@properties
@given(steps, st.floats(0.1, 3.0), st.sampled_from(["exponential", "linear"]), st.sampled_from(["train", "steps"]), terminal)
def test_dynamic_is_the_scheduler(num_steps, mu, kind, grid, shift_terminal):
    expected = theirs(num_steps, grid, mu=mu, time_shift_type=kind, shift_terminal=shift_terminal)
    assert torch.equal(dynamic(num_steps, mu, kind, grid=grid, shift_terminal=shift_terminal), expected)


def test_defaults_are_what_the_pipelines_do():
    assert torch.equal(static(10, 3.0), theirs(10, "train", shift=3.0))
    assert torch.equal(dynamic(10, 0.8), theirs(10, "steps", mu=0.8))
    assert torch.equal(static(1, 3.0), torch.tensor([1.0, 0.0]))


@properties
@given(st.integers(1, 20_000), st.sampled_from([(4096, 1.15), (8192, 0.9)]))
def test_calculate_shift_is_the_pipelines(image_seq_len, ends):
    max_seq_len, max_shift = ends
    ours = calculate_shift(image_seq_len, max_seq_len=max_seq_len, max_shift=max_shift)
    assert ours == flux_shift(image_seq_len, max_seq_len=max_seq_len, max_shift=max_shift)
    assert ours == qwen_shift(image_seq_len, max_seq_len=max_seq_len, max_shift=max_shift)


@properties
@given(steps, st.floats(0.3, 12.0), terminal)
def test_schedules_fall_from_one_to_zero(num_steps, shift, shift_terminal):
    for sigmas in (
        static(num_steps, shift, shift_terminal=shift_terminal),
        dynamic(num_steps, shift / 4, shift_terminal=shift_terminal),
    ):
        assert sigmas.shape == (num_steps + 1,)
        assert sigmas.dtype == torch.float32
        assert sigmas[0] == pytest.approx(1, abs=1e-6)
        assert sigmas[-1] == 0
        assert (sigmas.diff() < 0).all()
        if shift_terminal is not None:
            assert sigmas[-2] == pytest.approx(shift_terminal, abs=1e-6)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: static(0, 3.0), "at least 1"),
        (lambda: static(10, 0.0), "above 0"),
        (lambda: static(10, 3.0, grid="karras"), "'train' or 'steps'"),
        (lambda: static(10, 3.0, shift_terminal=1.0), "between 0 and 1"),
        (lambda: dynamic(1, 0.8, shift_terminal=0.02), "at least 2 steps"),
        (lambda: dynamic(10, 0.8, "cosine"), "'exponential' or 'linear'"),
        (lambda: dynamic(10, -0.8, "linear"), "above 0"),
    ],
)
def test_bad_schedules_say_what_to_do(call, says):
    with pytest.raises(REFUSED, match=f"{says}|Type-check"):
        call()
