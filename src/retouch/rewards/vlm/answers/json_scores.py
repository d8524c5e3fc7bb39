"""Scores in JSON, as typed answers contain them. Nothing is repaired; duplicate keys and scores out of range are rejected."""

import re
from collections.abc import Mapping

from retouch.records.shapes import DECODER
from retouch.rewards.vlm.answers.other_scales import is_elsewhere
from retouch.rewards.vlm.answers.patterns import compiled
from retouch.rewards.vlm.answers.scales import Scale
from retouch.rewards.vlm.answers.unseen_images import is_blind
from retouch.types import Json

GENERIC = ("score", "scores", "rating", "grade", "final_score", "overall_score", "overall_rating", "final_rating", "total_score")
_MOST_BRACKETS = 200  # far below the recursion limit of the parser
_TOPS = compiled(r"max|out_?of|scale|range|total|denominator|possible|upper|full_?marks|(?:^|_)top(?:_|$)")
_SCORES = compiled(r"score|rating|grade|revised|corrected|adjusted|updated|final|overall|verdict|answer|actual")
_FOREIGN = compiled(r"(?:^|_)(?:example|sample|template|source|original|unedited|previous|old|initial|target|before)(?:_|$)")
_SCHEMA = ("properties", "$schema", "minimum", "maximum", "required")
_OTHER_SCORE = compiled(  # in a text field next to the score
    r"\b(?:actually|wait|correction|on (?:second thought|reflection)|scratch that)\b[^.\n]{0,40}"
    r"\b(?:should (?:be|have been)|deserves|make (?:it|that|this)|(?:score|rating) (?:is|of)"
    r"|i(?:['’]d| would)? (?:give|say|rate|score))\b[^.\n]{0,20}[0-9]",
    re.IGNORECASE,
)
_FIGURES = compiled(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")
_SEPARATORS = compiled(r"[\s\-]+")
_FRACTION = compiled(r"\s*([0-9][0-9.]*)\s*(?:/\s*([0-9][0-9.]*))?\s*")


def parse(text: str) -> tuple[Json, int] | None:
    """Return the JSON value at the beginning of the text, and the position of its end.

    Returns None if there is no JSON value, or if it has a duplicate key, contains NaN or an infinity, or has too many brackets. A
    comma after the last entry of an object or a list is allowed.
    """
    if text.count("{") + text.count("[") > _MOST_BRACKETS:
        return None
    for written in (text, _without_last_commas(text)):
        try:
            value, end = DECODER.raw_decode(written)
        except ValueError:
            continue
        return value, end
    return None


def _without_last_commas(text: str) -> str:
    """Replace every comma before a closing bracket by a space, within the object or list at the beginning of the text."""
    signs = list(text)
    depth, last, follows = 0, 0, False  # last: position of the last non-space character; follows: it is a comma after an entry
    in_string = escaped = False
    for place, sign in enumerate(signs):
        if in_string:
            in_string = escaped or sign != '"'
            escaped = not escaped and sign == "\\"
        elif sign == '"':
            in_string = True
        elif sign in "{[":
            depth += 1
        elif sign in "}]":
            if follows:
                signs[last] = " "
            depth -= 1
        if depth <= 0:
            break
        if sign not in " \t\r\n":
            follows = sign == "," and not in_string and signs[last] not in "{[,:"
            last = place
    return "".join(signs)


def scores_of(value: Json, scales: Mapping[str, Scale]) -> dict[str, float] | None:
    """Return one number for each name, from an object's keys or from a list in the order of ``scales``. Returns None if a number is
    absent or not on its scale."""
    if isinstance(value, dict):
        return None if _declined(value) or _other_scale(value, scales) else _of_object(value, scales)
    if isinstance(value, list):
        return _of_list(value, scales)
    return _of_list([value], scales) if not isinstance(value, str) else None


def _declined(value: dict[str, Json]) -> bool:
    """Return whether the object must be rejected: it says that the judge saw no image or meant another score, reports an error, or
    is a schema or an example."""
    texts = [part for part in value.values() if isinstance(part, str)]
    blind = any(is_blind(text) or _OTHER_SCORE.search(text) for text in texts)
    return blind or any(_spoils(_plain(key), part) for key, part in value.items())


def _spoils(key: str, part: Json) -> bool:
    if key in ("error", "refusal", "refused", "example", "sample", "template", "dummy"):
        return bool(part)
    if key in ("valid", "is_valid"):
        return part is False
    words = part.strip().lower() if isinstance(part, str) else ""
    if key in ("status", "state"):
        return bool(re.search(r"err|fail|refus|incomplete|pending|invalid", words))
    if key in ("unit", "units"):
        return "percent" in words or "%" in words
    if key in ("image", "picture", "subject", "of", "for"):
        return bool(re.match(r"(?:the )?(?:source|original|unedited|input|reference)\b", words))
    return key in _SCHEMA


def _other_scale(value: dict[str, Json], scales: Mapping[str, Scale]) -> bool:
    """Return whether the object names another maximum than the scale's: {"score": 4, "max_score": 5} on a scale up to 10."""
    own = (*GENERIC, *map(_plain, scales))
    if any(isinstance(part, str) and is_elsewhere(part, scales.values()) for part in value.values()):
        return True
    named = [part for key, part in value.items() if _TOPS.search(_plain(key)) and _plain(key) not in own]
    tops = [float((_FIGURES.findall(str(part)) or ["nan"])[-1]) for part in named]
    return any(top != scale.high for top in tops for scale in scales.values())


def _of_object(value: dict[str, Json], scales: Mapping[str, Scale]) -> dict[str, float] | None:
    keys = [_plain(key) for key in value]
    if len(set(keys)) != len(keys):
        return None
    parts = dict(zip(keys, value.values(), strict=True))
    generic = [parts[key] for key in GENERIC if key in parts]
    if len(scales) == 1 and _other_scores(parts, _plain(next(iter(scales)))):
        return None
    if len(scales) > 1 and not any(_plain(name) in parts for name in scales):
        return _of_list(generic[0], scales) if len(generic) == 1 and isinstance(generic[0], list) else None
    found = {}
    for name, scale in scales.items():
        given = [parts[_plain(name)]] if _plain(name) in parts else []
        if len(scales) == 1 and _plain(name) not in GENERIC:
            given += generic
        elif len(scales) == 1:
            given = generic
        numbers = {_number(part, scale) for part in given}
        if len(numbers) != 1 or None in numbers:
            return None
        found[name] = numbers.pop()
    scores = {name: number for name, number in found.items() if number is not None}
    return None if _contradicted(parts, scores, scales) else scores


def _contradicted(parts: Mapping[str, Json], scores: Mapping[str, float], scales: Mapping[str, Scale]) -> bool:
    """Return whether another key gives a name another score, alone ({"final_success": 2}) or together with all names ({"revised":
    {"success": 2, "restraint": 1}})."""
    own = {_plain(name): name for name in scales}
    for key, part in parts.items():
        if key in own or _TOPS.search(key) or not (_SCORES.search(key) or _FOREIGN.search(key)):
            continue
        if isinstance(part, dict):
            inner = {_plain(inside): value for inside, value in part.items()}
            given = [(name, inner[plain]) for plain, name in own.items() if plain in inner]
        elif isinstance(part, list) and len(part) == len(scales):
            given = list(zip(scales, part, strict=True))
        else:
            given = [(name, part) for plain, name in own.items() if plain in key]
        for name, value in given:
            number = _number(value, scales[name])
            if number != scores[name] and (number is not None or _is_number(value)):
                return True
    return False


def _other_scores(parts: Mapping[str, Json], name: str) -> bool:
    """Return whether the object has a second number that may replace the score: a revised score, or the score of another image."""
    numbers = [key for key, part in parts.items() if _is_number(part)]
    others = [key for key in numbers if key != name and key not in GENERIC and not _TOPS.search(key)]
    return any(_SCORES.search(key) or _FOREIGN.search(key) for key in others)


def _of_list(value: Json, scales: Mapping[str, Scale]) -> dict[str, float] | None:
    if not isinstance(value, list) or len(value) != len(scales):
        return None
    numbers = [_number(part, scale) for part, scale in zip(value, scales.values(), strict=True)]
    found = {name: number for name, number in zip(scales, numbers, strict=True) if number is not None}
    return found if len(found) == len(scales) else None


def _number(value: Json, scale: Scale) -> float | None:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, str):
        written = _FRACTION.fullmatch(value)
        if written is None or (written[2] is not None and not scale.is_top(written[2])):
            return None
        return scale.read(written[1])
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if abs(value) > 1e9:
        return None
    return scale.admit(float(value))


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(key: str) -> str:
    return _SEPARATORS.sub("_", key.strip().lower())
