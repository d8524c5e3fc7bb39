"""Counts, for each stage of a rehearsal, memory by holder, FLOPs, kernels, bytes, and host waits.

Memory is the memory requested from the allocator, in blocks of 512 bytes like those of torch's allocator. The peak is kept for each
kind of allocation, so that two rehearsals of different depths can be compared (``depth``). The time of a kernel
is modelled as the larger of FLOPs / rate and bytes / bandwidth of the machine. Kernels do not overlap, and only kernels of compiled
blocks are fused (``counting.fusion``).
"""

import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from retouch_plan.rehearsal.counting.fusion import Compiled, FusedKernel, is_fusible
from retouch_plan.rehearsal.counting.machines import Machine
from retouch_plan.rehearsal.counting.stages import Event, Rise, Stage, Work
from retouch_plan.rehearsal.fake.tensors import DEVICE, FakeTensor

OURS = str(Path(__file__).parents[3] / "retouch")  # the core, and as a prefix the wings too
_MINE = str(Path(__file__).parents[1]) + "/"
BLOCK = 512
_aten = torch.ops.aten
_FREE = (  # these start no kernel
    *(_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty, _aten.new_empty_strided, _aten._unsafe_view),
    *(_aten.detach, _aten.lift_fresh, _aten.is_same_size, _aten._reshape_alias),
)
_MASKED = (_aten._scaled_dot_product_efficient_attention, _aten._scaled_dot_product_efficient_attention_backward)
_FLASH = (_aten._scaled_dot_product_flash_attention, _aten._scaled_dot_product_flash_attention_backward)

_BEGIN: Event = ("the stage begins", 0, False)


class Meter:
    """Observes an accelerator (``retouch_plan.rehearsal.fake.accelerator.Accelerator``). ``label``: the holder of new tensors.
    ``compiled``: true while kernels count as fused."""

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

    @property
    def work(self) -> Work:
        """The work of the current stage."""
        return self._stage.work

    @contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """Give tensors that are made inside the context this label."""
        before, self.label = self.label, label
        try:
            yield
        finally:
            self.label = before

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
                    size, place, old = entry
                    self._held[place][old] -= size
                    self._held[place][label] += size
                    entry[2] = label

    def is_weight(self, tensor: FakeTensor) -> bool:
        """Return whether a tensor on a device belongs to weights, weight copies or an optimizer."""
        entry = self._alive.get(tensor.meta.untyped_storage()._cdata)
        return entry is not None and not entry[2].startswith("activations") and entry[2] != "other"

    def _enter(self, name: str) -> None:
        self._stage, self.stage_name = self.stages.setdefault(name, Stage()), name
        for where, size in self._sizes.items():
            self._note(where, _BEGIN, size)

    # Observation

    def observe(
        self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any, given: list[FakeTensor], made: list[FakeTensor]
    ) -> None:
        """Implements ``accelerator.Observer``."""
        for tensor in made:
            self._track(tensor, func)
        if self.counting:
            self._count(func, args, kwargs, result, given, made)

    def wait(self, what: str) -> None:
        """Count that the host waits for the device."""
        if self.counting:
            self.work.waits[f"{what} at {place()}"] += 1

    def communicate(self, moved: int, world: int) -> None:
        """Count a collective over ``moved`` bytes of this rank, with the time of a ring."""
        if self.counting:
            self.work.counts["communicated"] += moved
            self.work.add_seconds("collectives", 2 * moved * (world - 1) / world / self.machine.link)

    def _track(self, tensor: FakeTensor, func: Any) -> None:
        storage = tensor.meta.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        size = (storage.nbytes() + BLOCK - 1) // BLOCK * BLOCK
        where = (tensor.device.index or 0) if tensor.device.type == DEVICE else None
        self._alive[key] = [size, where, self.label]
        weakref.finalize(storage, self._free, key)
        self._grow(size, where, self.label, func)

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
        found = self._stage.most.get(key)
        if found is None or size > found[0]:
            self._stage.most[key] = size, self._held_with(where, more)
        for rise in self._rises:
            before = rise.before.get(where, Counter())
            lifted = size - before.total()
            found = rise.most.get(key)
            if found is None or lifted > found[0]:
                held = self._held_with(where, more)
                held.subtract(before)
                rise.most[key] = lifted, held

    def _held_with(self, where: int, more: Counter[str] | None) -> Counter[str]:
        held = self._held.get(where, Counter()).copy()
        if more is not None:
            held.update(more)
        return held

    def _count(
        self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any, given: list[FakeTensor], made: list[FakeTensor]
    ) -> None:
        packet = func.overloadpacket
        if packet in _FREE or (func.is_view and packet is not _aten.contiguous):
            return
        work = self.work
        tensors = {id(each): each for each in (*given, *made)}.values()
        moved = sum(each.numel() * each.element_size() for each in tensors if each.device.type == DEVICE)
        if packet in (_aten._to_copy, _aten.copy_) and len({each.device.type for each in tensors}) + (len(given) == 0) > 1:
            # ``to_device`` and the offloading of models copy without blocking only from page-locked memory.
            page_locked = kwargs.get("non_blocking", False)
            if not page_locked:
                self.wait("copy from the host")
            work.counts["copied"] += moved
            rate = self.machine.pinned_copy if page_locked else self.machine.copy
            work.add_seconds("copies from and to the host", moved / rate)
            return
        if self.compiled and is_fusible(func, tensors):
            self._fused = self._fused or FusedKernel()
            self._fused.add(given, made)
            return
        self._end_fused()
        work.counts["kernels"] += 1
        work.counts["bytes"] += moved
        memory = moved / self.machine.bandwidth
        formula = flop_registry.get(packet)
        if formula is None:
            work.add_seconds("other kernels", memory)
            return
        flops = formula(*args, **kwargs, out_val=result)
        dtype = next((each.dtype for each in given if each.dtype.is_floating_point), torch.float32)
        kind = "masked attention" if packet in _MASKED else "attention" if packet in _FLASH else "matmul"
        name = f"{kind} {str(dtype).removeprefix('torch.')}"
        work.flops[name] += flops
        work.add_seconds(name, max(flops / self.machine.rate(kind, dtype), memory))

    def _end_fused(self) -> None:
        """Count the operations since the last kernel of another kind as one kernel."""
        if self._fused is not None:
            moved, self._fused = self._fused.bytes(), None
            self.work.counts["kernels"] += 1
            self.work.counts["bytes"] += moved
            self.work.add_seconds("fused kernels", moved / self.machine.bandwidth)


def place() -> str:
    """Return the file and line of Retouch's code that runs now, relative to the package, and of the library it called, if any."""
    frame, library = sys._getframe(1), None
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(OURS) and not name.startswith(_MINE):
            place = name.removeprefix(OURS.removesuffix("retouch")).removeprefix("retouch/")
            return f"{place}:{frame.f_lineno}" + (f" ({library})" if library else "")
        if library is None and "/site-packages/" in name and not name.split("/site-packages/")[1].startswith("torch/"):
            library = f"{name.split('/site-packages/')[1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return library or "?"
