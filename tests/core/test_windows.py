"""Windows: always within the denoising steps, never on the last one, and each kind covers the steps that it should."""

from collections import Counter

import pytest

from retouch.core.random import generator
from retouch.core.windows import all_steps, random_window, sliding_window


def test_all_steps_leaves_out_the_last():
    assert all_steps(10) == range(9)
    assert all_steps(2) == range(1)


def test_random_window_uses_every_valid_start_and_no_other():
    windows = [random_window(10, 3, low=1, high=6, generator=generator(0, "window", k)) for k in range(400)]
    starts = Counter(window.start for window in windows)
    assert set(starts) == {1, 2, 3}
    assert min(starts.values()) > 90
    assert all(len(window) == 3 and window.stop <= 6 for window in windows)
    assert random_window(10, 3, low=1, high=6, generator=generator(0, "window", 7)) == windows[7]


def test_sliding_window_advances_and_wraps_around():
    starts = [sliding_window(10, 4, step=step, every=2, stride=2).start for step in range(12)]
    assert starts == [0, 0, 2, 2, 4, 4, 5, 5, 0, 0, 2, 2]
    assert [sliding_window(10, 9, step=step, every=1, stride=1) for step in range(3)] == [range(9)] * 3


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: all_steps(1), "at least 2"),
        (lambda: random_window(10, 3, low=0, high=10, generator=generator(0)), "high <= 9"),
        (lambda: random_window(10, 3, low=5, high=5, generator=generator(0)), "low < high"),
        (lambda: random_window(10, 4, low=0, high=3, generator=generator(0)), "give 1 to 3"),
        (lambda: random_window(10, 0, low=0, high=3, generator=generator(0)), "give 1 to 3"),
        (lambda: sliding_window(10, 10, step=0, every=1, stride=1), "give 1 to 9"),
        (lambda: sliding_window(10, 3, step=0, every=1, stride=4), "stride 1 to 3"),
        (lambda: sliding_window(10, 3, step=0, every=0, stride=1), "every >= 1"),
        (lambda: sliding_window(10, 3, step=-1, every=1, stride=1), "step >= 0"),
    ],
)
def test_invalid_windows_raise_with_the_valid_values(call, says):
    with pytest.raises(ValueError, match=says):
        call()
