"""The guard against training on known test sets.

Test sets are recognised by what a recipe gives: an id on the Hub, a path, a split. Copies under other names are not recognised.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Each pattern is searched in a lower-case name whose parts are separated by / and have no - _ or space.
_NAMES = {
    "Complex-Edit": r"^(?!.*gpt(image)?edit).*(^|/)complexedit(/|$)",  # GPT-Image-Edit is training data with a subset of that name
    "ComplexBench-Edit": r"complexbenchedit",
    "Emu Edit test set": r"emuedit(testset|/test)",
    "GenEval": r"(^|/)geneval(2)?(\.\w+)?$|(^|/)geneval/(test|evaluation|prompts)|evaluationmetadata\.jsonl$|geneval2data\.jsonl$",
    "Flow-GRPO's OCR test list": r"(^|/)ocr(/test\w*)?\.(txt|jsonl)$",
    "Flow-GRPO's PickScore test list": r"(^|/)pickscore/test",
    "Calligrapher's bench": r"calligrapherbench|calligrapher2025/calligrapher(/|\[|$)",
    "MagicBrush test": r"magicbrush(/.*)?(/|\[)test|magicbrush(eval|test)",
    "GEdit-Bench": r"(^|/)geditbench",
    "ImgEdit-Bench": r"imgeditbench|(^|/)imgedit/bench|(^|/)(basicedit|ugeedit)\.json$",
    "OmniEdit-Bench": r"omnieditbench",
    "EditReward-Bench": r"editrewardbench",
    "I2EBench": r"(^|/)i2e?bench",
    "AURORA-Bench": r"aurorabench",
    "OmniEdit's split dev": r"omniedit[^\[]*[\[/]dev(\W|\d|$)",
    "EARL's evaluation sets": r"(^|/)(omniedit|emuedit|aurora|vismin)(eval|test)(/|\.|\[|$)|eschervismindev"
    r"|(^|/)benchmarks/(emuedit|aurora|omniedit|vismin)\w*\.(parquet|jsonl?)$",
    "EARL's validation lists": r"(^|/)earldatasets/\w+/validation(/|\.|$)",
    "KontextBench": r"(^|/)kontextbench",
    "RISEBench": r"(^|/)risebench|(^|/)datav2totalwsubtask\.json$",
    "KRIS-Bench": r"(^|/)krisbench",
    "DrawBench": r"(^|/)drawbench",
    "PartiPrompts": r"(^|/)partiprompts",
    "DPG-Bench": r"(^|/)dpgbench",
    "LongText-Bench": r"longtextbench|(^|/)textprompts(zh)?\.jsonl$",
    "UniGenBench": r"unigenbench|(^|/)testprompts(en|zh)(long)?\.csv$",
    "HPSv2's benchmark": r"hp[ds]v2(/.*)?/(benchmark|test)",
    "VisMin-Bench": r"visminbench",
    "MMMG": r"mmmgbench/mmmg(bench)?(/|\[|$)",
    "T2I-CompBench": r"t2icompbench.*val",
}
_INSTEAD = {"Complex-Edit": "UCSC-VLAA/GPT-Image-Edit-1.5M has similar complex instructions for training"}
_TRIPLET = re.compile(r"test\d+_source\.png")
_TRIPLETS = 100
"""Number of items of Calligrapher's bench."""


@dataclass(frozen=True, slots=True)
class KnownTestSet:
    """A recognised test set. ``place``: the path or id by which it was recognised."""

    name: str
    place: str

    def __str__(self) -> str:
        return self.place if self.place.casefold() == self.name.casefold() else f"{self.place} is {self.name}"


def find_test_sets(places: Sequence[str | Path], *, split: str | None = None) -> tuple[KnownTestSet, ...]:
    """The known test sets among data-set ids and paths. ``split``: the split that is read; a split whose name starts with "test"
    counts as a test set.

    For a path, the target of links is checked too. A folder is also recognised by the names and the number of the files of
    Calligrapher's bench.
    """
    found = []
    for place in places:
        where = Path(place)
        names = {str(place), *([str(where.resolve())] if where.exists() else [])}
        plain = {re.sub(r"[-_ ]", "", name.lower().replace("\\", "/")) + (f"[{split}]" if split else "") for name in names}
        for title, pattern in _NAMES.items():
            if any(re.search(pattern, name) for name in plain | {name.partition("[")[0] for name in plain}):
                found.append(KnownTestSet(title, str(place)))
        folder = where if where.is_dir() else where.parent
        if where.exists() and sum(_TRIPLET.fullmatch(file.name) is not None for file in folder.iterdir()) == _TRIPLETS:
            found.append(KnownTestSet("Calligrapher's bench", str(place)))
        if split is not None and split.lower().startswith("test"):
            found.append(KnownTestSet(f"the split {split!r}", str(place)))
    return tuple(dict.fromkeys(found))


def refuse_test_sets(places: Sequence[str | Path], *, split: str | None = None, allow_test_sets: bool) -> tuple[KnownTestSet, ...]:
    """The known test sets among the training data. Raises ValueError if there are any and the recipe does not allow them."""
    found = find_test_sets(places, split=split)
    if found and not allow_test_sets:
        listed = "; ".join(map(str, found))
        others = "".join(f" ({_INSTEAD[test.name]})" for test in found if test.name in _INSTEAD)
        raise ValueError(
            f"these are test sets, not for training: {listed}. Use other data{others}, or set data.allow_test_sets: true; "
            "the run records it"
        )
    return found
