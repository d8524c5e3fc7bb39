"""Contract checks for the parts that you can write yourself, to call in your own tests.

Each check raises AssertionError, with measured values, at the first violation. Use tiny models: the checks evaluate many times.
This package may import everything except ``cli``.

Example::

    def test_my_reward():
        retouch.testing.check_reward(MyReward(), samples)
"""

from retouch_worlds.testing.algorithms import check_advantage, check_objective, check_transition, check_window, playground_policy
from retouch_worlds.testing.data import check_data_source, check_reward
from retouch_worlds.testing.models import check_model, check_renderer
from retouch_worlds.testing.pipelines import check_pipeline
from retouch_worlds.testing.policies import check_policy

__all__ = [
    "check_advantage",
    "check_data_source",
    "check_model",
    "check_objective",
    "check_pipeline",
    "check_policy",
    "check_renderer",
    "check_reward",
    "check_transition",
    "check_window",
    "playground_policy",
]
