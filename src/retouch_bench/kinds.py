"""All suites by name.

Your own package can add a suite with an entry point ``suite.NAME`` in the group ``retouch.plugins``; its class derives from
``retouch_bench.suite.Suite``.
"""

from collections.abc import Mapping
from typing import Any

from retouch.config.imports import did_you_mean
from retouch.config.section import Kinds
from retouch_bench.suite import Suite

SUITES = Kinds(
    "suite",
    {
        "playground": "retouch_bench.suites.playground:PlaygroundSuite",
        "gedit": "retouch_bench.suites.editing:GEditSuite",
        "imgedit": "retouch_bench.suites.editing:ImgEditSuite",
        "imgedit-uge": "retouch_bench.suites.editing:ImgEditHardSuite",
        "imgedit-multi-turn": "retouch_bench.suites.editing:ImgEditMultiTurnSuite",
        "multi-turn": "retouch_bench.suites.editing:MultiTurnSuite",
        "complex-edit": "retouch_bench.suites.editing:ComplexEditSuite",
        "earl": "retouch_bench.suites.editing:EarlSuite",
        "preservation": "retouch_bench.suites.editing:PreservationSuite",
        "kris": "retouch_bench.suites.editing:KrisSuite",
        "rise": "retouch_bench.suites.editing:RiseSuite",
        "prompts": "retouch_bench.suites.text_to_image:OwnPromptsSuite",
        "edits": "retouch_bench.suites.editing:OwnEditsSuite",
        "geneval": "retouch_bench.suites.text_to_image:GenEvalSuite",
        "negation": "retouch_bench.suites.text_to_image:NegationSuite",
        "geneval2": "retouch_bench.suites.text_to_image:GenEval2Suite",
        "dpg": "retouch_bench.suites.text_to_image:DpgSuite",
        "unigenbench": "retouch_bench.suites.text_to_image:UniGenSuite",
        "ocr": "retouch_bench.suites.text_to_image:OcrSuite",
        "longtext": "retouch_bench.suites.text_to_image:LongTextSuite",
    },
)


def all_suites() -> list[type[Suite]]:
    """Return the classes of all suites."""
    return [found for kind in SUITES if (found := SUITES.load(kind)) is not None and issubclass(found, Suite)]


def find_suite(name: str, options: Mapping[str, Any] | None = None) -> Suite:
    """Create the suite with this name. ``options``: values of its fields. Raises ValueError for an unknown name, or an option that
    the suite does not have."""
    found = SUITES.load(name)
    known = [kind for kind in SUITES if kind != "import"]
    if found is None:
        raise ValueError(f"there is no suite {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}")
    if not issubclass(found, Suite):
        raise ValueError(f"the suite {name!r} of a plugin does not derive from retouch_bench.suite.Suite")
    made: Suite = found(**(options or {}))
    return made
