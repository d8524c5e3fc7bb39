"""Simulated devices ``pretend:0``, ``pretend:1`` and so on: their tensors are CPU tensors that report such a device.

An operation on tensors of two devices raises an error, as with CUDA, and a tensor that is created on a device reports this device.
So these devices test whether code moves its tensors to the right devices; they do not test kernels. torch cannot unregister such
devices, so tests use them in separate processes.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from retouch.distributed.ranks import Placement, Ranks
from retouch.recipe.recipe import parse
from retouch.run import build
from retouch.run.step import Phase, Run, accumulate, make_minibatch


class _Stream:
    """A stream of a simulated device, which computes everything in order."""

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass


class _Backend(_DummyBackendModule):
    Stream = stream = current_stream = _Stream

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


_setup_privateuseone_for_python_backend("pretend", _Backend())
CPU = torch.device("cpu")
_MOVES = ("aten::_to_copy", "aten::copy_")
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_")


class SimulatedTensor(Tensor):
    """A tensor on a simulated device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> "SimulatedTensor":
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype, device=device
        )

    def __init__(self, inner: Tensor, device: torch.device) -> None:
        self.inner = inner

    def tolist(self) -> Any:
        return self.inner.tolist()

    def __tensor_flatten__(self) -> tuple[list[str], torch.device]:
        return ["inner"], self.device

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], device: torch.device, *_: Any) -> "SimulatedTensor":
        return SimulatedTensor(inner["inner"], device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class SimulatedDevices(TorchDispatchMode):
    """A context in which any number of simulated devices exist."""

    def __enter__(self) -> "SimulatedDevices":
        # Otherwise ``torch.tensor([1], device="pretend:0")`` is not dispatched to this mode.
        self._before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        self._reading = _Reading()
        self._reading.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._reading.__exit__(*raised)
        torch._C._set_only_lift_cpu_tensors(self._before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Reading(TorchFunctionMode):
    """Replaces simulated tensors by their CPU tensors in functions that read values without dispatch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.tensor, Tensor.__format__):
            args = tree_map(_unwrapped, args)
        return func(*args, **(kwargs or {}))


def assembled(file: str, placement: Placement) -> build.Assembly:
    """Assemble the recipe of the JSON file with its parts on these devices."""
    build.plan_placement = lambda recipe, ranks: placement
    return build.assemble(parse(json.loads(Path(file).read_text())), Ranks(device=placement.policy))


def loss_of(run: Run, phase: Phase, collected: Any) -> float:
    """Compute the loss of a whole rollout and its gradients."""
    minibatch = make_minibatch(run, phase, collected, slice(0, len(collected.batch)), 0)
    sums, _ = accumulate(run, phase.objective, minibatch)
    return float(sums["policy/loss"])


def devices_of(tensors: Sequence[Tensor]) -> set[str]:
    """Return the devices of the tensors."""
    return {str(tensor.device) for tensor in tensors}


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    asked = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    if not _is_simulated(asked) and not any(isinstance(tensor, SimulatedTensor) for tensor in given):
        return func(*args, **kwargs)
    name = func.overloadpacket._qualified_op_name
    # A scalar may be on any device.
    places = {tensor.device for tensor in given if isinstance(tensor, SimulatedTensor) or tensor.dim() > 0}
    if name in _INDEXING and _is_simulated(args[0].device):
        places.discard(CPU)  # as in CUDA, indices may be on the CPU
    if name not in _MOVES and len(places) > 1:
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found {', '.join(map(str, places))}")
    where = args[0].device if name == "aten::copy_" else asked or next(iter(places - {CPU}))
    if _is_simulated(asked):
        kwargs = {**kwargs, "device": CPU}
    own = {id(tensor.inner): tensor for tensor in given if isinstance(tensor, SimulatedTensor)}
    made = func(*tree_map(_unwrapped, args), **tree_map(_unwrapped, kwargs))
    return tree_map(lambda value: _wrapped(value, where, own), made)


def _is_simulated(device: torch.device | None) -> bool:
    return device is not None and device.type == "pretend"


def _unwrapped(value: Any) -> Any:
    return value.inner if isinstance(value, SimulatedTensor) else value


def _wrapped(value: Any, where: torch.device, own: dict[int, SimulatedTensor]) -> Any:
    if not isinstance(value, Tensor) or not _is_simulated(where):
        return value
    return own[id(value)] if id(value) in own else SimulatedTensor(value, where)
