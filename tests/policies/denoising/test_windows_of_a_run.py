"""Which denoising steps are transitions, given the run's seed and the training step."""

import pytest

from retouch.policies.rollout import AllSteps, RandomWindow, SlidingWindow


@pytest.mark.parametrize("mode", ["window", "branch"])
def test_random_window_depends_only_on_seed_and_step(mode):
    window = RandomWindow(mode=mode, size=2, low=1, high=6)
    drawn = [window.actions(num_steps=8, seed=0, step=step) for step in range(40)]
    assert drawn == [window.actions(num_steps=8, seed=0, step=step) for step in range(40)]
    assert {actions.start for actions in drawn} == {1, 2, 3, 4}
    assert drawn != [window.actions(num_steps=8, seed=1, step=step) for step in range(40)]


def test_random_window_without_high_reaches_all_steps_except_the_last():
    window = RandomWindow(mode="window", size=2)
    assert {window.actions(num_steps=5, seed=0, step=step).stop for step in range(60)} == {2, 3, 4}


def test_all_steps_and_sliding_window_return_the_expected_ranges():
    assert AllSteps().actions(num_steps=5, seed=0, step=9) == range(4)
    sliding = SlidingWindow(size=2, every=3, stride=1)
    assert [sliding.actions(num_steps=5, seed=9, step=step).start for step in range(10)] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 0]


def test_a_window_that_includes_the_last_step_raises():
    with pytest.raises(ValueError, match="last step has no density"):
        RandomWindow(mode="window", size=2, high=5).actions(num_steps=5, seed=0, step=0)
