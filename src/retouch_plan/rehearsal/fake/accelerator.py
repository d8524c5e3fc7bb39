"""A fake accelerator: device ``rehearsal:N``, whose tensors have shape, dtype and device but no data. Tensors on the host are real.

torch's meta kernels compute the shapes. Like on CUDA, an operation on tensors of two devices is refused, and so is a matrix product
of two dtypes. Small tensors whose values follow from values on the host (token ids, masks, positions) keep their values, so that
shapes that depend on values are exact; values that are read from other tensors are made up. The device stays registered in torch
until the process ends, so run a rehearsal in its own process.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from retouch_plan.rehearsal.fake.tensors import (
    CPU,
    DEVICE,
    META,
    FakeTensor,
    common_device,
    description,
    fake_tensors_of,
    known_values,
    machines,
    mapped,
    moved_to,
    on_meta,
    placed,
    require_one_dtype,
    tensors_of,
    wrapped,
)

LARGE_ON_HOST, LARGE_WEIGHT = 2**28, 2**16
"""From this number of bytes on, a copy to the host has no data either: the limits for any tensor, and for a tensor of weights."""
_OWN = (Tensor, nn.Parameter, FakeTensor, nn.Buffer)
aten = torch.ops.aten
_ALIASES = (aten._unsafe_view.default, aten.lift_fresh.default, aten.lift.default)  # views whose schema does not say so


class _Stream:
    """A stream or an event that does nothing, because everything runs in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def record(self, *_: Any) -> "_Stream":
        return self

    record_event = record

    def wait(self, *_: Any) -> None:
        pass

    wait_event = wait_stream = synchronize = wait


class _Backend(_DummyBackendModule):
    Stream = Event = _Stream

    def current_stream(self, device: object = None) -> _Stream:
        return _Stream()

    def stream(self, stream: object) -> _Stream:
        return _Stream()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def set_device(self, device: object) -> None:
        pass

    def empty_cache(self) -> None:
        pass


def register() -> None:
    """Register the device in torch. Raises RuntimeError if this process already has another fake device."""
    if torch._C._get_privateuse1_backend_name() == DEVICE:
        return
    _setup_privateuseone_for_python_backend(DEVICE, _Backend())


Observer = Callable[[Any, Any, Mapping[str, Any], Any, "list[FakeTensor]", "list[FakeTensor]"], None]


class Accelerator(TorchDispatchMode):
    """Inside the context, any number of fake devices exist.

    ``observe``: called after each operation with fake tensors: (operation, arguments, keyword arguments, result, fake inputs, fake
    outputs). ``on_read``: called with the cause when the host waits for the device. ``answer``: maps a dtype to the value that is
    read from unknown elements. ``is_weight``: whether a tensor belongs to weights, whose values are not read on the host. Raises
    DeviceMismatch, and RuntimeError for matrix products of two dtypes.
    """

    def __init__(
        self,
        *,
        observe: Observer | None = None,
        on_read: Callable[[str], None] = lambda what: None,
        answer: Callable[[torch.dtype], float] = lambda dtype: 1,
        is_weight: Callable[[FakeTensor], bool] = lambda tensor: False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        register()
        self.observe = observe
        self.on_read = on_read
        self.answer = answer
        self.is_weight = is_weight
        self._large_on_host = LARGE_ON_HOST
        self._remembered: dict[Any, Any] = {}

    def __enter__(self) -> "Accelerator":
        self._stack = ExitStack()
        self._stack.enter_context(_patches())
        machines.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        machines.pop()
        self._stack.close()

    @contextmanager
    def moving_weights(self) -> Iterator[None]:
        """Inside the context, copies to the host of at least 1 MiB have no data either: offloaded weights are never read."""
        self._large_on_host = 2**20
        try:
            yield
        finally:
            self._large_on_host = LARGE_ON_HOST

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given = tensors_of(args, kwargs)
        if any(type(each) not in _OWN for each in given):
            return NotImplemented  # a wrapper such as DTensor, which dispatches its inner tensors itself
        fakes = [tensor for tensor in given if isinstance(tensor, FakeTensor)]
        asked = kwargs.get("device")
        if isinstance(asked, str):
            asked = torch.device(asked)
        if not fakes and (asked is None or asked.type != DEVICE):
            return func(*args, **kwargs)
        packet = func.overloadpacket
        handler = HANDLERS.get(packet)
        if handler is not None:
            done, result = handler(self, func, args, kwargs)
            if done:
                return result
        device = common_device(packet, given, asked, args)
        require_one_dtype(packet, given)
        result = self._compute(func, packet, args, kwargs, device)
        if self.observe is not None:
            self.observe(func, args, kwargs, result, fakes, fake_tensors_of(result))
        return result

    def _compute(self, func: Any, packet: Any, args: Any, kwargs: dict[str, Any], device: torch.device) -> Any:
        originals = {id(each.meta): each for each in fake_tensors_of(args, kwargs)}
        made = self._shapes(func, mapped(args, on_meta), moved_to(META, mapped(kwargs, on_meta)))
        values = known_values(func, args, kwargs, made)
        fake_places = {each.device.type for each in originals.values()}
        if device.type == "cpu" and (DEVICE in fake_places or packet is aten.copy_):
            return self._to_host(packet, args, made, values)
        return wrapped(func, made, device, originals, values)

    def _shapes(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the result on the meta device. Shapes of new tensors are cached, because torch computes many of them in Python."""
        if func in _ALIASES or func._schema.is_mutable or any(each.alias_info is not None for each in func._schema.returns):
            return func(*args, **kwargs)
        try:
            key = (func, description(args), description(tuple(kwargs.items())))
            remembered = self._remembered.get(key)
        except TypeError:  # an argument is not hashable
            return func(*args, **kwargs)
        if remembered is not None:
            return mapped(remembered, lambda each: torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=META))
        made = func(*args, **kwargs)
        self._remembered[key] = made
        return mapped(made, lambda each: torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=META))

    def _to_host(self, packet: Any, args: Any, made: Tensor, values: Any) -> Any:
        """Return the result of a copy to the host: a real tensor if it is small."""
        if packet is aten.copy_:
            self.on_read("copy to the host")
            target, source = args[0], args[1]
            if isinstance(target, FakeTensor):
                return target
            known = source.known_values if isinstance(source, FakeTensor) else source
            return target.copy_(known) if known is not None else target
        source = next(each for each in tensors_of(args) if isinstance(each, FakeTensor))
        if source.device.type == DEVICE:
            self.on_read("copy to the host")
        if isinstance(values, Tensor):
            return values
        if made.numel() * made.element_size() >= (LARGE_WEIGHT if self.is_weight(source) else self._large_on_host):
            return FakeTensor(made, CPU)
        return self.made_up(made)

    def made_up(self, like: Tensor) -> Tensor:
        """Return a real tensor of made-up values. A large one is all zeros, which need no memory until they are written."""
        if like.numel() * like.element_size() > 2**20:
            return torch.zeros(like.shape, dtype=like.dtype)
        return torch.full(like.shape, self.answer(like.dtype), dtype=like.dtype)

    def read(self, tensor: FakeTensor) -> Tensor:
        """Return the values of a tensor; made-up values if they are unknown."""
        values = tensor.known_values
        return self.made_up(tensor.meta) if values is None else values


# Operations whose result depends on values


def _item(machine: Accelerator, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    if args[0].device.type == DEVICE:
        machine.on_read("item")
    return True, machine.read(args[0]).item()


def _equal(machine: Accelerator, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    machine.on_read("equal")
    one, other = (each.known_values if isinstance(each, FakeTensor) else each for each in args)
    return True, True if one is None or other is None else bool(torch.equal(one, other))


def _by_value(what: str) -> Callable[..., tuple[bool, Any]]:
    """Return the handler of an operation whose output shape depends on the values of its first tensor."""

    def handler(machine: Accelerator, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
        machine.on_read(what)
        device = args[0].device
        made = func(*mapped(args, machine.read, FakeTensor), **moved_to(CPU, mapped(kwargs, machine.read, FakeTensor)))
        result = mapped(made, lambda each: placed(each, device))
        if machine.observe is not None:
            machine.observe(func, args, kwargs, result, fake_tensors_of(args, kwargs), fake_tensors_of(result))
        return True, result

    return handler


def _repeat_interleave(machine: Accelerator, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    if kwargs.get("output_size") is not None:
        return False, None
    return _by_value("repeat_interleave")(machine, func, args, kwargs)


def _index(machine: Accelerator, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Convert masks to indices first, like CUDA."""
    indices = args[1]
    if not any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in indices):
        return False, None
    found: list[Tensor | None] = []
    for each in indices:
        if each is not None and each.dtype in (torch.bool, torch.uint8):
            mask = machine.read(each) if isinstance(each, FakeTensor) else each
            if isinstance(each, FakeTensor):
                machine.on_read("mask to indices")
            found += [placed(column, args[0].device) for column in mask.nonzero().unbind(1)]
        else:
            found.append(each)
    return True, machine.run(func, (args[0], found, *args[2:]), kwargs)


HANDLERS: dict[Any, Callable[..., tuple[bool, Any]]] = {
    # Each handler maps (accelerator, operation, arguments, keyword arguments) to (whether it handled the operation, the result).
    aten._local_scalar_dense: _item,
    aten.equal: _equal,
    aten.nonzero: _by_value("nonzero"),
    aten.masked_select: _by_value("masked_select"),
    aten._unique2: _by_value("unique"),
    aten.unique_dim: _by_value("unique"),
    aten.unique_consecutive: _by_value("unique"),
    aten.bincount: _by_value("bincount"),
    aten.repeat_interleave: _repeat_interleave,
    aten.index: _index,
    aten.index_put: _index,
    aten.index_put_: _index,
    aten._index_put_impl_: _index,
}


# Patches of torch for the fake device


class _Reading(TorchFunctionMode):
    """Handles functions of torch that read the values of tensors without an operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tensor:
            args = mapped(args, lambda each: each.item() if each.dim() == 0 else each.cpu(), FakeTensor)
        return func(*args, **(kwargs or {}))


@contextmanager
def _patches() -> Iterator[None]:
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    lifts = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # otherwise ``torch.tensor([1], device=...)`` would move there without an operation
    lists: tuple[list[Any], ...] = (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types)
    for each in lists:
        each.append(FakeTensor)
    try:
        with _Reading():
            yield
    finally:
        for each in lists:
            each.remove(FakeTensor)
        torch._C._set_only_lift_cpu_tensors(lifts)
