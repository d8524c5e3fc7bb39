"""A model in 16 bits computes the velocities of a ratio in forward passes of the same shape in rollout and update."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_policies as tiny
from retouch.models.pipeline import Guided
from retouch.policies.denoising import DenoisingPolicy
from retouch.types import Needs

ROWS = 8


def policy(family: str, dtype: torch.dtype, *, guidance: float = 1.0, microbatch: int = 4, **how: Any) -> DenoisingPolicy:
    """A policy for rollout chunks of 8 rows and, by default, microbatches of 2 rows with 2 actions."""
    made = tiny.policy(family, train="full", copies=(), mode="window", kind="cps", noise_level=0.7, **how)
    made.module.to(dtype)
    model = Guided(made.model, guidance) if guidance > 1 else made.model
    options = {"sampling": made.sampling, "eval_steps": tiny.NUM_STEPS, "microbatch": microbatch, "copies": made.copies}
    return DenoisingPolicy(model, **options)


def ratios(policy: DenoisingPolicy) -> Tensor:
    """The largest |ratio - 1| of each row before any update."""
    trajectory = policy.rollout(tiny.batch(2, ROWS // 2))
    with torch.no_grad():
        made = [policy.evaluate(trajectory, part, Needs()).log_ratio for part in policy.microbatches(trajectory)]
    return (torch.cat(made).exp() - 1).abs()


def shapes(policy: DenoisingPolicy) -> list[int]:
    """A list to which each later forward pass appends its number of rows."""
    rows: list[int] = []
    policy.module.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    return rows


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize("family", ["sd3", "edit"])
def test_the_ratio_of_a_model_in_16_bits_is_1_before_the_first_update(family: str, guidance: float) -> None:
    assert ratios(policy(family, torch.bfloat16, guidance=guidance)).max() == 0


def test_rollout_passes_of_transitions_have_the_row_count_of_the_update() -> None:
    made = policy("sd3", torch.bfloat16, microbatch=6)
    actions = made.sampling.window.actions(num_steps=tiny.NUM_STEPS, seed=3, step=5)
    rows = shapes(made)
    trajectory = made.rollout(tiny.batch(2, ROWS // 2))
    assert len(actions) == 2
    assert sorted(rows) == [6] * 4 + [ROWS] * (tiny.NUM_STEPS - 2)
    rows.clear()
    for part in made.microbatches(trajectory):
        made.evaluate(trajectory, part, Needs())
    assert rows == [6] * 3


@pytest.mark.parametrize(("dtype", "options"), [(torch.float32, {}), (torch.bfloat16, {"equal_shapes": False})])
def test_rollout_of_fp32_or_without_equal_shapes_computes_all_rows_in_one_forward_pass(
    dtype: torch.dtype, options: dict[str, bool]
) -> None:
    made = policy("sd3", dtype, **options)
    rows = shapes(made)
    made.rollout(tiny.batch(2, ROWS // 2))
    assert rows == [ROWS] * tiny.NUM_STEPS


def test_padding_rows_of_a_forward_pass_do_not_change_the_gradient() -> None:
    """7 rows in passes of 4: the last pass is padded with one row, which must not count."""
    torch.manual_seed(0)
    made = policy("sd3", torch.bfloat16)
    trajectory = made.rollout(tiny.batch(1, 7))
    x, sigma = trajectory.latents[:, 0], trajectory.sigmas[:1].expand(7)
    conditioning = trajectory.conditioning.take(trajectory.group)
    gradients = []
    for at_once in (4, None):
        velocity = made._velocity(made.module.float(), x, sigma, conditioning, at_once=at_once)
        assert len(velocity) == 7
        gradients.append(torch.autograd.grad(velocity.square().sum(), made.module.proj_out.weight)[0])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)
