"""The stepper: what it adds up, where it stops, and what it leaves alone."""

import pytest
import torch
from torch import nn

from retouch.distributed.ranks import Ranks
from retouch.distributed.stepper import NonFiniteGradient, ReplicatedStepper


def stepper(weight_decay: float = 0.0) -> ReplicatedStepper:
    module = nn.ModuleDict({"used": nn.Linear(3, 1, bias=False), "idle": nn.Linear(3, 1, bias=False)})
    return ReplicatedStepper(module, Ranks(), weight_decay=weight_decay, max_grad_norm=None)


def weights(made: ReplicatedStepper) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in made.parameters.items()}


def test_losses_add_up_to_one_step() -> None:
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


def test_what_took_no_part_is_not_even_decayed() -> None:
    made = stepper(weight_decay=0.5)
    before = weights(made)
    made.backward(made.module["used"](torch.ones(1, 3)).sum())
    made.step(0.1)
    assert torch.equal(weights(made)["idle.weight"], before["idle.weight"])
    assert not torch.equal(weights(made)["used.weight"], before["used.weight"])


@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_what_is_not_finite_stops_before_the_step(fault: str) -> None:
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


def test_its_state_restores_the_next_step_to_the_bit() -> None:
    torch.manual_seed(0)
    one, other = stepper(), stepper()
    x = torch.randn(2, 3)
    one.backward(one.module["used"](x).sum())
    one.step(0.1)
    other.module.load_state_dict(one.module.state_dict())
    other.load({name: tensor.clone() for name, tensor in one.state().items()})
    for made in (one, other):
        made.backward(made.module["used"](x).square().sum())
        made.step(0.1)
    assert torch.equal(weights(one)["used.weight"], weights(other)["used.weight"])
