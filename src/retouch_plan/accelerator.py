"""A fake accelerator: device ``dryrun:N``, whose tensors have shape, dtype and device but no data. Tensors on the host are real.

torch's meta kernels compute the shapes. Like on CUDA, an operation on tensors of two devices is refused, and so is a matrix product
of two dtypes. Small tensors whose values follow from values on the host (token ids, masks, positions) keep their values, so that
shapes that depend on values are exact; values that are read from other tensors are made up. The device stays registered in torch
until the process ends, so a dry run is made in a process of its own.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

DEVICE = "dryrun"
CPU, META = torch.device("cpu"), torch.device("meta")
KNOWN_INTEGERS, KNOWN_FLOATS = 2**22, 2**12
"""The largest number of elements of a tensor whose values are kept, for integer (and other) and for floating-point dtypes."""
LARGE_ON_HOST, LARGE_WEIGHT = 2**28, 2**16
"""From this number of bytes on, a copy to the host has no data either: the limits for any tensor, and for a tensor of weights."""
aten = torch.ops.aten
_MOVES = (aten._to_copy, aten.copy_, aten._copy_from)
_INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._unsafe_index, aten._index_put_impl_)
_SAME_DTYPE = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.linear)
_EMPTY = (aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.new_empty_strided)
_ALIASES = (aten._unsafe_view.default, aten.lift_fresh.default, aten.lift.default)  # views whose schema does not say so
_WIDEST_HEAD = 256
_ATTENTION_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


class DeviceMismatch(RuntimeError):
    """An operation received tensors on two devices."""


_active: "list[Accelerator]" = []


def is_dry_run() -> bool:
    return bool(_active)


def active() -> "Accelerator":
    if not _active:
        raise RuntimeError("a fake tensor was used outside of its dry run")
    return _active[-1]


# Tensors


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


_OWN = (Tensor, nn.Parameter, FakeTensor, nn.Buffer)


def tensors_of(*trees: Any) -> list[Tensor]:
    found: list[Tensor] = []
    waiting = list(reversed(trees))
    while waiting:
        tree = waiting.pop()
        if isinstance(tree, Tensor):
            found.append(tree)
        elif isinstance(tree, list | tuple):
            waiting += reversed(tree)
        elif isinstance(tree, dict):
            waiting += reversed(tree.values())
    return found


def fake_tensors_of(*trees: Any) -> list[FakeTensor]:
    return [each for each in tensors_of(*trees) if isinstance(each, FakeTensor)]


def mapped(tree: Any, change: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """Return the tree with ``change`` applied to its tensors."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, list | tuple):
        return type(tree)([mapped(each, change, kind) for each in tree])
    if isinstance(tree, dict):
        return {name: mapped(each, change, kind) for name, each in tree.items()}
    return tree


def _description(value: Any) -> Any:
    """Return a key of everything in an argument that the shape of a result can depend on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple([_description(each) for each in value])
    return (type(value), value) if isinstance(value, int | float) else value


def _moved_to(device: torch.device, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Change the keyword arguments of an operation so that it runs on this device."""
    if kwargs.get("device") is not None:
        kwargs["device"] = device
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    return kwargs


def _common_device(packet: Any, given: list[Tensor], asked: torch.device | None, args: Any) -> torch.device:
    """Return the device of an operation's result. Raises DeviceMismatch."""
    places = list(dict.fromkeys(tensor.device for tensor in given if isinstance(tensor, FakeTensor) or tensor.dim() > 0))
    if packet in _MOVES:
        return args[0].device if packet is aten.copy_ else (asked or places[0])
    if packet in _INDEXING and args[0].device.type == DEVICE:
        places = [place for place in places if place != CPU]  # like CUDA, which accepts indices on the host
    fake = [place for place in places if place.type == DEVICE]
    if len(places) > 1 and fake and all(tensor.dim() == 0 for tensor in given if tensor.device == CPU):
        places = [place for place in places if place != CPU]  # like CUDA, which accepts numbers on the host
    if len(places) > 1:
        raise DeviceMismatch(
            f"{packet}: expected all tensors to be on the same device, but found {', '.join(str(place) for place in places)}"
        )
    return asked or [*fake, *places][0]


def _on_meta(tensor: Tensor) -> Tensor:
    if isinstance(tensor, FakeTensor):
        return tensor.meta
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


def _placed(real: Tensor, device: torch.device) -> Tensor:
    """Return ``real`` as a fake tensor with known values if ``device`` is a fake device; otherwise unchanged."""
    return FakeTensor(_on_meta(real), device, real.detach()) if device.type == DEVICE else real


def _small(tensor: Tensor) -> bool:
    return tensor.numel() <= (KNOWN_FLOATS if tensor.dtype.is_floating_point else KNOWN_INTEGERS)


def _values_of(func: Any, args: Any, kwargs: dict[str, Any], made: Any) -> Any:
    """Return the values of the result ``made`` if they follow from known values; otherwise None. If a result of unknown values
    contains integers, such as sampled tokens, they are made up, so that later values are known."""
    empty = func.overloadpacket in _EMPTY
    known = not empty and torch.Tag.nondeterministic_seeded not in func.tags and all(_small(each) for each in tensors_of(made))
    for tensor in tensors_of(args, kwargs) if known else ():
        if tensor.known_values is None if isinstance(tensor, FakeTensor) else not _small(tensor):
            known = False
            break
    if known:
        real = _moved_to(CPU, mapped(kwargs, lambda each: each.value, FakeTensor))
        return func(*mapped(args, lambda each: each.value, FakeTensor), **real)
    if func._schema.is_mutable:
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in fake_tensors_of(args[index] if index < len(args) else kwargs.get(argument.name)):
                    tensor.known[0] = False
        return None
    if empty or any(each.alias_info is not None for each in func._schema.returns):
        return None

    def made_up(result: Tensor) -> Tensor | None:
        whole = not result.dtype.is_floating_point and not result.dtype.is_complex and result.dtype != torch.bool
        return torch.ones(result.shape, dtype=result.dtype) if whole and _small(result) else None

    return mapped(made, made_up)


def _wrapped(func: Any, made: Any, device: torch.device, originals: dict[int, FakeTensor], values: Any) -> Any:
    if isinstance(made, Tensor):
        original = originals.get(id(made))
        if original is not None:
            return original
        known = None
        if any(each.alias_info is not None for each in func._schema.returns):
            storage = made.untyped_storage()._cdata
            known = next((each.known for each in originals.values() if each.meta.untyped_storage()._cdata == storage), None)
        return FakeTensor(made, device, values if isinstance(values, Tensor) else None, known)
    if isinstance(made, list | tuple):
        each_value = values if isinstance(values, list | tuple) else [None] * len(made)
        return type(made)(_wrapped(func, one, device, originals, value) for one, value in zip(made, each_value, strict=True))
    return made


# The device


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

    record_event = wait = wait_event = wait_stream = synchronize = record


class _Backend(_DummyBackendModule):
    Stream = Event = _Stream

    def current_stream(self, device: object = None) -> _Stream:
        return _Stream()

    stream = current_stream

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def set_device(self, device: object) -> None:
        pass

    def empty_cache(self) -> None:
        pass


def register() -> None:
    """Register the device in torch. Raises RuntimeError if this process already has another fake device."""
    if torch._C._get_privateuse1_backend_name() != DEVICE:
        _setup_privateuseone_for_python_backend(DEVICE, _Backend())


Observer = Callable[[Any, Any, Mapping[str, Any], Any, list[FakeTensor], list[FakeTensor]], None]


class Accelerator(TorchDispatchMode):
    """Inside the context, any number of fake devices exist.

    ``observe``: called after each operation with fake tensors: (operation, arguments, keyword arguments, result, fake inputs, fake
    outputs). ``on_read``: called with the cause when the host waits for the device. ``answer``: maps a dtype to the value that is
    read from unknown elements. ``is_weight``: whether a tensor belongs to weights, whose values are not read on the host.
    ``large_on_host``: from this number of bytes on, copies to the host have no data. Raises DeviceMismatch, and RuntimeError for
    matrix products of two dtypes.
    """

    def __init__(
        self,
        *,
        observe: Observer = lambda *_: None,
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
        self.large_on_host = LARGE_ON_HOST
        self._remembered: dict[Any, Any] = {}

    def __enter__(self) -> "Accelerator":
        self._stack = ExitStack()
        self._stack.enter_context(_patches())
        _active.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        _active.pop()
        self._stack.close()

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
        device = _common_device(packet, given, asked, args)
        if packet in _SAME_DTYPE and len(kinds := list(dict.fromkeys(tensor.dtype for tensor in given))) > 1:
            # torch refuses it on CUDA, but not on the meta device
            raise RuntimeError(f"{packet}: expected all matrices to have the same dtype, but found {', '.join(map(str, kinds))}")
        made = self._shapes(func, mapped(args, _on_meta), _moved_to(META, mapped(kwargs, _on_meta)))
        values = _values_of(func, args, kwargs, made)
        if device.type == "cpu" and (packet is aten.copy_ or any(each.device.type == DEVICE for each in fakes)):
            result = self._to_host(packet, args, made, values, waits=not kwargs.get("non_blocking"))
        else:
            result = _wrapped(func, made, device, {id(each.meta): each for each in fakes}, values)
        self.observe(func, args, kwargs, result, fakes, fake_tensors_of(result))
        return result

    def _shapes(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the result on the meta device. Shapes of new tensors are cached, because torch computes many of them in Python."""
        if func in _ALIASES or func._schema.is_mutable or any(each.alias_info is not None for each in func._schema.returns):
            return func(*args, **kwargs)
        try:
            key = (func, _description(args), _description(tuple(kwargs.items())))
            remembered = self._remembered.get(key)
        except TypeError:  # an argument is not hashable
            return func(*args, **kwargs)
        if remembered is None:
            remembered = self._remembered[key] = func(*args, **kwargs)
        return mapped(remembered, lambda each: torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=META))

    def _to_host(self, packet: Any, args: Any, made: Tensor, values: Any, *, waits: bool) -> Any:
        if packet is aten.copy_:
            self.on_read("copy to the host")
            target, source = args[0], args[1]
            if isinstance(target, FakeTensor):
                return target
            known = source.known_values if isinstance(source, FakeTensor) else source
            return target.copy_(known) if known is not None else target
        source = fake_tensors_of(args)[0]
        if source.device.type == DEVICE and waits:
            self.on_read("copy to the host")
        if isinstance(values, Tensor):
            return values
        if made.numel() * made.element_size() >= (LARGE_WEIGHT if self.is_weight(source) else self.large_on_host):
            return FakeTensor(made, CPU)
        return self._made_up(made)

    def _made_up(self, like: Tensor) -> Tensor:
        """Return a real tensor of made-up values. A large one is all zeros, which need no memory until they are written."""
        if like.numel() * like.element_size() > 2**20:
            return torch.zeros(like.shape, dtype=like.dtype)
        return torch.full(like.shape, self.answer(like.dtype), dtype=like.dtype)

    def read(self, tensor: FakeTensor) -> Tensor:
        """Return the values of a tensor; made-up values if they are unknown."""
        values = tensor.known_values
        return self._made_up(tensor.meta) if values is None else values


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
        if kwargs.get("output_size") is not None:  # of repeat_interleave, which then does not wait
            return False, None
        machine.on_read(what)
        device = args[0].device
        made = func(*mapped(args, machine.read, FakeTensor), **_moved_to(CPU, mapped(kwargs, machine.read, FakeTensor)))
        result = mapped(made, lambda each: _placed(each, device))
        machine.observe(func, args, kwargs, result, fake_tensors_of(args, kwargs), fake_tensors_of(result))
        return True, result

    return handler


def _index(machine: Accelerator, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Convert masks to indices first, like CUDA."""
    masks = [each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]]
    if not any(masks):
        return False, None
    found: list[Tensor | None] = []
    for each, is_mask in zip(args[1], masks, strict=True):
        if not is_mask:
            found.append(each)
            continue
        if isinstance(each, FakeTensor):
            machine.on_read("mask to indices")
        mask = machine.read(each) if isinstance(each, FakeTensor) else each
        found += [_placed(column, args[0].device) for column in mask.nonzero().unbind(1)]
    return True, machine.run(func, (args[0], found, *args[2:]), kwargs)


HANDLERS: dict[Any, Callable[..., tuple[bool, Any]]] = {
    # Each handler maps (accelerator, operation, arguments, keyword arguments) to (whether it handled the operation, the result).
    aten._local_scalar_dense: _item,
    aten.equal: _equal,
    aten.nonzero: _by_value("nonzero"),
    aten.masked_select: _by_value("masked_select"),
    **dict.fromkeys((aten._unique2, aten.unique_dim, aten.unique_consecutive), _by_value("unique")),
    aten.bincount: _by_value("bincount"),
    aten.repeat_interleave: _by_value("repeat_interleave"),
    **dict.fromkeys((aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_), _index),
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


@contextmanager
def fused_attention() -> Iterator[None]:
    """Inside the context, ``scaled_dot_product_attention`` uses, for fake tensors, the kernel that torch chooses on CUDA.

    Without a mask and in 16 bits, this is FlashAttention (arXiv 2205.14135); with a mask or in fp32, the memory-efficient kernel,
    which reads the mask as a tensor of the queries' dtype. A function mode would not apply to the recomputation of checkpointed
    blocks, so the function itself is replaced.
    """
    own = functional.scaled_dot_product_attention

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(_ATTENTION_ARGUMENTS, args, strict=False)) | kwargs
        return _attention(given) if isinstance(given["query"], FakeTensor) else own(*args, **kwargs)

    functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = own


def _attention(given: dict[str, Any]) -> Tensor:
    query, key, value, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
    causal, scale = bool(given.get("is_causal", False)), given.get("scale")
    if key.shape[1] != query.shape[1]:  # grouped queries: FlashAttention reads the keys in place, the other kernel needs copies
        times = query.shape[1] // key.shape[1]
        if mask is None:
            key, value = (each[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2) for each in (key, value))
        else:
            key, value = (each.repeat_interleave(times, 1) for each in (key, value))
    if mask is None and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= _WIDEST_HEAD:
        made: Tensor = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)[0]
        return made
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(~mask, float("-inf"))
        mask = mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
    needs_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    made = aten._scaled_dot_product_efficient_attention(query, key, value, mask, needs_gradient, 0.0, causal, scale=scale)[0]
    return made
