"""Published benchmarks: generates the images of a suite with any model, scores them, and reports means with 95 % intervals.

``suite.py`` contains the base class of all suites and the table of their names, and ``suites`` the suites. May import
``inference``, ``report`` and every package below; suites import no torch at module level, because a command that only lists them
must start fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retouch_bench.comparison import compare as compare
    from retouch_bench.running import run as run
    from retouch_bench.suite import BrokenItem as BrokenItem
    from retouch_bench.suite import Suite as Suite
    from retouch_bench.suite import SuiteItem as SuiteItem

_NAMES = {
    "BrokenItem": "retouch_bench.suite",
    "Suite": "retouch_bench.suite",
    "SuiteItem": "retouch_bench.suite",
    "compare": "retouch_bench.comparison",
    "run": "retouch_bench.running",
}

__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'retouch_bench' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
