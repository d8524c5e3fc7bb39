"""Transitions against golden vectors, torch.distributions, the diffusers scheduler and the marginals that they must keep."""

import json
import math
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from jaxtyping import TypeCheckError
from torch import Tensor
from torch.distributions import Normal

from retouch.core.transitions import TransitionResult, transition

GOLDEN = json.loads((Path(__file__).parents[1] / "support" / "golden" / "flow_transitions.json").read_text())["cases"]
REFUSED = (ValueError, TypeCheckError)  # the second where annotations are checked at run time
STOCHASTIC = ["sde", "cps", "dance"]


def draw(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(*shape, generator=generator) for _ in range(3))


def column(value: float, rows: int) -> Tensor:
    return torch.full((rows,), value)


def act(kind: str, x: Tensor, velocity: Tensor, noise: Tensor, sigma: float, sigma_next: float, **options) -> TransitionResult:
    options = {"noise_level": 0.7, "sigma_max": 0.95, "reduction": "mean"} | options
    return transition(kind, x, velocity, column(sigma, len(x)), column(sigma_next, len(x)), noise=noise, **options)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: f"{c['kind']}-{c['num_steps']}-{c['step']}")
def test_golden_vectors(case):
    sigmas, step = case["sigmas"], case["step"]
    x, velocity, following, mean = (torch.tensor(case[name]) for name in ("sample", "velocity", "next_sample", "mean"))
    columns = (column(sigmas[step], len(x)), column(sigmas[step + 1], len(x)))
    options = {"noise_level": case["noise_level"], "sigma_max": sigmas[1], "reduction": "mean"}
    ours = transition(case["kind"], x, velocity, *columns, next=following, **options)
    torch.testing.assert_close(ours.mean, mean, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(ours.log_prob, torch.tensor(case["log_prob_mean_over_dims"]), atol=1e-6, rtol=1e-6)
    assert torch.equal(ours.next, following)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=case["shift"])
    scheduler.set_timesteps(case["num_steps"])
    torch.testing.assert_close(scheduler.sigmas, torch.tensor(sigmas), atol=1e-7, rtol=0)
    noise = (following - mean) / ours.step_std.view(-1, 1, 1, 1)
    rolled = transition(case["kind"], x, velocity, *columns, noise=noise, **options)
    torch.testing.assert_close(rolled.next, following, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["sde", "dance"])
def test_log_prob_equals_torch_distributions(kind, reduction):
    ours = act(kind, *draw(3, 2, 4, 4), 0.8, 0.7, reduction=reduction)
    each = Normal(ours.mean, ours.step_std.view(3, 1, 1, 1)).log_prob(ours.next).flatten(1)
    torch.testing.assert_close(ours.log_prob, each.mean(1) if reduction == "mean" else each.sum(1))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cps_log_prob_is_minus_the_squared_distance(reduction):
    ours = act("cps", *draw(3, 2, 4, 4), 0.8, 0.7, reduction=reduction)
    distance = (ours.next - ours.mean).square().flatten(1)
    torch.testing.assert_close(ours.log_prob, -(distance.mean(1) if reduction == "mean" else distance.sum(1)))


def test_sde_at_sigma_one_takes_its_noise_from_the_second_sigma():
    x, velocity, noise = draw(2, 8)
    for sigma_max in (0.96, 0.9):
        ours = act("sde", x, velocity, noise, 1.0, sigma_max, sigma_max=sigma_max)
        s = 0.7 * math.sqrt(1 / (1 - sigma_max))
        torch.testing.assert_close(ours.step_std, column(s * math.sqrt(1 - sigma_max), 2))
        torch.testing.assert_close(ours.mean, x * (1 + s * s / 2 * (sigma_max - 1)) + velocity * (sigma_max - 1))
    append_dims = transition(
        "sde",
        x,
        velocity,
        column(1.0, 2),
        column(0.9, 2),
        noise_level=0.7,
        sigma_max=torch.tensor([0.9, 0.96]),
        reduction="mean",
        noise=noise,
    )
    assert append_dims.step_std[0] < append_dims.step_std[1]


def test_dance_mean_follows_the_score():
    x, velocity, noise = draw(4, 16)
    eta, sigma, dt = 0.3, 0.6, -0.1
    clean = x - sigma * velocity
    score = -(x - (1 - sigma) * clean) / sigma**2
    ours = act("dance", x, velocity, noise, sigma, sigma + dt, noise_level=eta)
    torch.testing.assert_close(ours.mean, x + dt * velocity - 0.5 * eta**2 * score * dt)
    torch.testing.assert_close(ours.step_std, column(eta * math.sqrt(-dt), 4))


@pytest.mark.parametrize("kind", STOCHASTIC)
@pytest.mark.parametrize(("sigma", "sigma_next"), [(1.0, 0.95), (0.6, 0.5), (0.2, 0.0)])
def test_without_noise_every_kind_is_the_euler_step(kind, sigma, sigma_next):
    x, velocity, noise = draw(3, 2, 5)
    ours = act(kind, x, velocity, noise, sigma, sigma_next, noise_level=0.0)
    torch.testing.assert_close(ours.next, x + (sigma_next - sigma) * velocity, atol=1e-6, rtol=1e-6)
    assert torch.equal(ours.next, ours.mean)
    assert (ours.step_std == 0).all()
    assert ours.log_prob.isnan().all()


def test_ode_is_the_diffusers_scheduler():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(6)
    x, velocity, _ = draw(2, 4, 3)
    theirs = ours = x
    for step, timestep in enumerate(scheduler.timesteps):
        theirs = scheduler.step(velocity + 0.1 * theirs, timestep, theirs, return_dict=False)[0]
        sigma, sigma_next = (column(float(scheduler.sigmas[i]), 2) for i in (step, step + 1))
        done = transition("ode", ours, velocity + 0.1 * ours, sigma, sigma_next, noise_level=0.0, sigma_max=1.0, reduction="mean")
        ours = done.next
        assert done.log_prob.isnan().all()
        assert (done.step_std == 0).all()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", STOCHASTIC)
def test_log_prob_gradient_closed_form(kind, reduction):
    x, velocity, noise = draw(3, 2, 4)
    velocity.requires_grad_()
    acted = act(kind, x, velocity, noise, 0.7, 0.5, reduction=reduction)
    assert not acted.next.requires_grad
    (grad,) = torch.autograd.grad(acted.log_prob.sum(), velocity, retain_graph=True)
    (per_velocity,) = torch.autograd.grad(acted.mean.sum(), velocity)
    variance = acted.step_std.view(3, 1, 1).square() if kind != "cps" else torch.tensor(0.5)
    elements = 8 if reduction == "mean" else 1
    torch.testing.assert_close(grad, ((acted.next - acted.mean) / variance * per_velocity / elements).detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", STOCHASTIC)
def test_any_float_is_cast_to_fp32_before_anything_is_computed(kind, dtype):
    given = [tensor.to(dtype) for tensor in (*draw(2, 8), column(0.75, 2), column(0.5, 2))]
    options = {"noise_level": 0.7, "sigma_max": 0.95, "reduction": "mean"}
    for name in ("noise", "next"):
        ours, expected = (
            transition(kind, x, velocity, sigma, sigma_next, **{name: third}, **options)
            for x, velocity, third, sigma, sigma_next in (given, [tensor.float() for tensor in given])
        )
        for field in ("next", "log_prob", "mean", "step_std"):
            assert getattr(ours, field).dtype == torch.float32
            assert torch.equal(getattr(ours, field), getattr(expected, field))


def test_the_stored_next_latent_gets_no_gradient():
    x, velocity, reached = draw(2, 8)
    leaves = [tensor.requires_grad_() for tensor in (velocity, reached)]
    columns = (column(0.7, 2), column(0.5, 2))
    log_prob = transition("sde", x, velocity, *columns, noise_level=0.7, sigma_max=0.95, reduction="mean", next=reached).log_prob
    grads = torch.autograd.grad(log_prob.sum(), leaves, allow_unused=True)
    assert grads[0].abs().min() > 0
    assert grads[1] is None


@pytest.mark.parametrize("kind", ["cps", "sde", "dance"])
def test_a_row_without_density_is_nan_and_can_be_masked_out(kind):
    x, velocity, noise = draw(2, 6)
    sigma, sigma_next = (torch.tensor([0.5, 0.3]), torch.tensor([0.3, 0.0]))
    noise_level = 0.7 if kind == "cps" else 0.0
    options = {"noise_level": noise_level, "sigma_max": 0.95, "reduction": "mean"}
    without = torch.tensor([kind != "cps", True])
    for given in ({"noise": noise}, {"next": noise}):
        leaf = velocity.clone().requires_grad_()
        done = transition(kind, x, leaf, sigma, sigma_next, **given, **options)
        assert torch.equal(done.log_prob.isnan(), without)
        assert torch.equal(done.step_std == 0, without)
        done.log_prob.masked_fill(without, 0).sum().backward()
        assert (leaf.grad[without] == 0).all()
        assert (leaf.grad[~without] != 0).all()
        if "noise" in given:
            assert torch.equal(done.next[without], done.mean[without])
    assert transition("cps", x, velocity, sigma, sigma_next, noise=noise, **options | {"noise_level": 0.7}).log_prob.mean().isnan()


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("euler", {}, "'sde', 'cps', 'dance' or 'ode'"),
        ("cps", {"noise_level": 1.2}, "0 to 1, or use 'sde'"),
        ("sde", {"noise_level": -0.1}, "0 or more"),
        ("sde", {"noise_level": math.nan}, "0 or more"),
        ("sde", {"reduction": "max"}, "'mean' or 'sum'"),
        ("sde", {"next": torch.zeros(2, 6)}, "give either noise"),
        ("sde", {"noise": None}, "give either noise"),
        ("ode", {}, "neither for 'ode'"),
    ],
)
def test_invalid_arguments_raise_with_the_valid_values(kind, change, says):
    x, velocity, noise = draw(2, 6)
    with pytest.raises(REFUSED, match=f"{says}|Type-check"):
        act(kind, x, velocity, change.get("noise", noise), 0.5, 0.3, **{k: v for k, v in change.items() if k != "noise"})
