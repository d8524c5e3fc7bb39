"""Finds the quoted text of a prompt: the text that the image should show, for rewards that read text in images.

Quotation marks, apostrophes, inch marks and feet marks are often typed as the same character. A text is returned only if the prompt
can be read in one way; half of a quotation is never returned.
"""

import re
from dataclasses import dataclass

_DOUBLE, _SINGLE = '"＂“”„‟', "'‘’‚‛"
_BRACKETS = {"«": "»", "»": "«", "‹": "›", "›": "‹", "「": "」", "『": "』", "｢": "｣", "〝": "〞〟"}
_ELIDED = re.compile(r"\d\ds?\b|(?:n|em|til|tis|twas|cause|bout|round)\b", re.IGNORECASE)  # 'n', '90s


@dataclass(frozen=True, slots=True)
class _Mark:
    """A quotation mark, or what looks like one. ``at``: its place. ``opens``, ``closes``: whether a quotation can begin or end
    here. ``weak``: whether it is an inch mark, a feet mark or an apostrophe, unless it ends a quotation."""

    at: int
    opens: bool
    closes: bool
    weak: bool


@dataclass(frozen=True, slots=True)
class _Found:
    """The first quotation of one kind. ``end``: the place of its closing mark; None if it has none, or if it is not certain."""

    start: int
    end: int | None
    straight_single: bool = False


def quoted(prompt: str) -> str | None:
    """The text of the first quotation in a prompt, in quotation marks of any kind; None if there is none, if it is empty, or if it
    is not certain where it ends.

    A mark after a digit is an inch mark or a feet mark (``5" x 7"``), unless it ends a quotation (``"ROUTE 66"``).
    """
    text = re.sub(r"''|``", '"', prompt)
    text = re.sub(r'\\(?=")|(?<!\d)"(?=")', "", text)  # \"...\" and ""..."", as files with escaped quotation marks have them
    kinds = (_first_in_brackets(text), _first_of(text, _DOUBLE), _first_of(text, _SINGLE))
    found = sorted((kind for kind in kinds if kind is not None), key=lambda kind: kind.start)
    if not found or found[0].end is None:
        return None
    first, end = found[0], found[0].end
    for other in found[1:]:
        inside = first.start < other.start < end
        if inside and (first.straight_single or (other.end is None and not other.straight_single) or (other.end or 0) > end):
            return None
    return text[first.start + 1 : end].strip() or None


def _first_in_brackets(text: str) -> _Found | None:
    """The first quotation in marks of two shapes; quotations of the same kind in it are part of it."""
    places = [(place, left) for left in _BRACKETS if (place := text.find(left)) >= 0]
    if not places:
        return None
    start, left = min(places)
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == left) - (text[place] in _BRACKETS[left])
        if depth == 0:
            return _Found(start, place)
    return _Found(start, None)


def _first_of(text: str, family: str) -> _Found | None:
    """The first quotation in the marks of a family, whose opening and closing marks may look alike."""
    single = family is _SINGLE
    marks = [mark for place, sign in enumerate(text) if sign in family and (mark := _mark(text, place, single=single))]
    opening: _Mark | None = None
    for number, mark in enumerate(marks):
        if opening is None:
            if mark.opens:
                opening = mark
            elif mark.closes and not mark.weak and not single:
                return _Found(mark.at, None)  # the end of a quotation without a beginning
        elif mark.closes:
            after = marks[number + 1] if number + 1 < len(marks) else None
            stray = after is not None and after.closes and not after.opens and (mark.weak or not after.weak)
            straight = single and text[opening.at] == "'"
            return _Found(opening.at, None if stray else mark.at, straight)
        elif single:
            opening = mark  # the mark before was an apostrophe
        else:
            return _Found(opening.at, None)
    return None if opening is None or single else _Found(opening.at, None)


def _mark(text: str, place: int, *, single: bool) -> _Mark | None:
    """The mark at a place; None if no quotation can begin or end there."""
    before, after = text[place - 1 : place], text[place + 1 : place + 2]
    spaced = not single and not before.strip() and not after.strip()
    opens = (bool(after.strip()) or spaced) and not _in_word(before) and not (single and _ELIDED.match(text, place + 1))
    closes = (bool(before.strip()) or spaced) and not _in_word(after)
    weak = closes and ((_in_word(before) and before.isnumeric()) or (single and before in "sS"))
    return _Mark(place, opens, closes, weak) if opens or closes else None


def _in_word(sign: str) -> bool:
    """Whether a character is a letter or digit of a script that separates words by spaces."""
    return sign.isalnum() and sign < "\u2e80"
