"""Copies of weights: swapped bitwise, averaged, without the adapter, and copied from the host asynchronously."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny_policies as tiny
from retouch.models import offloading
from retouch.models.parts import page_locked, to_device
from retouch.policies.weights import WeightCopies, stale_copies
from retouch.recipe.policy import Ema
from retouch.run.build import Assembly

# Copies of weights


def linear():
    module = nn.Linear(3, 2)
    module.bias.requires_grad_(False)
    return module


def test_using_a_copy_restores_the_weights_bitwise_and_keeps_the_graph():
    policy, batch = tiny.policy(train="full"), tiny.batch()

    def weights():
        return {name: parameter.detach().clone() for name, parameter in policy.module.named_parameters()}

    def same(one):
        return all(torch.equal(parameter, one[name]) for name, parameter in policy.module.named_parameters())

    def slopes(velocity):
        return torch.autograd.grad(velocity.square().sum(), list(tiny.trained(policy).values()), allow_unused=True)

    before, storage = weights(), [parameter.data_ptr() for parameter in policy.module.parameters()]
    tiny.perturb(policy)
    moved, trajectory = weights(), policy.rollout(batch)
    point = (trajectory, slice(0, 4), trajectory.outputs, torch.full((4,), 0.5), "current")
    alone, current = slopes(policy.velocity(*point)), policy.velocity(*point)
    with policy.copies.using("reference"):
        assert same(before)
    assert same(moved)
    assert [parameter.data_ptr() for parameter in policy.module.parameters()] == storage
    # A graph that was built before a swap still gives the gradient of the current weights.
    for a, b in zip(alone, slopes(current), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_a_copy_on_another_device_is_moved_only_for_its_block():
    copies = WeightCopies(linear(), devices={"reference": torch.device("meta")})
    for name in ("reference", "old"):
        copies.snapshot(name)
    assert {name: copy["weight"].device.type for name, copy in copies.copies.items()} == {"reference": "meta", "old": "cpu"}
    # A test of two devices that needs no GPU: the weights are on "meta", and the copy is on the CPU.
    module = linear().to("meta")
    copies = WeightCopies(module, devices={"reference": torch.device("cpu")})
    kept = linear().weight.detach()
    copies.copies["reference"] = {"weight": kept}
    here = module.weight.data
    with copies.using("reference"):
        assert module.weight.device.type == "meta"
        assert module.weight.data is not here
    assert module.weight.data.data_ptr() == here.data_ptr()
    assert copies.copies["reference"]["weight"] is kept


@pytest.mark.parametrize("decay", [0.0, 0.25, 1.0])
def test_update_ema_is_decay_times_the_copy_plus_the_rest_of_the_weights(decay):
    module = linear()
    copies = WeightCopies(module)
    copies.snapshot("average")
    old = module.weight.detach().clone()
    torch.nn.init.normal_(module.weight)
    now = module.weight.detach().clone()
    copies.update_ema("average", decay)
    torch.testing.assert_close(copies.copies["average"]["weight"], decay * old + (1 - decay) * now)
    assert torch.equal(module.weight, now)


@pytest.mark.parametrize("every", [1, 3])
def test_decay_of_the_average_grows_with_the_optimizer_steps_up_to_its_limit(every):
    module = linear()
    copies = WeightCopies(module)
    copies.snapshot("average")
    ema = Ema(decay=0.5, every=every)
    run = SimpleNamespace(recipe=SimpleNamespace(policy=SimpleNamespace(ema=ema)))
    wanted = module.weight.detach().clone()
    for taken in range(1, 13):
        with torch.no_grad():
            module.weight.add_(taken)
        Assembly._average(run, copies, taken)
        if taken % every == 0:
            share = {1: 2 / 11, 2: 3 / 12, 3: 4 / 13, 4: 5 / 14, 5: 6 / 15, 6: 7 / 16, 7: 8 / 17}.get(taken, 0.5)
            wanted = share * wanted + (1 - share) * module.weight.detach()
        torch.testing.assert_close(copies.copies["average"]["weight"], wanted)


@pytest.mark.parametrize("family", ["sd3", "edit"])
def test_the_reference_of_a_lora_is_the_model_without_it(family):
    policy, batch = tiny.policy(family), tiny.batch()
    tiny.perturb(policy)
    trajectory = policy.rollout(batch)
    x, sigma, rows = trajectory.outputs, torch.full((4,), 0.5), slice(0, 4)
    with torch.no_grad():
        current, reference = (policy.velocity(trajectory, rows, x, sigma, which) for which in ("current", "reference"))
        policy.module.disable_adapters()
        plain = policy.model.velocity(policy.module, x, sigma, trajectory.conditioning.take(trajectory.group))
    assert torch.equal(reference, plain)
    assert (current - plain).abs().max() > 1e-3
    policy = tiny.policy(family, copies=())
    policy.module.proj_out.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"proj_out.weight trains too but is not a LoRA matrix"):
        WeightCopies(policy.module).snapshot_without_adapter("reference")


def test_loading_a_saved_state_restores_the_copies():
    module = linear()
    copies = WeightCopies(module)
    for name in ("old", "average"):
        copies.snapshot(name)
        with torch.no_grad():
            module.weight.add_(1)
    state = {name: tensor.clone() for name, tensor in copies.state().items()}
    copies.update_ema("old", 0.5)
    copies.load(state)
    assert state.keys() == {"old/weight", "average/weight"}
    assert all(torch.equal(tensor, state[name]) for name, tensor in copies.state().items())
    with pytest.raises(ValueError, match="differ from this run's"):
        copies.load({"old/weight": state["old/weight"]})


def test_ema_of_bf16_weights_accumulates_changes_smaller_than_rounding():
    module = nn.Linear(2, 2, dtype=torch.bfloat16)
    copies = WeightCopies(module)
    nn.init.constant_(module.weight, 1.0)
    copies.snapshot("average")
    nn.init.constant_(module.weight, 1.5)
    for _ in range(100):
        copies.update_ema("average", 0.999)
    with copies.using("average"):
        assert module.weight.dtype == torch.bfloat16
        assert module.weight[0, 0].item() == pytest.approx(1.5 - 0.5 * 0.999**100, abs=2**-8)
    assert module.weight[0, 0] == 1.5


def test_copies_for_stale_rollouts_keep_the_dtype_and_bits_of_the_weights():
    module = nn.Linear(3, 2, dtype=torch.bfloat16)
    copies = WeightCopies(module)
    for name in (*stale_copies(2), "reference", "old"):
        copies.snapshot(name)
    types = {name: copy["weight"].dtype for name, copy in copies.copies.items()}
    assert types == {**dict.fromkeys(("sampling-0", "sampling-1", "reference"), torch.bfloat16), "old": torch.float32}
    kept = module.weight.detach().clone()
    # A checkpoint may hold the same numbers in fp32.
    state = {name: tensor.float() for name, tensor in copies.state().items()}
    with torch.no_grad():
        module.weight.mul_(3)
    copies.snapshot("sampling-1")
    copies.load(state)
    with copies.using("sampling-1"):
        assert torch.equal(module.weight, kept)


# Asynchronous copies from the host

CPU = torch.device("cpu")


class DelayedTensor(Tensor):
    """A tensor that reports a GPU as its device, in the memory of the host tensor that it copies."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda:0")


def late(self: Tensor, device: Any = None, dtype: Any = None, *, non_blocking: bool = False, copy: bool = False) -> Tensor:
    """``Tensor.to`` for a device that is behind the host: it reads the source of an asynchronous copy only later."""
    if torch.device(device).type != "cuda":
        return _TO(self.as_subclass(Tensor), device, dtype, copy=True)
    assert non_blocking == (type(self) is not DelayedTensor), "only copies from the host are asynchronous"
    source = self if dtype in (None, self.dtype) else _TO(self, dtype)
    return source.detach().as_subclass(DelayedTensor)


_TO: Callable[..., Tensor] = Tensor.to


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Simulates a GPU that reads late. Returns the list of the tensors that were page-locked."""
    locked: list[Tensor] = []
    monkeypatch.setattr(Tensor, "to", late)

    def pin_memory(self: Tensor) -> Tensor:
        locked.append(self.clone())
        return locked[-1]

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(Tensor, "is_pinned", lambda self: any(self is each for each in locked))
    return locked


class CopiesOnGpu(WeightCopies):
    """Copies of weights that report a GPU as their device."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, devices={"reference": CPU})
        self.parameters = {name: _Parameter(parameter) for name, parameter in self.parameters.items()}  # type: ignore[misc]


class _Parameter:
    device, requires_grad = torch.device("cuda:0"), True

    def __init__(self, parameter: Tensor) -> None:
        self.dtype, self.data = parameter.dtype, parameter.detach().clone().as_subclass(DelayedTensor)

    def detach(self) -> Tensor:
        return self.data


def test_a_page_locked_reference_is_not_overwritten_while_it_is_copied(device: list[Tensor]) -> None:
    copies = CopiesOnGpu(nn.Linear(3, 2))
    copies.snapshot("reference")
    assert len(device) == 2
    before = {name: tensor.clone() for name, tensor in copies.copies["reference"].items()}
    with copies.using("reference"):
        held = {name: parameter.data for name, parameter in copies.parameters.items()}
    assert {type(tensor) for tensor in held.values()} == {DelayedTensor}
    # The device has not read the copies yet when these happen:
    copies.load({name: torch.full_like(tensor, 9.0) for name, tensor in copies.state().items()})
    copies.snapshot("reference")
    for name, tensor in held.items():
        assert torch.equal(tensor.as_subclass(Tensor), before[name]), "the device read what the host wrote later"
    assert len(device) == 6


def test_on_the_cpu_nothing_is_copied() -> None:
    tensor = torch.arange(3.0)
    assert page_locked(tensor, CPU) is tensor
    assert to_device(tensor, CPU) is tensor
    assert torch.equal(to_device(tensor, CPU, torch.bfloat16), tensor.bfloat16())
    copies = WeightCopies(nn.Linear(3, 2), devices={"reference": CPU})
    copies.snapshot("reference")
    kept = dict(copies.copies["reference"])
    copies.load({name: tensor + 1 for name, tensor in copies.state().items()})
    assert all(copies.copies["reference"][name] is tensor for name, tensor in kept.items())


def test_offloaded_weights_are_packed_into_large_shared_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading, "BUFFER_BYTES", 4096)
    module = nn.Sequential(nn.Linear(20, 20), nn.BatchNorm1d(20), nn.Linear(40, 40, dtype=torch.bfloat16))
    module.append(module[0])
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    parameters = list(module.parameters())
    sizes: list[int] = []

    def allocate(size: int) -> Tensor:
        sizes.append(size)
        return torch.empty(size, dtype=torch.uint8)

    offloading.repack([module, module[1]], allocate)
    assert sizes == [4096, 4096]
    assert all(one is other for one, other in zip(parameters, module.parameters(), strict=True))
    assert module[0].weight is module[3].weight
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert tensor.data_ptr() % 16 == 0
    assert len({tensor.untyped_storage().data_ptr() for tensor in module.state_dict().values()}) == 2
    offloading.repack([nn.Linear(100, 100)], allocate)
    assert sizes[2:] == [40000, 4096]


def test_weights_are_page_locked_only_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(offloading, "repack", lambda parts, allocate: calls.append(parts))
    for name in ("cpu", "mps", "cuda:1"):
        offloading.page_lock([], torch.device(name))
    assert len(calls) == 1
