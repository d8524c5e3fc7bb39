"""All suites by name.

A package of yours adds one by an entry point ``suite.NAME`` of the group ``retouch.plugins``; its class derives from
``retouch.benchmarks.suite.Suite``.
"""

from collections.abc import Mapping
from typing import Any

from retouch.benchmarks.suite import Suite
from retouch.config.imports import nearest
from retouch.config.kinds import Kinds

SUITES = Kinds(
    "suite",
    {
        "playground": "retouch.benchmarks.suites.playground:PlaygroundSuite",
    },
)


def find_suite(name: str, options: Mapping[str, Any] | None = None) -> Suite:
    """The suite of this name, with the given ``options``, which are its fields.

    Raises ValueError for an unknown name, or an option that the suite does not have.
    """
    found = SUITES.load(name)
    known = [kind for kind in SUITES if kind != "import"]
    if found is None:
        near = nearest(name, known)
        raise ValueError(f"there is no suite {name!r}{f'; did you mean {near!r}?' if near else ''}; there are {', '.join(known)}")
    if not issubclass(found, Suite):
        raise ValueError(f"the suite {name!r} of a plugin does not derive from retouch.benchmarks.suite.Suite")
    made: Suite = found(**(options or {}))
    return made
