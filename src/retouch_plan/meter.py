"""Counts, for each stage of a dry run, memory by holder, FLOPs, kernels, bytes, and host waits.

Memory is the memory requested from the allocator, in blocks of 512 bytes like those of torch's allocator. The peak is kept for each
kind of allocation, so that two dry runs of different depths can be compared (``models``). The time of a kernel is modelled as the
larger of FLOPs / rate and bytes / bandwidth of the machine; kernels that only move and combine elements reach a share of the
bandwidth. Kernels do not overlap, and only kernels of compiled blocks are fused.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from retouch_plan.accelerator import DEVICE, FakeTensor
from retouch_plan.machines import Machine

OURS = str(Path(__file__).parents[1] / "retouch")  # the core, and as a prefix the wings too
PLAN = str(Path(__file__).parent) + "/"
BLOCK = 512
_aten = torch.ops.aten
_FREE = (  # these start no kernel
    *(_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty, _aten.new_empty_strided, _aten._unsafe_view),
    *(_aten.detach, _aten.lift_fresh, _aten.is_same_size, _aten._reshape_alias),
)
_KINDS = {  # all others with FLOPs are matrix products
    **dict.fromkeys((_aten.convolution, _aten.convolution_backward), "convolution"),
    _aten._scaled_dot_product_flash_attention: "attention",
    _aten._scaled_dot_product_flash_attention_backward: "attention",
    _aten._scaled_dot_product_efficient_attention: "masked attention",
    _aten._scaled_dot_product_efficient_attention_backward: "masked attention",
}
_FUSIBLE = (  # besides elementwise operations: reductions, and copies on the device
    *(_aten.mean, _aten.sum, _aten.var, _aten.var_mean, _aten.amax, _aten.linalg_vector_norm),
    *(_aten.native_layer_norm, _aten.native_layer_norm_backward, _aten._fused_rms_norm, _aten._fused_rms_norm_backward),
    *(_aten._to_copy, _aten.copy_, _aten.clone, _aten.cat, _aten.stack, _aten.slice_backward, _aten.select_backward),
)

Event: TypeAlias = tuple[str, int, bool]
"""A kind of allocation: the name of the operation, its bytes, and whether it is in a backward pass."""
Peaks: TypeAlias = dict[tuple[int, Event], tuple[int, Counter[str]]]
"""By device and kind of allocation, the most bytes held at such an allocation, and the bytes of each holder."""


@dataclass(slots=True)
class Work:
    """The work of a stage. ``flops``: FLOPs by kind and dtype. ``seconds``: modelled seconds by kind. ``waits``: the number of host
    waits by cause and code location. ``counts``: the number of "kernels", of those "captured" in a CUDA graph, the "bytes" that
    they moved, and the bytes "copied" between host and device and "communicated"."""

    flops: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Work", times: float = 1.0) -> None:
        mine = (self.flops, self.seconds, self.waits, self.counts)
        for own, theirs in zip(mine, (other.flops, other.seconds, other.waits, other.counts), strict=True):
            for name, value in theirs.items():
                own[name] += value * times  # type: ignore[assignment]

    def copy(self) -> "Work":
        return Work(*(Counter(part) for part in (self.flops, self.seconds, self.waits, self.counts)))

    def since(self, before: "Work") -> "Work":
        made = self.copy()
        made.add(before, -1.0)
        return made

    def add_seconds(self, kind: str, seconds: float) -> None:
        self.seconds[kind] += seconds  # type: ignore[assignment]  # the values of a Counter are typed as int


@dataclass(slots=True)
class Stage:
    """The work of a stage, and its memory at each kind of allocation."""

    work: Work = field(default_factory=Work)
    most: Peaks = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """The most bytes held on any device."""
        return max((size for size, _ in self.most.values()), default=0)

    @property
    def peaks(self) -> dict[int, tuple[int, Counter[str]]]:
        """The most bytes held on each device, and then the bytes of each holder."""
        found: dict[int, tuple[int, Counter[str]]] = {}
        for (where, _), entry in self.most.items():
            if where not in found or entry[0] > found[where][0]:
                found[where] = entry
        return found


@dataclass(slots=True)
class Rise:
    """How much memory a call uses above the memory that is held when it starts. ``before``: the bytes held at the start on each
    device, by holder. ``most``: the difference at each kind of allocation."""

    before: dict[int, Counter[str]]
    most: Peaks = field(default_factory=dict)


class FusedKernel:
    """Several operations of a block that ``policy.compile: regional`` compiles: they count as one kernel.

    These are the kernels between two matrix products or attentions. The fused kernel reads each tensor from outside once, and
    writes the tensors that are still held when it ends. Inductor orders kernels more freely, and does not keep tensors that only
    Python variables hold, so this is a conservative estimate. The tensors that a compiled block keeps for its backward pass are not
    estimated. ``reads``: the bytes that it reads from tensors made outside.
    """

    def __init__(self) -> None:
        self.reads = 0
        self._read: set[int] = set()
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def add(self, given: Iterable[FakeTensor], made: Iterable[FakeTensor]) -> None:
        """Add an operation that reads ``given`` and writes ``made``, which may be the same tensor."""
        for tensor in given:
            storage = tensor.meta.untyped_storage()
            key = storage._cdata
            own = self._made.get(key)
            if tensor.device.type != DEVICE or key in self._read or (own is not None and own() is storage):
                continue
            self._read.add(key)
            self.reads += min(tensor.numel() * tensor.element_size(), storage.nbytes())
        for tensor in made:
            storage = tensor.meta.untyped_storage()
            self._made[storage._cdata] = weakref.ref(storage)

    def bytes(self) -> int:
        """Return the bytes that the kernel reads, plus those that it writes to tensors that are still held."""
        held = (storage() for storage in self._made.values())
        return self.reads + sum(storage.nbytes() for storage in held if storage is not None)


class Compiled:
    """Is true while a compiled block, or a backward pass through one, runs. ``on_leave``: called after a block's forward pass."""

    def __init__(self, on_leave: Callable[[], None]) -> None:
        self._on_leave = on_leave
        self._depth = 0
        self._any = False

    def __bool__(self) -> bool:
        return self._depth > 0 or (self._any and torch._C._current_graph_task_id() != -1)

    def watch(self, module: nn.Module) -> None:
        """Watch the blocks of a model that ``models.common.kernels.compile_blocks`` would compile."""
        names = getattr(module, "_repeated_blocks", None) or getattr(module, "_no_split_modules", None) or ()
        for block in module.modules():
            if any(kind.__name__ in names for kind in type(block).__mro__):  # FSDP2 derives its own classes
                self._any = True
                block.forward = self._watched(block.forward)

    def _watched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("past_key_values") is not None:
                return forward(*args, **kwargs)
            self._depth += 1
            try:
                return forward(*args, **kwargs)
            finally:
                self._depth -= 1
                self._on_leave()

        return watched


class Meter:
    """Observes an ``Accelerator``. ``label``: the holder of new tensors. ``compiled``: true while kernels count as fused."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.stages: dict[str, Stage] = {}
        self.label = "other"
        self.counting = True
        self.compiled = Compiled(self._end_fused)
        self.host = 0
        self.host_peak = 0
        self._held: dict[int, Counter[str]] = {}
        self._sizes: Counter[int] = Counter()
        self._alive: dict[int, list[Any]] = {}
        self._rises: list[Rise] = []
        self._fused: FusedKernel | None = None
        self._other_stream = False
        self._behind = 0.0
        """Seconds of copies on another stream that the computations since then have not hidden."""
        self._stage: Stage
        self.stage_name: str
        self._enter("other")

    # Stages and labels

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count everything inside the context as this stage."""
        before = self._stage, self.stage_name
        self._enter(name)
        try:
            yield
        finally:
            self._stage, self.stage_name = before

    def _enter(self, name: str) -> None:
        self._stage, self.stage_name = self.stages.setdefault(name, Stage()), name
        for where, size in self._sizes.items():
            self._note(where, ("the stage begins", 0, False), size)

    @property
    def work(self) -> Work:
        """The work of the current stage."""
        return self._stage.work

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the context, count only memory."""
        before, self.counting = self.counting, False
        try:
            yield
        finally:
            self.counting = before

    @contextmanager
    def rise(self) -> Iterator[Rise]:
        """Measure how much memory rises inside the context."""
        rise = Rise({where: held.copy() for where, held in self._held.items()})
        self._rises.append(rise)
        try:
            yield rise
        finally:
            self._rises.pop()

    def repeat(self, work: Work, rise: Rise) -> None:
        """Count a call that is not run: its work, and its rise above the memory that is held now."""
        self.work.add(work)
        for (where, event), (more, labels) in rise.most.items():
            self._note(where, event, self._sizes[where] + more, labels)

    def label_module(self, module: nn.Module, label: str) -> None:
        """Give tensors that are made in this module's forward pass the label ``label``."""
        stack: list[str] = []

        def enter(*_: Any) -> None:
            stack.append(self.label)
            self.label = label

        def leave(*_: Any) -> None:
            if stack:
                self.label = stack.pop()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)

    def relabel(self, tensors: Sequence[Tensor | None], label: str) -> None:
        """Count the storage of these tensors as ``label`` from now on."""
        for whole in tensors:
            tensor = getattr(whole, "_local_tensor", whole)  # for a DTensor, this rank's shard
            if isinstance(tensor, FakeTensor):
                entry = self._alive.get(tensor.meta.untyped_storage()._cdata)
                if entry is not None and entry[1] is not None:
                    size, where, old = entry
                    self._held[where][old] -= size
                    self._held[where][label] += size
                    entry[2] = label

    def is_weight(self, tensor: FakeTensor) -> bool:
        """Return whether a tensor on a device belongs to weights, weight copies or an optimizer."""
        entry = self._alive.get(tensor.meta.untyped_storage()._cdata)
        return entry is not None and not entry[2].startswith("activations") and entry[2] != "other"

    # Memory

    def observe(
        self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any, given: list[FakeTensor], made: list[FakeTensor]
    ) -> None:
        """Implements ``accelerator.Observer``."""
        for tensor in made:
            storage = tensor.meta.untyped_storage()
            key = storage._cdata
            if key in self._alive:
                continue
            size = (storage.nbytes() + BLOCK - 1) // BLOCK * BLOCK
            where = (tensor.device.index or 0) if tensor.device.type == DEVICE else None
            self._alive[key] = [size, where, self.label]
            weakref.finalize(storage, self._free, key)
            self._grow(size, where, self.label, func)
        if self.counting:
            self._count(func, args, kwargs, result, given, made)

    def _grow(self, size: int, where: int | None, label: str, func: Any) -> None:
        if where is None:
            self.host += size
            self.host_peak = max(self.host_peak, self.host)
            return
        self._held.setdefault(where, Counter())[label] += size
        self._sizes[where] += size
        self._note(where, (str(func), size, torch._C._current_graph_task_id() != -1), self._sizes[where])

    def resize(self, tensor: FakeTensor, size: int) -> None:
        """Count that the storage of a tensor is freed or allocated again, as FSDP does between uses."""
        entry = self._alive.get(tensor.meta.untyped_storage()._cdata)
        if entry is None or entry[1] is None:
            return
        change = (size + BLOCK - 1) // BLOCK * BLOCK - entry[0]
        entry[0] += change
        self._grow(change, entry[1], entry[2], "resize")

    def _free(self, key: int) -> None:
        size, where, label = self._alive.pop(key)
        if where is None:
            self.host -= size
        else:
            self._held[where][label] -= size
            self._sizes[where] -= size

    def _note(self, where: int, event: Event, size: int, more: Counter[str] | None = None) -> None:
        """Record the bytes held at an event on a device. ``more``: bytes by holder that are added to those really held."""
        key = (where, event)
        records = [(self._stage.most, Counter[str]()), *((rise.most, rise.before.get(where, Counter())) for rise in self._rises)]
        for most, before in records:
            lifted = size - before.total()
            found = most.get(key)
            if found is None or lifted > found[0]:
                held = self._held.get(where, Counter()).copy()
                held.update(more)
                held.subtract(before)
                most[key] = lifted, held

    # Work

    def wait(self, what: str) -> None:
        """Count that the host waits for the device."""
        if self.counting:
            self.work.waits[f"{what} at {place()}"] += 1

    def on_other_stream(self, fetch: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function whose copies to the device run beside later computations, and whose results are weights."""

        def fetched(*args: Any) -> Any:
            self.label, label, self._other_stream = "weights: swapped blocks", self.label, True
            try:
                return fetch(*args)
            finally:
                self.label, self._other_stream = label, False

        return fetched

    def wait_for_other_stream(self) -> None:
        """Count the time of copies on another stream that was longer than the computations beside them."""
        if self.counting:
            self.work.add_seconds("copies that blocks wait for", self._behind)
            self._behind = 0.0

    def _spend(self, kind: str, seconds: float) -> None:
        self.work.add_seconds(kind, seconds)
        self._behind = max(0.0, self._behind - seconds)

    def communicate(self, moved: int, world: int) -> None:
        """Count a collective over ``moved`` bytes of this rank, with the time of a ring."""
        if self.counting:
            self.work.counts["communicated"] += moved
            self.work.add_seconds("collectives", 2 * moved * (world - 1) / world / self.machine.link)

    def _count(
        self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any, given: list[FakeTensor], made: list[FakeTensor]
    ) -> None:
        packet = func.overloadpacket
        if packet in _FREE or (func.is_view and packet is not _aten.contiguous):
            return
        work = self.work
        tensors = {id(each): each for each in (*given, *made)}.values()
        moved = sum(each.numel() * each.element_size() for each in tensors if each.device.type == DEVICE)
        moves = packet in (_aten._to_copy, _aten.copy_)
        # ``to_device`` and the offloading of models copy without blocking only from and to page-locked memory.
        page_locked = moves and bool(kwargs.get("non_blocking", args[2:] and args[2]))
        to_host = page_locked and result.device.type == "cpu"
        if moves and (to_host or len({each.device.type for each in tensors}) + (len(given) == 0) > 1):
            if not page_locked:
                self.wait("copy from the host")
            work.counts["copied"] += moved
            rate = self.machine.pinned_copy if page_locked else self.machine.copy
            if self._other_stream:
                self._behind += moved / rate
            else:
                self._spend("copies from and to the host", moved / rate)
            return
        fusible = torch.Tag.pointwise in func.tags or packet in _FUSIBLE
        if self.compiled and fusible and not any(each.dtype.is_complex for each in tensors):  # Inductor has no complex code
            self._fused = self._fused or FusedKernel()
            self._fused.add(given, made)
            return
        self._end_fused()
        work.counts["kernels"] += 1
        work.counts["bytes"] += moved
        memory = moved / self.machine.bandwidth
        formula = flop_registry.get(packet)
        if formula is None:
            self._spend("other kernels", memory / self.machine.elementwise)
            return
        flops = formula(*args, **kwargs, out_val=result)
        dtype = next((each.dtype for each in given if each.dtype.is_floating_point), torch.float32)
        kind = _KINDS.get(packet, "matmul")
        name = f"{kind} {str(dtype).removeprefix('torch.')}"
        work.flops[name] += flops
        self._spend(name, max(flops / self.machine.rate(kind, dtype), memory))

    def _end_fused(self) -> None:
        """Count the operations since the last kernel of another kind as one kernel."""
        if self._fused is not None:
            moved, self._fused = self._fused.bytes(), None
            self.work.counts["kernels"] += 1
            self.work.counts["bytes"] += moved
            self._spend("fused kernels", moved / self.machine.bandwidth)


def place() -> str:
    """Return the file and line of Retouch's code that runs now, relative to the package, and of the library it called, if any."""
    frame, library = sys._getframe(1), None
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(OURS) and not name.startswith(PLAN):
            found = name.removeprefix(OURS.removesuffix("retouch")).removeprefix("retouch/")
            return f"{found}:{frame.f_lineno}" + (f" ({library})" if library else "")
        if library is None and "/site-packages/" in name and not name.split("/site-packages/")[1].startswith("torch/"):
            library = f"{name.split('/site-packages/')[1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return library or "?"
