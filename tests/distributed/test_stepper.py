"""The steppers: accumulation, master weights, fused AdamW, moments in 8 bits or CPU memory, and ZeRO-2's shards."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retouch.distributed import zero
from retouch.distributed.optimizer import (
    BLOCK,
    SMALLEST,
    NonFiniteGradient,
    ReplicatedStepper,
    StoredMomentsAdamW,
    adamw,
    dequantise,
    quantise,
)
from retouch.distributed.ranks import Ranks
from retouch.distributed.zero import ZeroStepper
from warm_python import run_python

# The stepper


def stepper(weight_decay: float = 0.0) -> ReplicatedStepper:
    module = nn.ModuleDict({"used": nn.Linear(3, 1, bias=False), "idle": nn.Linear(3, 1, bias=False)})
    return ReplicatedStepper(module, Ranks(), weight_decay=weight_decay, max_grad_norm=None)


def weights(made: ReplicatedStepper) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in made.parameters.items()}


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


# AdamW with moments in 8 bits or in CPU memory


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("shape", [(7,), (BLOCK,), (3, 1000)])
def test_quantisation_error_is_below_2_percent_of_the_block_maximum(signed: bool, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, shape[-1])
    x = x if signed else x.square()
    codes, scales = quantise(x, signed=signed)
    found = dequantise(codes, scales, x, signed=signed)
    assert (codes.dtype, found.shape, len(scales)) == (torch.uint8, x.shape, -(-x.numel() // BLOCK))
    blocks = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % BLOCK)).view(-1, BLOCK).abs().amax(1)
    assert torch.equal(scales, blocks)
    whole = scales.repeat_interleave(BLOCK)[: x.numel()].view(shape)
    assert ((found - x).abs() / whole).max() < 0.02
    assert not dequantise(*quantise(torch.zeros(shape), signed=signed), x, signed=signed).any()


def trained(optimizer: str, width: int, steps: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and the weights of a linear regression of ``width`` columns after some steps."""
    random = torch.Generator().manual_seed(0)
    inputs, wanted = torch.randn(64, width, generator=random), torch.randn(width, 70, generator=random)
    weight = nn.Parameter(torch.zeros(width, 70))
    settings = {"lr": 0.02, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}
    if optimizer == "fp32":
        made: torch.optim.Optimizer = torch.optim.AdamW([weight], **settings)
    else:
        made = StoredMomentsAdamW([weight], **settings, moments=optimizer, local=lambda tensor: tensor.detach())
    for _ in range(steps):
        loss = (inputs @ (weight - wanted)).square().mean()
        made.zero_grad()
        loss.backward()
        made.step()
    return loss.detach(), weight.detach()


def test_8bit_adamw_matches_torch_on_small_tensors_and_stays_close_to_it_on_large_ones() -> None:
    """With moments in CPU memory it matches torch on all."""
    assert 50 * 70 < SMALLEST < 100 * 70
    for moments, width in (("8bit", 50), ("cpu", 100)):
        (loss, weight), (known, exact) = trained(moments, width), trained("fp32", width)
        torch.testing.assert_close(weight, exact, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(loss, known, rtol=1e-5, atol=0)
    (loss, weight), (known, exact) = trained("8bit", 100), trained("fp32", 100)
    assert loss.item() == pytest.approx(known.item(), rel=0.05)
    assert (weight - exact).norm() / exact.norm() < 0.1


ON_A_DEVICE = """
import json, torch, several_devices
from torch import nn
from retouch.distributed.ranks import Ranks
from retouch.distributed.optimizer import ReplicatedStepper

def step(made):
    for parameter in made.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    made.step(1e-3)

device = torch.device("pretend:0")
with several_devices.SimulatedDevices():
    module = nn.Linear(8, 8).to(device)
    made, resumed = (ReplicatedStepper(module, Ranks(device=device), moments="cpu") for _ in range(2))
    step(made)
    step(made)
    resumed.load({name: tensor.cpu() for name, tensor in made.state().items()})
    step(resumed)
    print(json.dumps([sorted(several_devices.devices_of([*each.state().values()])) for each in (made, resumed)]))
"""


def test_moments_of_weights_on_a_device_are_in_cpu_memory() -> None:
    printed = run_python("-c", ON_A_DEVICE, search=[Path(__file__).parents[1] / "support"])
    assert json.loads(printed) == [["cpu"], ["cpu"]]


def stepper_of_moments(seed: int, moments: str = "8bit") -> ReplicatedStepper:
    torch.manual_seed(seed)
    return ReplicatedStepper(nn.Linear(100, 80, dtype=torch.bfloat16), Ranks(), moments=moments)


def step(made: ReplicatedStepper, key: int) -> None:
    inputs = torch.randn(4, 100, generator=torch.Generator().manual_seed(key)).bfloat16()
    made.backward(made.module(inputs).float().square().mean())
    made.step(1e-2)


@pytest.mark.parametrize("moments", ["8bit", "cpu"])
def test_saved_optimizer_state_resumes_bitwise(moments: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    one, other = stepper_of_moments(0, moments), stepper_of_moments(1, moments)
    for key in range(3):
        step(one, key)
    state = {name: tensor.contiguous() for name, tensor in one.state().items()}
    assert ("weight/exp_avg_codes" in state) == (moments == "8bit")
    assert state["bias/exp_avg"].dtype == torch.float32
    save_file(state, tmp_path / "state.safetensors")
    other.module.load_state_dict(one.module.state_dict())
    other.load(load_file(tmp_path / "state.safetensors"))
    restore = other.snapshot()
    step(other, 9)
    restore()
    other.module.load_state_dict(one.module.state_dict())
    for made in (one, other):
        step(made, 3)
        step(made, 4)
    for name, tensor in one.module.state_dict().items():
        assert torch.equal(tensor, other.module.state_dict()[name])
    for name, tensor in one.state().items():
        assert torch.equal(tensor, other.state()[name]), name


# The shards of ZeRO-2


class Engine:
    """The part of DeepSpeed's engine that holds a rank's shard: fp32 weights, concatenated over all parameters and padded."""

    def __init__(self, optimizer: torch.optim.Optimizer, rank: int, world: int) -> None:
        self._place = rank, world
        (group,) = optimizer.param_groups
        self._weights: list[nn.Parameter] = list(group["params"])
        self._share = self._shard()
        group["params"] = [self._share]
        self.optimizer = SimpleNamespace(
            single_partition_of_fp32_groups=[self._share],
            optimizer=optimizer,
            param_groups=optimizer.param_groups,
            refresh_fp32_params=lambda: self._share.copy_(self._shard()),
        )

    def _shard(self) -> Tensor:
        rank, world = self._place
        flat = torch.cat([weight.detach().float().flatten() for weight in self._weights])
        size = -(-len(flat) // world)
        return nn.functional.pad(flat, (0, size * world - len(flat)))[rank * size : (rank + 1) * size].clone()

    def destroy(self) -> None:
        """It has no hooks."""


def network() -> nn.ModuleDict:
    torch.manual_seed(0)
    parts = {"first": nn.Linear(5, 3), "idle": nn.Linear(7, 3), "last": nn.Linear(4, 2)}
    return nn.ModuleDict(parts).to(torch.bfloat16)


def shards(monkeypatch: pytest.MonkeyPatch, module: nn.Module, state: dict[str, Tensor], world: int) -> dict[str, Tensor]:
    """Load ``state`` on each of ``world`` ranks, and return what their shards contain together, by key."""
    found: dict[str, list[Tensor]] = {}
    for rank in range(world):

        def initialize(*, optimizer: Any, rank: int = rank, **_: Any) -> tuple[Engine]:
            return (Engine(optimizer, rank, world),)

        library = SimpleNamespace(initialize=initialize)
        monkeypatch.setattr(zero, "_deepspeed", lambda device, library=library: library)
        stepper = ZeroStepper(module, Ranks(rank=rank, world=world))
        stepper.load(state)
        (share,) = stepper.engine.optimizer.single_partition_of_fp32_groups
        kept = stepper.engine.optimizer.optimizer.state[share]
        for key, value in {"master": share, "exp_avg": kept["exp_avg"], "exp_avg_sq": kept["exp_avg_sq"]}.items():
            found.setdefault(key, []).append(value)
    return {key: torch.cat(values) for key, values in found.items()}


@pytest.mark.parametrize("world", [2, 3])
def test_a_weight_without_optimizer_state_keeps_its_value(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    """A single rank stores a master weight only for weights that had a gradient."""
    module = network()
    alone = ReplicatedStepper(module, Ranks())
    for _ in range(2):
        outputs = [module[name](torch.ones(width, dtype=torch.bfloat16)) for name, width in (("first", 5), ("last", 4))]
        alone.backward(torch.cat(outputs).float().square().sum())
        alone.step(1e-3)
    state = {name: tensor.clone() for name, tensor in alone.state().items()}
    assert {name.split(".")[0] for name in state} == {"first", "last"}
    assert not torch.equal(state["first.weight/master"], module["first"].weight.float())
    found = shards(monkeypatch, module, state, world)
    for key, content in found.items():
        start = 0
        for name, weight in module.named_parameters():
            empty = weight.detach().float() if key == "master" else torch.zeros(weight.shape)
            wanted = state.get(f"{name}/{key}", empty)
            assert torch.equal(content[start : start + weight.numel()].view(weight.shape), wanted), f"{name}/{key}"
            start += weight.numel()
        assert not content[start:].any(), "padding"
