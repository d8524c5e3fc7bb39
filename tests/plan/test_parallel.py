"""Two calls at the same time, one of them in a second process."""

import math

import pytest

from retouch_plan.dry_run import both, each_in_turn


def test_a_second_process_gives_the_same_results(caplog):
    assert both(math.sqrt, 4.0, 9.0) == each_in_turn(math.sqrt, 4.0, 9.0) == (2.0, 3.0)
    assert not [record for record in caplog.records if record.name.startswith("retouch")]


def test_what_a_second_process_cannot_do_is_done_in_this_one(caplog):
    assert both(lambda value: value + 1, 1, 2) == (2, 3)  # a lambda cannot be pickled
    assert "the second process failed" in caplog.text


@pytest.mark.parametrize("values", [(-1.0, 4.0), (4.0, -1.0)])
def test_errors_are_raised_in_this_process(values):
    with pytest.raises(ValueError, match=r"math domain error|nonnegative") as raised:
        both(math.sqrt, *values)
    assert raised.traceback[-1].name == "both"
