"""Reading an answer takes time in proportion to its length, whatever a hostile judge writes."""

import itertools
import json
import random
import re
import time
from pathlib import Path
from re import _constants, _parser

import pytest

from retouch_judge import answers, wording
from retouch_judge.answers import LONGEST, read_scores
from retouch_judge.wording import Scale, bounded, compiled, squeezed

ONE = {"score": Scale(0, 10)}
TWO = {"instruction_following": Scale(0, 10), "quality": Scale(0, 10)}
SIZE = 4_800  # characters; four times as many are just below the longest text that is read
SLOWEST = 1.0  # seconds of CPU time for the longest text
GROWTH = 9.0  # of the time, for four times the length: 4 is linear, 16 is quadratic
MEASURABLE = 0.1  # seconds

PIECES: list[str] = json.loads((Path(__file__).parent / "pieces.json").read_text(encoding="utf-8"))


def seconds(text: str) -> float:
    """CPU time to read the text, the least of two."""
    times = []
    for scales in (ONE, TWO):
        began = time.process_time()
        read_scores(text, scales)
        times.append(time.process_time() - began)
    return max(times)


def shapes() -> list[tuple[str, str, str]]:
    """(before, what is repeated, after): every piece alone, between others, and in random pairs and triples."""
    draw = random.Random(0)
    around = [("score", ""), ("<", "Score: 7"), ("The edit is good. ", "x")]
    made = [(before, piece, after) for piece, (before, after) in itertools.product(PIECES, around)]
    for count in (2, 3):
        made += [(draw.choice(PIECES), "".join(draw.choices(PIECES, k=count)), draw.choice(PIECES)) for _ in range(40)]
    return made


def text_of(shape: tuple[str, str, str], size: int) -> str:
    before, piece, after = shape
    text = before + piece * (size // len(piece)) + after
    assert len(text) <= LONGEST
    return text


SHAPES = shapes()


@pytest.mark.parametrize("part", [pytest.param(part, marks=pytest.mark.slow) for part in range(4)])
def test_reading_time_grows_at_most_linearly_with_the_length(part: int) -> None:
    slow, grown = [], []
    for shape in SHAPES[part::4]:
        long = seconds(text_of(shape, 4 * SIZE))
        if long > SLOWEST and min(seconds(text_of(shape, 4 * SIZE)) for _ in range(2)) > SLOWEST:
            slow.append((shape, round(long, 2)))
        elif long > MEASURABLE:
            ratio = min(seconds(text_of(shape, 4 * SIZE)) / max(seconds(text_of(shape, SIZE)), 1e-9) for _ in range(3))
            if ratio > GROWTH:
                grown.append((shape, round(long, 3), round(ratio, 1)))
    assert (slow, grown) == ([], [])


def unbounded(parsed) -> bool:
    """Whether a parsed pattern repeats anything without a limit."""
    for code, argument in parsed:
        if code in (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT):
            if argument[1] is _constants.MAXREPEAT or unbounded(argument[2]):
                return True
        elif code is _constants.SUBPATTERN:
            if unbounded(argument[3]):
                return True
        elif code is _constants.BRANCH:
            if any(unbounded(branch) for branch in argument[1]):
                return True
        elif code in (_constants.ASSERT, _constants.ASSERT_NOT) and unbounded(argument[1]):
            return True
    return False


def recording(function, used: set[str]):
    """The function of ``re``, which also adds its pattern to ``used``."""

    def recorded(pattern, *arguments, **options):
        used.add(pattern.pattern if isinstance(pattern, re.Pattern) else pattern)
        return function(pattern, *arguments, **options)

    return recorded


def test_regular_expressions_of_the_parser_have_no_unbounded_repeats(monkeypatch) -> None:
    """Patterns of the modules, and patterns that are compiled while an answer is read."""
    used: set[str] = set()
    for module in (answers, wording):
        used |= {value.pattern for value in vars(module).values() if isinstance(value, re.Pattern)}
    for name in ("compile", "search", "match", "fullmatch", "sub", "split", "finditer", "findall"):
        monkeypatch.setattr(re, name, recording(getattr(re, name), used))
    compiled.cache_clear()
    for text in (
        "Score: 7",
        "<score>7</score>",
        "**Score:** 7/10. Fine.",
        '{"score": 7}',
        "Quality: 7\nInstruction following: 8",
        "7",
    ):
        read_scores(text, ONE)
        read_scores(text, TWO)
    assert len(used) > 30
    allowed = {r"\s{33,}"}  # runs of spaces, each of which is matched once
    assert [pattern for pattern in used - allowed if unbounded(_parser.parse(pattern))] == []


def test_bounded_limits_repeats_and_squeezed_shortens_runs_of_white_space() -> None:
    assert bounded(r"a*b+?[*+]\*\+c{2,}") == r"a{0,500}b{1,500}?[*+]\*\+c{2,500}"
    assert squeezed("a" + " " * 32 + "b" + " " * 33 + "c\n" + " " * 40 + "d" + "\n" * 40 + "e") == "a" + " " * 32 + "b c\nd\n\ne"
