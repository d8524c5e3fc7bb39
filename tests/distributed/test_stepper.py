"""The stepper: accumulation, non-finite gradients, weights without gradient, saved state, master weights and fused AdamW."""

import pytest
import torch
from torch import nn

from retouch.distributed.optimizer import NonFiniteGradient, ReplicatedStepper, adamw
from retouch.distributed.ranks import Ranks


def stepper(weight_decay: float = 0.0) -> ReplicatedStepper:
    module = nn.ModuleDict({"used": nn.Linear(3, 1, bias=False), "idle": nn.Linear(3, 1, bias=False)})
    return ReplicatedStepper(module, Ranks(), weight_decay=weight_decay, max_grad_norm=None)


def weights(made: ReplicatedStepper) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in made.parameters.items()}


def test_gradients_of_several_backward_passes_accumulate() -> None:
    torch.manual_seed(0)
    whole, parts = stepper(), stepper()
    parts.module.load_state_dict(whole.module.state_dict())
    x = torch.randn(4, 3)
    whole.backward(whole.module["used"](x).sum())
    for row in x:
        parts.backward(parts.module["used"](row).sum())
    assert whole.step(0.1) == pytest.approx(parts.step(0.1), rel=1e-6)
    for name, weight in weights(whole).items():
        torch.testing.assert_close(weight, weights(parts)[name], rtol=1e-6, atol=0)


def test_weights_without_gradient_are_not_decayed() -> None:
    made = stepper(weight_decay=0.5)
    before = weights(made)
    made.backward(made.module["used"](torch.ones(1, 3)).sum())
    made.step(0.1)
    assert torch.equal(weights(made)["idle.weight"], before["idle.weight"])
    assert not torch.equal(weights(made)["used.weight"], before["used.weight"])


@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_non_finite_loss_or_gradient_raises_and_skips_the_step(fault: str) -> None:
    made = stepper()
    before = weights(made)
    out = made.module["used"](torch.ones(1, 3)).sum()
    # A clamp of NaN has gradient 0, and sqrt at 0 has an infinite gradient with a finite value.
    made.backward((out * torch.nan).clamp(0, 1) if fault == "loss" else (out - out.detach()).sqrt())
    with pytest.raises(NonFiniteGradient, match="the optimizer step was skipped"):
        made.step(0.1)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(made).items())
    made.backward(made.module["used"](torch.ones(1, 3)).sum())
    assert made.step(0.1) > 0


def test_bf16_training_follows_fp32_training_at_a_small_learning_rate() -> None:
    """Most steps of 3e-6 are smaller than the rounding of a bf16 weight of 0.05, so they must be kept elsewhere."""
    torch.manual_seed(0)
    exact = nn.Linear(64, 64, bias=False)
    rounded = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        exact.weight.normal_(std=0.05)
        rounded.weight.copy_(exact.weight)
        exact.weight.copy_(rounded.weight)
    start = exact.weight.detach().clone()
    direction = torch.randn(64, 64)
    steppers = [ReplicatedStepper(module, Ranks(), max_grad_norm=1.0) for module in (exact, rounded)]
    for _ in range(100):
        for made in steppers:
            weight = made.parameters["weight"]
            for _ in range(2):  # microbatches
                made.backward((weight * direction.to(weight.dtype)).sum() / 2)
            made.step(3e-6)
    moved = (exact.weight - start).abs().mean()
    assert 1e-4 < moved < 4e-4
    torch.testing.assert_close(steppers[1].weights["weight"], exact.weight, rtol=0, atol=3e-6)
    assert (rounded.weight.float() - exact.weight).abs().le(2**-8 * exact.weight.abs() + 3e-6).all()
    moves = [module.weight.detach().float() - start for module in (exact, rounded)]
    assert torch.nn.functional.cosine_similarity(moves[0].flatten(), moves[1].flatten(), dim=0) > 0.85
    assert (moves[1] != 0).float().mean() > 0.5


def test_master_weights_are_restored_to_the_bit() -> None:
    torch.manual_seed(0)
    one, other = (ReplicatedStepper(nn.Linear(8, 8, dtype=torch.bfloat16), Ranks()) for _ in range(2))

    def step(made: ReplicatedStepper) -> None:
        made.backward(made.module(torch.ones(2, 8, dtype=torch.bfloat16)).square().sum())
        made.step(1e-3)

    step(one)
    assert one.state()["weight/master"].dtype == one.state()["weight/exp_avg"].dtype == torch.float32
    other.module.load_state_dict(one.module.state_dict())
    other.load({name: tensor.clone() for name, tensor in one.state().items()})
    undo, before = one.snapshot(), {name: tensor.clone() for name, tensor in one.state().items()}
    weight = one.module.weight.detach().clone()
    step(one)
    assert not torch.equal(one.state()["weight/master"], before["weight/master"])
    undo()
    with torch.no_grad():
        one.module.weight.copy_(weight)
        one.module.bias.copy_(before["bias/master"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in one.state().items())
    for made in (one, other):
        step(made)
    assert torch.equal(one.module.weight, other.module.weight)
    assert torch.equal(one.weights["weight"], other.weights["weight"])


def learner(fused: bool | None, dtype: torch.dtype = torch.float32) -> ReplicatedStepper:
    torch.manual_seed(0)
    module = nn.ModuleDict({"first": nn.Linear(16, 8), "second": nn.Linear(8, 1)}).to(dtype)
    return ReplicatedStepper(module, Ranks(), weight_decay=0.1, fused=fused)


def learn(made: ReplicatedStepper, steps: int) -> None:
    for number in range(steps):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(number)).to(next(made.module.parameters()).dtype)
        made.backward(made.module["second"](made.module["first"](x).relu()).square().mean())
        made.step(1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_steps_match_unfused_steps_up_to_rounding(dtype: torch.dtype) -> None:
    plain, fused = learner(None, dtype), learner(True, dtype)
    before = weights(plain)
    for made in (plain, fused):
        learn(made, 5)
    for name, weight in weights(plain).items():
        assert not torch.equal(weight, before[name])
        torch.testing.assert_close(weight, weights(fused)[name], rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)
    assert [made.optimizer.param_groups[0]["fused"] for made in (plain, fused)] == [None, True]


@pytest.mark.parametrize(("saved", "resumed"), [(True, True), (None, True), (True, None)])
def test_optimizer_state_resumes_between_fused_and_unfused_adamw(saved: bool | None, resumed: bool | None) -> None:
    one, other = learner(saved), learner(resumed)
    learn(one, 3)
    other.module.load_state_dict(one.module.state_dict())
    other.load({name: tensor.clone() for name, tensor in one.state().items()})
    assert other.state()["first.weight/step"] == 3
    undo, kept = other.snapshot(), weights(other)
    for made in (one, other):
        learn(made, 2)
    for name, weight in weights(one).items():
        if saved == resumed:
            assert torch.equal(weight, weights(other)[name])
        else:
            torch.testing.assert_close(weight, weights(other)[name], rtol=1e-5, atol=1e-7)
    undo()
    assert other.state()["first.weight/step"] == 3
    other.module.load_state_dict(kept)


def test_adamw_is_fused_by_default_only_on_an_accelerator() -> None:
    """The meta device is used in place of a real accelerator: no kernel runs."""

    def chosen(device: str, fused: bool | None) -> bool:
        made = ReplicatedStepper(nn.Linear(2, 2, device=device), Ranks(device=torch.device(device)), fused=fused)
        return bool(made.optimizer.param_groups[0]["fused"])

    assert [chosen("cpu", None), chosen("cpu", True), chosen("meta", None), chosen("meta", False)] == [False, True, True, False]


def test_sharded_and_replicated_weights_are_in_separate_parameter_groups() -> None:
    """On an accelerator, AdamW takes all weights of a group at once, and fails if only some of them are sharded."""

    def made(sharded: set[str]) -> ReplicatedStepper:
        torch.manual_seed(0)
        module = nn.Linear(3, 2)
        for name, weight in module.named_parameters():
            if name in sharded:
                weight.to_local = weight.detach
        return ReplicatedStepper(module, Ranks(), fused=True)

    def kinds(optimizer: torch.optim.Optimizer) -> list[list[bool]]:
        return [[hasattr(weight, "to_local") for weight in group["params"]] for group in optimizer.param_groups]

    mixed, plain = made({"weight"}), made(set())
    assert (kinds(mixed.optimizer), kinds(plain.optimizer)) == ([[True], [False]], [[False, False]])
    assert kinds(adamw(mixed.weights.values(), fused=False)) == [[True], [False]]
    for each in (mixed, plain):
        each.backward(each.module(torch.ones(3)).square().sum())
        each.step(0.1)
    assert all(torch.equal(weight, weights(plain)[name]) for name, weight in weights(mixed).items())
