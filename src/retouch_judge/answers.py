"""Reads the scores in a judge's answer: typed JSON, or numbers with a label. An ambiguous answer has no score.

In free text, a score is a label, a separator and a number ("**Score:** 7/10"), or a tag ("<score>7</score>"). A statement must
begin a line or a sentence and end after its number, the number must be on the scale, and all statements of a name must agree. An
answer has no score if it is out of range, on another scale, truncated, refused, hedged, contradicted, or quoted from the image.
Nothing is clamped, repaired or filled with a default: an unreadable score is missing.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from retouch.records.files import DECODER
from retouch.types import Json
from retouch_judge.wording import (
    Scale,
    compiled,
    is_blind,
    is_elsewhere,
    is_refusal,
    is_retracted,
    leads_to_own_score,
    squeezed,
    without_quotes,
    without_reasoning,
)

GENERIC = ("score", "scores", "rating", "grade", "final_score", "overall_score", "overall_rating", "final_rating", "total_score")
_MOST_BRACKETS = 200  # far below the recursion limit of the parser
_TOPS = compiled(r"max|out_?of|scale|range|total|denominator|possible|upper|full_?marks|(?:^|_)top(?:_|$)")
_SCORES = compiled(r"score|rating|grade|revised|corrected|adjusted|updated|final|overall|verdict|answer|actual")
_FOREIGN_KEYS = compiled(r"(?:^|_)(?:example|sample|template|source|original|unedited|previous|old|initial|target|before)(?:_|$)")
_SCHEMA = ("properties", "$schema", "minimum", "maximum", "required")
_OTHER_SCORE = compiled(  # in a text field next to the score
    r"\b(?:actually|wait|correction|on (?:second thought|reflection)|scratch that)\b[^.\n]{0,40}"
    r"\b(?:should (?:be|have been)|deserves|make (?:it|that|this)|(?:score|rating) (?:is|of)"
    r"|i(?:['’]d| would)? (?:give|say|rate|score))\b[^.\n]{0,20}[0-9]",
    re.IGNORECASE,
)
_FIGURES = compiled(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")
_KEY_SEPARATORS = compiled(r"[\s\-]+")
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
        return None if _is_rejected(value, scales) else _of_object(value, scales)
    if isinstance(value, list):
        return _of_list(value, scales)
    return _of_list([value], scales) if not isinstance(value, str) else None


def _is_rejected(value: dict[str, Json], scales: Mapping[str, Scale]) -> bool:
    """Return whether the object says that the judge saw no image or meant another score, reports an error, is a schema or an
    example, or names another maximum than the scale's: {"score": 4, "max_score": 5} on a scale up to 10."""
    texts = [part for part in value.values() if isinstance(part, str)]
    if any(is_blind(text) or _OTHER_SCORE.search(text) or is_elsewhere(text, scales.values()) for text in texts):
        return True
    if any(_spoils(_plain(key), part) for key, part in value.items()):
        return True
    own = (*GENERIC, *map(_plain, scales))
    named = [part for key, part in value.items() if _TOPS.search(_plain(key)) and _plain(key) not in own]
    tops = [float((_FIGURES.findall(str(part)) or ["nan"])[-1]) for part in named]
    return any(top != scale.high for top in tops for scale in scales.values())


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


def _of_object(value: dict[str, Json], scales: Mapping[str, Scale]) -> dict[str, float] | None:
    keys = [_plain(key) for key in value]
    if len(set(keys)) != len(keys):
        return None
    parts = dict(zip(keys, value.values(), strict=True))
    generic = [parts[key] for key in GENERIC if key in parts]
    if len(scales) == 1:
        # A second number may replace the score: a revised score, or the score of another image.
        own = (*map(_plain, scales), *GENERIC)
        others = [key for key, part in parts.items() if _is_number(part) and key not in own and not _TOPS.search(key)]
        if any(_SCORES.search(key) or _FOREIGN_KEYS.search(key) for key in others):
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
        if key in own or _TOPS.search(key) or not (_SCORES.search(key) or _FOREIGN_KEYS.search(key)):
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
    return _KEY_SEPARATORS.sub("_", key.strip().lower())


_ENGLISH = (
    r"(?:(?:my|the|final|overall|total|combined|assigned)[\s_]+){0,3}(?:scores?|rating|grade)"
    r"(?:\s+for\s+(?:this|the)\s+edit(?:ed\s+(?:image|picture))?)?"
)
_FINAL = rf"{_ENGLISH}|(?:(?:my|the)\s+)?final\s+answer"
_TAGS = rf"{_ENGLISH}|(?:final[\s_]+)?answer"
_FOREIGN = (
    r"(?:endgültige\s+|finale\s+)?(?:gesamt)?(?:bewertung|punktzahl|punkte|endnote|wertung)|note(?:\s+(?:finale|globale))?"
    r"|(?:puntuación|puntaje|calificación|nota|pontuação|avaliação|punteggio|valutazione|voto)(?:\s+(?:final|finale|total))?"
    r"|(?:итоговая\s+|общая\s+)?оценка|балл|总分|總分|(?:最终|综合)?(?:评分|得分|分数|打分|評分)|(?:総合)?(?:スコア|評価|点数)|(?:최종\s*)?(?:점수|평점)"
    r"|ocena|wynik|cijfer|beoordeling|puan|betyg|poäng"
)
_FIGURE = r"(?P<figure>[0-9][0-9.,]*)(?:\s*(?:/|／|out\s+of|of|von|sur|de|su|из|van|av)\s*(?P<top>[0-9][0-9.]*))?"
_UNIT = r"(?:\s*(?:分|点|점|points?|pts?\.?|Punkten?|puntos|pontos|punti|баллов|балла))?"
_BULLET = r"[ \t]*(?:(?:[-•–+]|[0-9]{1,2}[.)]|#{1,6})[ \t]+)?"
_BOUNDS = r"(?:\s*\(\s*(?:from\s+)?(?P<bounds>[0-9.]+\s*(?:-|–|—|to)\s*[0-9.]+|(?:/|out\s+of)\s*[0-9.]+)\s*\))?"
_TAIL = compiled(r"[ \t]*(?:\Z|\n|[.;!。；！](?=\s|\Z)|,(?=\s)|\(|（|[|]|[-–—](?=\s))")
_NUMBERED = compiled(r"not[ea]\s*[:：]\s*[0-9]{1,2}[.)][ \t]+\S", re.IGNORECASE)  # "Note: 1. ...": the first remark, not a grade
_LISTED = compiled(r"[0-9]{1,2}[.)][ \t]+\S")
_SENTENCE_END = compiled(r"(?:\A|\n|[.!?。！？][)\s]|[。！？])[ \t]*\Z")
_BEFORE = 64  # characters before a boxed answer that are searched for the end of its label
_LABELLED = compiled(r"(?:[:：=]|\bis)[ \t*]*\Z")
_BOXED = compiled(r"\${0,2}\\boxed\{\s*(?P<figure>[0-9][0-9.]*(?:\s*/\s*[0-9][0-9.]*)?)\s*\}\${0,2}")
_BARE = compiled(rf"\s*{_FIGURE}{_UNIT}\s*\.?\s*")
_BULLETED, _BULLETS = compiled(_BULLET), compiled(rf"(?m)^{_BULLET}")
_NUMBERS = compiled(r"[0-9]+(?:\.[0-9]+)?")
_SEPARATORS = compiled(r"[\s_\-]+")
_MOST = 50  # maximum number of scores in one text
_JOINED = compiled(r"\s*[,;|]?\s*(?:and\s+)?\Z")


@dataclass(frozen=True, slots=True)
class Statement:
    """A score that the text states: the name of the score, its value, and its position in the text."""

    name: str
    value: float
    start: int
    end: int


def stated(text: str, scales: Mapping[str, Scale]) -> dict[str, float] | None:
    """Return a score for every name if all statements agree, otherwise None. ``text``: without reasoning, quotations, JSON and
    Markdown marks."""
    listed = list(_mentions(text, scales))
    mentions = sorted((one for one in listed if one is not None), key=lambda one: one.start)
    if not 0 < len(listed) <= _MOST or len(mentions) < len(listed):
        return None
    found: dict[str, float] = {}
    end = 0
    for one in mentions:
        if not _opens(text, one.start, end) or found.setdefault(one.name, one.value) != one.value:
            return None
        end = one.end
    # The rest of the text must not invalidate the statements: no other number after the first one, and no retraction.
    rest = list(text)
    for one in mentions:
        rest[one.start : one.end] = " " * (one.end - one.start)
    after = _BULLETS.sub("", "".join(rest[mentions[0].start :]))
    stands = not any(sign.isnumeric() for sign in after) and not is_retracted(after)
    return found if set(found) == set(scales) and stands else None


def _unboxed(match: re.Match[str]) -> str:
    """Return what takes the place of TeX's boxed answer: a tag ("<answer>7</answer>"), or the bare number after a label."""
    before = match.string[max(0, match.start() - _BEFORE) : match.start()]
    return match["figure"] if _LABELLED.search(before) else f"<answer>{match['figure']}</answer>"


def _mentions(text: str, scales: Mapping[str, Scale]) -> Iterator[Statement | None]:
    """Yield each passage that looks like a score of one of the names; None for a passage that cannot be read."""
    for name, scale in scales.items():
        if len(scales) > 1:
            yield from _of_tag(text, name, scale, _own(name))
            yield from _of_label(text, name, scale, _own(name), decimal_comma=False)
            continue
        # Every label without a number: "Score: TBD", or "Final score:" at the end of a truncated text.
        without = compiled(rf"(?<!\w)(?:{_own(name)}|{_FINAL})\s*[:：=](?!\s*[0-9])", re.IGNORECASE)
        yield from (None for _ in without.finditer(text))
        yield from _of_tag(text, name, scale, rf"{_own(name)}|{_TAGS}")
        yield from _of_label(text, name, scale, rf"{_own(name)}|{_FINAL}", decimal_comma=False)
        yield from _of_label(text, name, scale, _FOREIGN, decimal_comma=True)


def _of_tag(text: str, name: str, scale: Scale, label: str) -> Iterator[Statement | None]:
    tag = compiled(rf"<\s*(?P<tag>{label})\s*>\s*{_FIGURE}\s*<\s*/\s*(?P=tag)\s*>", re.IGNORECASE)
    for opening in compiled(rf"<\s*(?:{label})\s*>", re.IGNORECASE).finditer(text):
        whole = tag.match(text, opening.start())
        value = None if whole is None else _value(whole, scale, decimal_comma=False)
        yield None if whole is None or value is None else Statement(name, value, whole.start(), whole.end())


def _of_label(text: str, name: str, scale: Scale, label: str, *, decimal_comma: bool) -> Iterator[Statement | None]:
    line = rf"(?<!\w)(?:{label}){_BOUNDS}(?P<sign>\s*(?:[:：=]|\b(?:is|of)\b)?\s*){_FIGURE}{_UNIT}"
    for match in compiled(line, re.IGNORECASE).finditer(text):
        numbered = _NUMBERED.match(text, match.start()) or ("\n" in match["sign"] and _LISTED.match(text, match.start("figure")))
        value = None if numbered else _value(match, scale, decimal_comma=decimal_comma)
        ends = _TAIL.match(text, _figure_end(match)) is not None
        signed = match["sign"].strip().lower() in (":", "：", "=", "is")
        # The scale that the text names, "(0-10)" or "(out of 10)", must be the requested one.
        bounds = [float(figure) for figure in _NUMBERS.findall(match["bounds"] or "")]
        fits = match["bounds"] is None or bounds in ([scale.high], [scale.low, scale.high])
        if value is None or not ends or not signed or not fits:
            yield None
        else:
            yield Statement(name, value, match.start(), _figure_end(match))


def _figure_end(match: re.Match[str]) -> int:
    """Return the position of the end of the number; a final point or comma belongs to the sentence."""
    return match.end() - (1 if match[0][-1] in ".," else 0)


def _value(match: re.Match[str], scale: Scale, *, decimal_comma: bool) -> float | None:
    figure, top = match["figure"], match["top"]
    if top is None:
        figure = re.sub(r"[.,]\Z", "", figure)
    elif not scale.is_top(re.sub(r"\.\Z", "", top)):
        return None
    return scale.read(figure, decimal_comma=decimal_comma or top is not None)


def _opens(text: str, start: int, after: int) -> bool:
    """Return whether a statement begins its line or sentence, and is not a quotation that the sentence before it introduces."""
    before = text[:start]
    if after and _JOINED.fullmatch(text[after:start]):
        return True
    begins = _BULLETED.fullmatch(before[before.rfind("\n") + 1 :]) is not None or _SENTENCE_END.search(before[-80:]) is not None
    follows = after > 0 and "\n" not in before[after:].strip(" \t").strip("\n")  # the previous line states another score
    bullet = before[before.rfind("\n") + 1 :]
    words = before.removesuffix(bullet) if _BULLETED.fullmatch(bullet) else before
    return begins and (follows or leads_to_own_score(words))


def _own(name: str) -> str:
    """Return a pattern for spellings of a name: instruction_following, "Instruction Following", "Instruction-following score"."""
    return r"[\s_\-]+".join(re.escape(part) for part in _SEPARATORS.split(name)) + r"(?:\s+(?:score|rating))?"


LONGEST = 20_000  # characters; a longer answer is usually degenerate text
_OWN = (
    r"json(?:[ \t]+(?:object|output|response|answer|result))?|output|response|answer|evaluation|assessment|verdict|results?"
    r"|judge?ment"
)
_LABEL = (
    r"(?:[#*_-]{1,6}[ \t]*)?(?:(?:here[ \t]+(?:is|are)|this[ \t]+is|my|the|final|overall|own)[ \t]+){0,4}"
    rf"(?:{_OWN})(?:[ \t]+(?:of|for)[ \t]+(?:the|this)[ \t]+edit)?(?:[ \t]+(?:in|as)[ \t]+json)?[*_]{{0,2}}[:：][*_]{{0,2}}"
)
# An object or a list at the beginning of a line; or an object after a label such as "My evaluation:", if the label begins a line or
# a sentence.
_OPENING = compiled(
    r"^[ \t]*(?=\{|\[\s*[-0-9\"{\[])"
    rf"|(?:^|(?<=[.!?。！？])(?=[ \t]))[ \t]*(?P<label>{_LABEL})[ \t]*(?=\{{\s*\")",
    re.MULTILINE | re.IGNORECASE,
)
_DELIMITER = "||V^=^V||"  # in VIEScore's prompts
_LINE_END = compiled(r"[ \t]*(?:\n|\Z)")
_FENCE = compiled(r"^[ \t]*```(?:json|text|plaintext)?[ \t]*$", re.MULTILINE | re.IGNORECASE)


def read_scores(text: str, scales: Mapping[str, Scale]) -> dict[str, float] | None:
    """Return the score of every name, or None if any score is absent or ambiguous. Never raises an error, for any text.

    The supported formats are JSON (an object with these names, or with a list "score" in their order; plain, fenced, between
    VIEScore's delimiters, after a label such as "My evaluation:", or before or after prose), tags, labelled lines, and, for a
    single name, a bare number. With a single name, general labels (score, rating and so on, in a few languages) also stand for the
    name.
    """
    if not scales or len(text) > LONGEST:
        return None
    text = squeezed(text)
    whole = _typed_whole(text, scales)
    if whole is not None:
        return whole[0]
    said = without_reasoning(text.replace("\r\n", "\n"))
    if said is None or not said:
        return None
    # VIEScore's delimiters become line breaks if there are two with JSON between them.
    before, *insides = said.split(_DELIMITER)
    if len(insides) == 2 and insides[0].strip().startswith(("{", "[", "```")):
        said = "\n".join((before, insides[0].strip(), insides[1])).strip()
    whole = _typed_whole(said, scales)
    if whole is not None:
        return whole[0]
    return _free(said, scales)


def _typed_whole(text: str, scales: Mapping[str, Scale]) -> tuple[dict[str, float] | None] | None:
    """Read a text that is only JSON, possibly in one code fence. Returns a tuple with the scores, or None for another text."""
    text = text.strip()
    fences = list(_FENCE.finditer(text))
    if len(fences) == 2 and fences[0].start() == 0 and fences[1].end() == len(text):
        text = text[fences[0].end() : fences[1].start()].strip()
    parsed = parse(text)
    if parsed is None or parsed[1] != len(text):
        return None
    return (scores_of(parsed[0], scales),)


def _free(text: str, scales: Mapping[str, Scale]) -> dict[str, float] | None:
    blocks = _blocks(text)
    if blocks is None:
        return None
    objects, prose = blocks
    words = without_quotes(prose)
    if words is None or is_refusal(words) or is_blind(words) or is_elsewhere(words, scales.values()):
        return None
    words = _BOXED.sub(_unboxed, words)
    words = squeezed(re.sub(r"\*|(?<!\w)_{1,2}|_{1,2}(?!\w)", " ", words))  # without the signs of Markdown emphasis
    if re.search(r"[{}]|<\|", words):
        return None
    if not objects:
        (name, scale), *others = scales.items()
        whole = None if others else _BARE.fullmatch(words)  # only a number: "7", "7/10"
        alone = None if whole is None else _value(whole, scale, decimal_comma=whole["top"] is not None)
        return {name: alone} if alone is not None else stated(words, scales)
    readings = [scores_of(value, scales) for value in objects]
    first = readings[0]
    if first is None or any(reading != first for reading in readings):
        return None
    said = stated(words, scales)
    labels = re.search(r"\b(?:scores?|rating|grade)\b|[0-9]", words, re.IGNORECASE) is not None
    return first if said == first or (said is None and not labels) else None


def _blocks(text: str) -> tuple[list[Json], str] | None:
    """Return the JSON values that are on lines of their own, and the text without them. Returns None if a value is not valid JSON,
    if a fence is not closed, if there is other text both before and after the values, or if the text introduces the values as a
    quotation or retracts them."""
    fences = list(_FENCE.finditer(text))
    if len(fences) % 2 or text.count("```") != len(fences):
        return None
    # A fence contains JSON or the whole answer; other fences contain code or a quotation.
    insides = [text[one.end() : other.start()].lstrip() for one, other in zip(fences[::2], fences[1::2], strict=True)]
    whole = len(fences) == 2 and not text[: fences[0].start()].strip() and not text[fences[1].end() :].strip()
    if not whole and not all(inside.startswith(("{", "[")) for inside in insides):
        return None
    text = _FENCE.sub(lambda fence: " " * len(fence[0]), text)
    values: list[Json] = []
    rest: list[str] = []
    place = 0
    for opening in _OPENING.finditer(text):
        if opening.start() < place:
            continue
        parsed = parse(text[opening.end() :])
        if parsed is None:
            return None
        end = opening.end() + parsed[1]
        if not _LINE_END.match(text, end):
            return None
        values.append(parsed[0])
        rest.append(text[place : opening.start()] + (f"\n{opening['label']}" if opening["label"] else ""))
        place = end
    rest.append(text[place:])
    if values and ((rest[0].strip() and rest[-1].strip()) or not leads_to_own_score(rest[0]) or is_retracted(rest[-1])):
        return None
    return values, "\n".join(rest)
