"""Tensors without data: they have a shape, a dtype, a device, and values only if these follow from values on the host."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

DEVICE = "rehearsal"
CPU, META = torch.device("cpu"), torch.device("meta")
KNOWN_INTEGERS, KNOWN_FLOATS = 2**22, 2**12
"""The largest number of elements of a tensor whose values are kept, for integer (and other) and for floating-point dtypes."""
aten = torch.ops.aten
_MOVES = (aten._to_copy, aten.copy_, aten._copy_from)
_INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._unsafe_index, aten._index_put_impl_)
_SAME_DTYPE = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.linear)
_EMPTY = (aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.new_empty_strided)


class DeviceMismatch(RuntimeError):
    """An operation received tensors on two devices."""


machines: list[Any] = []


def active() -> Any:
    if not machines:
        raise RuntimeError("a fake tensor was used outside of its rehearsal")
    return machines[-1]


class FakeTensor(Tensor):
    """A tensor on a fake device, or a large tensor on the host. ``meta``: a tensor on the meta device with the same shape and its
    own storage. ``value``: the values, or None. ``known``: whether ``value`` is valid; a list that views of the tensor share."""

    meta: Tensor
    value: Tensor | None
    known: list[bool]

    @staticmethod
    def __new__(
        cls, meta: Tensor, device: torch.device, value: Tensor | None = None, known: list[bool] | None = None
    ) -> "FakeTensor":
        return Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), storage_offset=meta.storage_offset(), dtype=meta.dtype, device=device
        )

    def __init__(self, meta: Tensor, device: torch.device, value: Tensor | None = None, known: list[bool] | None = None) -> None:
        self.meta = meta
        self.value = value
        self.known = [True] if known is None else known

    @property
    def known_values(self) -> Tensor | None:
        """The values, if they are known."""
        return self.value if self.known[0] else None

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        assert isinstance(new, FakeTensor)
        Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        self.meta, self.value, self.known = new.meta, new.value, new.known

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Made-up values for a tensor in host memory: one element, broadcast to the tensor's shape, which needs no memory."""
        if self.device != CPU and not force:
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy it to host memory first"
            )
        return torch.ones((), dtype=self.dtype).expand(self.shape).numpy()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"FakeTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.device]:
        return ["meta"], self.device

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], device: torch.device, *_: Any) -> "FakeTensor":
        return FakeTensor(inner["meta"], device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return active().run(func, args, kwargs or {})


def fake_tensors_of(*trees: Any) -> "list[FakeTensor]":
    return [each for each in tensors_of(*trees) if isinstance(each, FakeTensor)]


def tensors_of(*trees: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for tree in trees:
        _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        found.append(tree)
    elif isinstance(tree, list | tuple):
        for each in tree:
            _collect(each, found)
    elif isinstance(tree, dict):
        for each in tree.values():
            _collect(each, found)


def mapped(tree: Any, change: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """Return the tree with ``change`` applied to its tensors."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, list | tuple):
        return type(tree)([mapped(each, change, kind) for each in tree])
    if isinstance(tree, dict):
        return {name: mapped(each, change, kind) for name, each in tree.items()}
    return tree


def description(value: Any) -> Any:
    """Return a key of everything in an argument that the shape of a result can depend on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple([description(each) for each in value])
    return (type(value), value) if isinstance(value, int | float) else value


def moved_to(device: torch.device, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Change the keyword arguments of an operation so that it runs on this device."""
    if kwargs.get("device") is not None:
        kwargs["device"] = device
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    return kwargs


def common_device(packet: Any, given: list[Tensor], asked: torch.device | None, args: Any) -> torch.device:
    """Return the device of an operation's result. Raises DeviceMismatch."""
    places = list(dict.fromkeys(tensor.device for tensor in given if isinstance(tensor, FakeTensor) or tensor.dim() > 0))
    if packet in _MOVES:
        return args[0].device if packet is aten.copy_ else (asked or places[0])
    if packet in _INDEXING and args[0].device.type == DEVICE:
        places = [place for place in places if place != CPU]  # like CUDA, which accepts indices on the host
    fake = [place for place in places if place.type == DEVICE]
    numbers = [tensor.device for tensor in given if tensor.dim() == 0 and isinstance(tensor, FakeTensor)]
    if len(places) > 1 and fake and CPU in places:
        at_most_numbers = all(tensor.dim() == 0 for tensor in given if tensor.device == CPU)
        if at_most_numbers:
            places = fake
    if len(places) > 1:
        raise DeviceMismatch(
            f"{packet}: expected all tensors to be on the same device, but found {', '.join(str(place) for place in places)}"
        )
    return asked or (fake[0] if fake else places[0] if places else numbers[0])


def require_one_dtype(packet: Any, given: list[Tensor]) -> None:
    """Raise RuntimeError for a matrix product of two dtypes. torch refuses it on CUDA, but not on the meta device."""
    if packet in _SAME_DTYPE:
        kinds = list(dict.fromkeys(tensor.dtype for tensor in given))
        if len(kinds) > 1:
            raise RuntimeError(f"{packet}: expected all matrices to have the same dtype, but found {', '.join(map(str, kinds))}")


def on_meta(tensor: Tensor) -> Tensor:
    if isinstance(tensor, FakeTensor):
        return tensor.meta
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


def placed(real: Tensor, device: torch.device) -> Tensor:
    """Return ``real`` as a fake tensor with known values if ``device`` is a fake device; otherwise unchanged."""
    return FakeTensor(on_meta(real), device, real.detach()) if device.type == DEVICE else real


def on_host(tensor: FakeTensor) -> FakeTensor:
    """Return a fake tensor of the same shape in host memory."""
    return FakeTensor(torch.empty(tensor.shape, dtype=tensor.dtype, device=META), CPU)


def _small(tensor: Tensor) -> bool:
    return tensor.numel() <= (KNOWN_FLOATS if tensor.dtype.is_floating_point else KNOWN_INTEGERS)


def known_values(func: Any, args: Any, kwargs: dict[str, Any], made: Any) -> Any:
    """Return the values of the result ``made`` if they follow from known values; otherwise None."""
    given = tensors_of(args, kwargs)
    known = True
    for tensor in given:
        if isinstance(tensor, FakeTensor):
            if tensor.known_values is None:
                known = False
                break
        elif not _small(tensor):
            known = False
            break
    known = known and all(_small(each) for each in tensors_of(made)) and torch.Tag.nondeterministic_seeded not in func.tags
    if not known or func.overloadpacket in _EMPTY:
        if func._schema.is_mutable:
            for tensor in _written(func, args, kwargs):
                if isinstance(tensor, FakeTensor):
                    tensor.known[0] = False
            return None
        return mapped(made, _made_up) if func.overloadpacket not in _EMPTY and _is_new(func) else None
    real = moved_to(CPU, mapped(kwargs, lambda each: each.value, FakeTensor))
    return func(*mapped(args, lambda each: each.value, FakeTensor), **real)


def _is_new(func: Any) -> bool:
    return all(each.alias_info is None for each in func._schema.returns)


def _made_up(made: Tensor) -> Tensor | None:
    """Return made-up integers for a result of unknown values, such as sampled tokens, so that later values are known; else None."""
    whole = not made.dtype.is_floating_point and not made.dtype.is_complex and made.dtype != torch.bool
    return torch.ones(made.shape, dtype=made.dtype) if whole and _small(made) else None


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from tensors_of(value)


def wrapped(func: Any, made: Any, device: torch.device, originals: dict[int, FakeTensor], values: Any) -> Any:
    if isinstance(made, Tensor):
        original = originals.get(id(made))
        if original is not None:
            return original
        known = None
        if any(each.alias_info is not None for each in func._schema.returns):
            known = next(
                (each.known for each in originals.values() if each.meta.untyped_storage()._cdata == made.untyped_storage()._cdata),
                None,
            )
        return FakeTensor(made, device, values if isinstance(values, Tensor) else None, known)
    if isinstance(made, list | tuple):
        each_value = values if isinstance(values, list | tuple) else [None] * len(made)
        return type(made)(wrapped(func, one, device, originals, value) for one, value in zip(made, each_value, strict=True))
    return made
