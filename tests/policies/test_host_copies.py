"""Asynchronous copies from the host: results are the same on a device that reads them as late as possible.

The device is simulated. A ``DelayedTensor`` copy shares the memory of its source, so if the host writes to the source
later, the device reads the new values.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retouch.models import offloading
from retouch.models.parts import page_locked, to_device
from retouch.policies.weights import WeightCopies

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
