"""The mathematics of training: advantages, surrogate losses, loss weights, SDE transitions, divergences, token distributions,
confidence intervals, random generators, and the answer in a completion.

The functions of tensors are pure, return tensors in fp32 (unless their docstring says otherwise), and cite their source. A module
here may import torch and other modules of ``core``, and nothing else of the project.

The functions of advantages and losses can be called directly on the package, for example ``retouch.core.group_relative(...)``.
``retouch.core.gae`` is the module, not the function.
"""

from importlib import import_module
from typing import Any

_FUNCTIONS = {
    "advantages": (
        "batch_relative",
        "best_of_group",
        "check_reward_range",
        "decoupled",
        "equal_groups",
        "exponential_weights",
        "group_relative",
        "rescale_rewards",
        "turn_returns",
        "zero_std_groups",
    ),
    "gae": ("clipped_value_loss", "discounted_returns", "explained_variance", "whiten"),
    "surrogates": (
        "approx_kl",
        "cispo",
        "clip_fraction",
        "clipped_surrogate",
        "dppo",
        "importance_weights",
        "reinforce",
        "sequence_log_ratio",
    ),
}
__all__ = sorted([*_FUNCTIONS, *(name for names in _FUNCTIONS.values() for name in names)])


def __getattr__(name: str) -> Any:
    for module, names in _FUNCTIONS.items():
        if name == module:
            return import_module(f"retouch.core.{module}")
        if name in names:
            return getattr(import_module(f"retouch.core.{module}"), name)
    raise AttributeError(f"module 'retouch.core' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
