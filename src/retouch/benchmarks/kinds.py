"""All suites by name.

Your own package can add a suite with an entry point ``suite.NAME`` in the group ``retouch.plugins``; its class derives from
``retouch.benchmarks.suite.Suite``.
"""

from collections.abc import Mapping
from typing import Any

from retouch.benchmarks.suite import Suite
from retouch.config.imports import did_you_mean
from retouch.config.kinds import Kinds

SUITES = Kinds(
    "suite",
    {
        "playground": "retouch.benchmarks.suites.playground:PlaygroundSuite",
        "gedit": "retouch.benchmarks.suites.editing.gedit:GEditSuite",
        "imgedit": "retouch.benchmarks.suites.editing.imgedit:ImgEditSuite",
        "imgedit-uge": "retouch.benchmarks.suites.editing.imgedit:ImgEditHardSuite",
        "imgedit-multi-turn": "retouch.benchmarks.suites.editing.imgedit:ImgEditMultiTurnSuite",
        "multi-turn": "retouch.benchmarks.suites.editing.multi_turn:MultiTurnSuite",
        "complex-edit": "retouch.benchmarks.suites.editing.complex_edit:ComplexEditSuite",
        "earl": "retouch.benchmarks.suites.editing.earl:EarlSuite",
        "preservation": "retouch.benchmarks.suites.editing.preservation:PreservationSuite",
        "kris": "retouch.benchmarks.suites.editing.kris:KrisSuite",
        "rise": "retouch.benchmarks.suites.editing.rise:RiseSuite",
        "geneval": "retouch.benchmarks.suites.text_to_image.geneval:GenEvalSuite",
        "geneval2": "retouch.benchmarks.suites.text_to_image.geneval2:GenEval2Suite",
        "dpg": "retouch.benchmarks.suites.text_to_image.dpg:DpgSuite",
        "unigenbench": "retouch.benchmarks.suites.text_to_image.unigenbench:UniGenSuite",
        "ocr": "retouch.benchmarks.suites.text_to_image.visible_text:OcrSuite",
        "longtext": "retouch.benchmarks.suites.text_to_image.visible_text:LongTextSuite",
        "pickscore": "retouch.benchmarks.suites.text_to_image.preference:PickScoreSuite",
        "hpsv2": "retouch.benchmarks.suites.text_to_image.preference:HpsSuite",
        "aesthetic": "retouch.benchmarks.suites.text_to_image.preference:AestheticSuite",
    },
)


def all_suites() -> list[type[Suite]]:
    """Return the classes of all suites."""
    return [found for kind in SUITES if (found := SUITES.load(kind)) is not None and issubclass(found, Suite)]


def find_suite(name: str, options: Mapping[str, Any] | None = None) -> Suite:
    """Create the suite with this name. ``options``: values of its fields.

    Raises ValueError for an unknown name, or an option that the suite does not have.
    """
    found = SUITES.load(name)
    known = [kind for kind in SUITES if kind != "import"]
    if found is None:
        raise ValueError(f"there is no suite {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}")
    if not issubclass(found, Suite):
        raise ValueError(f"the suite {name!r} of a plugin does not derive from retouch.benchmarks.suite.Suite")
    made: Suite = found(**(options or {}))
    return made
