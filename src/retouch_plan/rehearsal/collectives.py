"""Simulates rank 0 of several ranks: collectives move no data, but are counted.

Every rank is assumed to hold the same values as rank 0, so a gathered tensor repeats rank 0's values.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.testing._internal.distributed.fake_pg import FakeStore

from retouch_plan.rehearsal.counting.meter import Meter
from retouch_plan.rehearsal.fake.accelerator import HANDLERS, Accelerator
from retouch_plan.rehearsal.fake.tensors import FakeTensor, fake_tensors_of, mapped, tensors_of

_GATHERS = ("allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_", "all_gather_into_tensor")


@contextmanager
def fake_ranks(world: int, meter: Meter) -> Iterator[None]:
    """Inside the context, this process is rank 0 of a process group of ``world`` ranks."""
    if world == 1:
        yield
        return

    def collective(machine: Accelerator, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
        given = fake_tensors_of(args, kwargs)
        if not given:
            return False, None
        moved = sum(each.numel() * each.element_size() for each in given)
        meter.communicate(moved, world)
        unit = max(min(each.numel() for each in given), 1)
        _, work = func(*mapped(args, lambda each: torch.zeros(each.numel() // unit), FakeTensor), **kwargs)
        if func.overloadpacket._qualified_op_name.split("::")[1] in _GATHERS:
            outputs, inputs = tensors_of(args[0]), tensors_of(args[1])
            for each in outputs:
                _repeat(each, inputs[0])
        return True, (args[0], work)

    packets = [getattr(torch.ops.c10d, name) for name in _OPERATIONS]
    HANDLERS.update(dict.fromkeys(packets, collective))
    dist.init_process_group(backend="fake", rank=0, world_size=world, store=FakeStore())
    try:
        with (
            patch.object(_fsdp_param, "alloc_storage", lambda tensor: meter.resize(tensor, tensor.numel() * tensor.itemsize)),
            patch.object(_fsdp_param, "free_storage", lambda tensor: meter.resize(tensor, 0)),
        ):
            yield
    finally:
        dist.destroy_process_group()
        for packet in packets:
            HANDLERS.pop(packet, None)


_OPERATIONS = (
    *("allreduce_", "allreduce_coalesced_", "allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_"),
    *("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_", "broadcast_", "scatter_", "gather_"),
)


def _repeat(output: Any, given: Any) -> None:
    """Set the values of the gathered tensor to as many repetitions of ``given`` as fit into it, if they are known."""
    if isinstance(output, FakeTensor) and isinstance(given, FakeTensor) and given.known_values is not None:
        times = output.numel() // max(given.numel(), 1)
        output.value = given.known_values.flatten().repeat(times).view(output.shape).clone()
        output.known[0] = True
