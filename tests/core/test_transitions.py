"""Transitions, divergences, RatioNorm and windows, against golden vectors, torch.distributions and published formulas."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from jaxtyping import TypeCheckError
from torch import Tensor
from torch.distributions import Categorical, Normal, kl_divergence

from retouch.core.random import generator
from retouch.core.surrogates import gaussian_kl, k3, velocity_mse
from retouch.core.transitions import TransitionResult, gradient_balance, ratio_norm, transition
from retouch.core.windows import all_steps, random_window, sliding_window

# Transitions against golden vectors, torch.distributions, the diffusers scheduler and the marginals t

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
@pytest.mark.parametrize("kind", STOCHASTIC)
def test_log_prob_is_that_of_the_normal_distribution_and_of_cps_minus_the_squared_distance(kind, reduction):
    ours = act(kind, *draw(3, 2, 4, 4), 0.8, 0.7, reduction=reduction)
    normal = Normal(ours.mean, ours.step_std.view(3, 1, 1, 1))
    each = (-(ours.next - ours.mean).square() if kind == "cps" else normal.log_prob(ours.next)).flatten(1)
    torch.testing.assert_close(ours.log_prob, each.mean(1) if reduction == "mean" else each.sum(1))


def test_sde_at_sigma_one_takes_its_noise_from_the_second_sigma():
    x, velocity, noise = draw(2, 8)
    for sigma_max in (0.96, 0.9):
        ours = act("sde", x, velocity, noise, 1.0, sigma_max, sigma_max=sigma_max)
        s = 0.7 * math.sqrt(1 / (1 - sigma_max))
        torch.testing.assert_close(ours.step_std, column(s * math.sqrt(1 - sigma_max), 2))
        torch.testing.assert_close(ours.mean, x * (1 + s * s / 2 * (sigma_max - 1)) + velocity * (sigma_max - 1))
    each = act("sde", x, velocity, noise, 1.0, 0.9, sigma_max=torch.tensor([0.9, 0.96]))
    assert each.step_std[0] < each.step_std[1]


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


# RatioNorm against the published formula, and its two purposes


def pair(
    kind: str, sigma: float, sigma_next: float, *, rows: int = 4, reduction: str = "mean"
) -> tuple[TransitionResult, TransitionResult]:
    """A sampled step, and the same step evaluated with another velocity."""
    generator = torch.Generator().manual_seed(0)
    x, velocity, other, noise = (torch.randn(rows, 3, 5, generator=generator) for _ in range(4))
    columns = (torch.full((rows,), sigma), torch.full((rows,), sigma_next))
    options = {"noise_level": 0.7, "sigma_max": 0.95, "reduction": reduction}
    acted = transition(kind, x, velocity, *columns, noise=noise, **options)
    moved = (velocity + 0.1 * other).requires_grad_()
    return acted, transition(kind, x, moved, *columns, next=acted.next, **options)


@pytest.mark.parametrize(
    ("kind", "reduction"), [("sde", "mean"), ("sde", "sum"), ("dance", "mean"), ("dance", "sum"), ("cps", "mean")]
)
def test_ratio_norm_equals_the_published_formula(kind, reduction):
    """Of cps, whose log-probability has no variance, that of the Gaussian with its mean and standard deviation."""
    acted, new = pair(kind, 0.8, 0.6, reduction=reduction)
    moved = (new.mean - acted.mean).square().flatten(1)
    moved, variance = moved.mean(1) if reduction == "mean" else moved.sum(1), acted.step_std**2
    scale = 2 * variance if kind == "cps" else 1
    expected = ((new.log_prob - acted.log_prob) / scale + moved / (2 * variance)) * acted.step_std
    found = ratio_norm(acted.next, new.mean, acted.mean, step_std=acted.step_std, reduction=reduction)
    torch.testing.assert_close(found, expected, atol=1e-5 if kind != "cps" else 1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("measure", "std", "slope"),
    [
        (lambda mean, std: ratio_norm(torch.ones(2, 3), mean, torch.zeros(2, 3), step_std=std, reduction="mean"), 0.5, 2 / 3),
        (lambda mean, std: gaussian_kl(mean, torch.zeros(2, 3), std, reduction="mean"), 1.0, 1 / 3),
    ],
    ids=["ratio_norm", "gaussian_kl"],
)
def test_what_has_no_density_is_nan_and_can_be_masked_out(measure, std, slope):
    mean = torch.ones(2, 3, requires_grad=True)
    found = measure(mean, torch.tensor([0.0, std]))
    assert found.isnan().tolist() == [True, False]
    found.masked_fill(torch.tensor([True, False]), 0).sum().backward()
    torch.testing.assert_close(mean.grad, torch.tensor([[0.0] * 3, [slope] * 3]))


# Divergences against exact sums, torch.distributions and Monte Carlo over real transitions


def test_k3_has_the_kl_as_its_exact_expectation():
    generator = torch.Generator().manual_seed(0)
    p, q = (Categorical(logits=torch.randn(4, 9, generator=generator)) for _ in range(2))
    values = k3(p.logits, q.logits)
    assert (values >= 0).all()
    torch.testing.assert_close((p.probs * values).sum(1), kl_divergence(p, q))


@pytest.mark.parametrize("padding", [math.nan, -math.inf, 1e4])
def test_k3_of_masked_actions_is_zero_with_zero_gradient(padding):
    mask = torch.tensor([[True, False, True]])
    log_probs = torch.tensor([[-1.0, padding, -2.0]], requires_grad=True)
    values = k3(log_probs, torch.tensor([[-1.5, 0.0, -1.0]]), mask=mask)
    values.sum().backward()
    assert values[0, 1] == 0
    assert log_probs.grad[0, 1] == 0
    assert (values[mask] > 0).all()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gaussian_kl_equals_torch_distributions(reduction):
    generator = torch.Generator().manual_seed(0)
    mean, reference = (torch.randn(3, 2, 4, 4, generator=generator) for _ in range(2))
    step_std = torch.tensor([0.1, 0.5, 2.0])
    each = kl_divergence(Normal(mean, step_std.view(3, 1, 1, 1)), Normal(reference, step_std.view(3, 1, 1, 1))).flatten(1)
    expected = each.mean(1) if reduction == "mean" else each.sum(1)
    torch.testing.assert_close(gaussian_kl(mean, reference, step_std, reduction=reduction), expected)


# Windows


def test_all_steps_leaves_out_the_last():
    assert all_steps(10) == range(9)
    assert all_steps(2) == range(1)


def test_random_window_uses_every_valid_start_and_no_other():
    windows = [random_window(10, 3, low=1, high=6, generator=generator(0, "window", k)) for k in range(400)]
    starts = Counter(window.start for window in windows)
    assert set(starts) == {1, 2, 3}
    assert min(starts.values()) > 90
    assert all(len(window) == 3 and window.stop <= 6 for window in windows)
    assert random_window(10, 3, low=1, high=6, generator=generator(0, "window", 7)) == windows[7]


def test_sliding_window_advances_and_wraps_around():
    starts = [sliding_window(10, 4, step=step, every=2, stride=2).start for step in range(12)]
    assert starts == [0, 0, 2, 2, 4, 4, 5, 5, 0, 0, 2, 2]
    assert [sliding_window(10, 9, step=step, every=1, stride=1) for step in range(3)] == [range(9)] * 3


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: gaussian_kl(torch.ones(1, 2), torch.ones(1, 2), torch.ones(1), reduction="max"), "'mean' or 'sum'|Type-check"),
        (lambda: all_steps(1), "at least 2"),
        (lambda: random_window(10, 3, low=0, high=10, generator=generator(0)), "high <= 9"),
        (lambda: random_window(10, 3, low=5, high=5, generator=generator(0)), "low < high"),
        (lambda: random_window(10, 4, low=0, high=3, generator=generator(0)), "give 1 to 3"),
        (lambda: random_window(10, 0, low=0, high=3, generator=generator(0)), "give 1 to 3"),
        (lambda: sliding_window(10, 10, step=0, every=1, stride=1), "give 1 to 9"),
        (lambda: sliding_window(10, 3, step=0, every=1, stride=4), "stride 1 to 3"),
        (lambda: sliding_window(10, 3, step=0, every=0, stride=1), "every >= 1"),
        (lambda: sliding_window(10, 3, step=-1, every=1, stride=1), "step >= 0"),
    ],
)
def test_invalid_windows_and_reductions_raise_with_the_valid_values(call, says):
    with pytest.raises(REFUSED, match=says):
        call()


def chain(kind: str, num_steps: int) -> list[float]:
    """std(x) / sigma after each step but the last, and the last std, on data that is the point 0.7, with its exact velocity."""
    generator = torch.Generator().manual_seed(0)
    grid = torch.linspace(1, 1 / num_steps, num_steps)
    sigmas = torch.cat([3.0 * grid / (1 + 2.0 * grid), torch.zeros(1)])
    x = torch.randn(200_000, 1, generator=generator)
    spreads = []
    for sigma, sigma_next in zip(sigmas[:-1].tolist(), sigmas[1:].tolist(), strict=True):
        noise = torch.randn(x.shape, generator=generator) if sigma_next > 0 else torch.zeros_like(x)
        x = act(kind, x, (x - 0.7) / sigma, noise, sigma, sigma_next, sigma_max=float(sigmas[1])).next
        spreads.append(float(x.std()) / (sigma_next if sigma_next > 0 else 1))
    torch.testing.assert_close(x.mean(), torch.tensor(0.7), atol=2e-3, rtol=0)
    return spreads


def test_cps_keeps_the_marginals_and_sde_disperses_too_much_at_few_steps():
    kept, wider = chain("cps", 10), chain("sde", 10)
    assert all(abs(spread - 1) < 0.01 for spread in kept[:-1])
    assert kept[-1] < 1e-6
    assert wider[0] == pytest.approx(1.04, abs=0.02)
    assert max(wider[:-1]) == pytest.approx(1.29, abs=0.03)
    assert wider[-1] == pytest.approx(0.106, abs=0.005)


def test_gaussian_kl_of_the_sde_equals_the_scaled_velocity_mse():
    a, sigma, sigma_next = 0.7, 0.6, 0.45
    generator = torch.Generator().manual_seed(0)
    x, velocity, reference_velocity, noise = (torch.randn(2, 8, generator=generator) for _ in range(4))
    columns = (torch.full((2,), sigma), torch.full((2,), sigma_next))
    options = {"noise_level": a, "sigma_max": 0.9, "reduction": "mean"}
    acted = transition("sde", x, velocity, *columns, noise=noise, **options)
    reference = transition("sde", x, reference_velocity, *columns, next=acted.next, **options)
    dt = sigma - sigma_next
    factor = dt * (1 - sigma) * (1 + a * a / 2) ** 2 / (2 * a * a * sigma)
    torch.testing.assert_close(
        gaussian_kl(acted.mean, reference.mean, acted.step_std, reduction="mean"),
        factor * velocity_mse(velocity, reference_velocity),
    )


@pytest.mark.parametrize("kind", STOCHASTIC)
@pytest.mark.parametrize(("sigma", "sigma_next"), [(1.0, 0.95), (0.8, 0.7), (0.3, 0.01)])
def test_step_std_is_the_standard_deviation_of_next(kind, sigma, sigma_next):
    x, velocity, noise = draw(100_000, 1)
    ours = act(kind, x[:1].expand_as(x), velocity[:1].expand_as(x), noise, sigma, sigma_next)
    torch.testing.assert_close(ours.next.std(), ours.step_std[0], rtol=0.01, atol=0)
    torch.testing.assert_close(ours.next.mean(), ours.mean[0, 0], rtol=0, atol=0.02 * float(ours.step_std[0]))


@pytest.mark.parametrize("sigma", [0.95, 0.5, 0.05])
def test_sde_mean_identity(sigma):
    a, dt = 0.7, -0.04
    x, velocity, noise = draw(4, 16)
    expected = x * (1 + a * a * dt / (2 * (1 - sigma))) + velocity * (1 + a * a / 2) * dt
    ours = act("sde", x, velocity, noise, sigma, sigma + dt)
    torch.testing.assert_close(ours.mean, expected, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(ours.step_std, column(a * math.sqrt(sigma / (1 - sigma)) * math.sqrt(-dt), 4))


@pytest.mark.parametrize("kind", STOCHASTIC)
def test_evaluating_a_rollout_gives_the_same_bits(kind):
    x, velocity, noise = draw(4, 3, 5)
    columns = (torch.tensor([1.0, 0.9, 0.5, 0.2]), torch.tensor([0.95, 0.7, 0.2, 0.1]))
    options = {"noise_level": 0.7, "sigma_max": 0.95, "reduction": "mean"}
    acted = transition(kind, x, velocity, *columns, noise=noise, **options)
    again = transition(kind, x, velocity, *columns, next=acted.next, **options)
    for name in ("next", "log_prob", "mean", "step_std"):
        assert torch.equal(getattr(acted, name), getattr(again, name))


@pytest.mark.parametrize("kind", ["sde", "cps", "dance"])
def test_log_ratio_has_mean_0_and_the_same_std_at_every_step(kind):
    generator = torch.Generator().manual_seed(0)
    rows, elements, shift = 40_000, 8, 0.02
    spreads = []
    for sigma, sigma_next in [(0.9, 0.8), (0.5, 0.2), (0.2, 0.15)]:
        x, velocity = torch.zeros(rows, elements), torch.ones(rows, elements)
        noise = torch.randn(rows, elements, generator=generator)
        columns = (torch.full((rows,), sigma), torch.full((rows,), sigma_next))
        acted = transition(kind, x, velocity, *columns, noise_level=0.7, sigma_max=0.95, reduction="mean", noise=noise)
        log_ratio = ratio_norm(acted.next, acted.mean + shift, acted.mean, step_std=acted.step_std, reduction="mean")
        spreads.append(float(log_ratio.std()))
        assert abs(float(log_ratio.mean())) < 4 * spreads[-1] / rows**0.5
    assert spreads == pytest.approx([shift / elements**0.5] * 3, rel=0.02)


def test_gradient_balance_gives_the_same_gradient_norm_at_every_step():
    """With it, the gradient of the sde's log-ratio with respect to the velocity has the same scale whatever dt is."""
    scales = []
    for sigma, sigma_next in [(0.9, 0.8), (0.5, 0.2), (0.2, 0.15)]:
        generator = torch.Generator().manual_seed(0)
        x, noise = torch.randn(1, 64, generator=generator), torch.randn(1, 64, generator=generator)
        velocity = torch.zeros(1, 64, requires_grad=True)
        columns = (torch.tensor([sigma]), torch.tensor([sigma_next]))
        acted = transition("sde", x, velocity, *columns, noise_level=0.7, sigma_max=0.95, reduction="mean", noise=noise)
        log_ratio = ratio_norm(acted.next, acted.mean, acted.mean, step_std=acted.step_std, reduction="mean")
        (grad,) = torch.autograd.grad((log_ratio * gradient_balance(*columns)).sum(), velocity)
        scales.append(float(grad.norm()))
    assert scales == pytest.approx([scales[0]] * 3, rel=1e-4)


def test_k3_is_accurate_near_the_reference_and_its_gradient_has_a_closed_form():
    generator = torch.Generator().manual_seed(0)
    log_probs, reference = torch.randn(3, 5, generator=generator).requires_grad_(), torch.randn(3, 5, generator=generator)
    (grad,) = torch.autograd.grad(k3(log_probs, reference).sum(), log_probs)
    torch.testing.assert_close(grad, (1 - (reference - log_probs).exp()).detach())
    d = 1e-3
    assert float(k3(torch.zeros(1, 1), torch.full((1, 1), d))) == pytest.approx(d * d / 2, rel=1e-2)
    values = k3(log_probs, log_probs.detach())
    assert (values == 0).all()
    assert (torch.autograd.grad(values.sum(), log_probs)[0] == 0).all()


def test_velocity_mse_is_the_mean_square():
    generator = torch.Generator().manual_seed(0)
    v, w = torch.randn(3, 2, 5, generator=generator), torch.randn(3, 2, 5, generator=generator)
    torch.testing.assert_close(velocity_mse(v.double(), w.double()), ((v - w) ** 2).mean((1, 2)))
    assert (velocity_mse(v, v) == 0).all()
