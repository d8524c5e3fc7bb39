"""The work of microbatches that a dry run counts without running them."""

import pytest

from retouch.types import Slice
from retouch_plan.machines import MACHINES
from retouch_plan.meter import Meter
from retouch_plan.repeats import Repeats


def counted(sizes, *, calls=1):
    """The sizes of the microbatches that run, and the FLOPs of all, if a microbatch of size n has n FLOPs. ``calls``: the number of
    passes over the microbatches."""
    meter = Meter(MACHINES["h100"])
    microbatches = Repeats(meter).parts(lambda: iter([Slice(slice(3, 4), slice(10, 10 + size)) for size in sizes]))
    ran = []
    with meter.stage("update"):
        for _ in range(calls):
            for part in microbatches():
                size = part.actions.stop - part.actions.start
                meter.work.flops["half"] += size
                ran.append(size)
        return ran, meter.work.flops["half"]


@pytest.mark.parametrize("sizes", [[2, 1, 2, 1, 2, 1], [4, 4, 1, 4, 4, 1], [1, 1, 1, 1], [3], [4, 1]], ids=str)
@pytest.mark.parametrize("calls", [1, 3])
def test_all_microbatches_count_with_the_work_of_their_own_size(sizes, calls):
    assert counted(sizes, calls=calls)[1] == calls * sum(sizes)


def test_of_equal_microbatches_two_run_and_then_one_in_each_further_pass():
    assert counted([2, 2, 2, 2], calls=3)[0] == [2, 2, 2, 2]


def test_a_size_runs_once_besides_the_first_microbatch_which_has_no_gradients_yet():
    assert counted([2, 1, 2, 1, 2, 1])[0] == [2, 1, 2]
    assert counted([4, 4, 1, 4, 4, 1])[0] == [4, 4, 1]
