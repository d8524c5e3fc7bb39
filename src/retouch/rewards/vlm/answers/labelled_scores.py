"""Scores in free text: a label, a separator and a number ("**Score:** 7/10"), or a tag ("<score>7</score>").

A statement must begin a line or a sentence and end after its number, the number must be on the scale, and all statements of a name
must agree. Otherwise the whole text is unreadable: the result is None, never a guess.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from retouch.rewards.vlm.answers.patterns import compiled
from retouch.rewards.vlm.answers.retractions import is_retracted
from retouch.rewards.vlm.answers.scales import Scale
from retouch.rewards.vlm.answers.visible_text import leads_to_own_score

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
    return found if set(found) == set(scales) and _stands(text, mentions) else None


def unmarked(text: str) -> str:
    """Replace each sign of Markdown emphasis by a space."""
    return re.sub(r"\*|(?<!\w)_{1,2}|_{1,2}(?!\w)", " ", text)


def unboxed(text: str) -> str:
    """Replace TeX's boxed answers by tags ("\\boxed{7}" by "<answer>7</answer>"), or by the bare number after a label."""

    def plain(match: re.Match[str]) -> str:
        labelled = _LABELLED.search(text[max(0, match.start() - _BEFORE) : match.start()]) is not None
        return match["figure"] if labelled else f"<answer>{match['figure']}</answer>"

    return _BOXED.sub(plain, text)


def bare(text: str, scale: Scale) -> float | None:
    """Return the number if the text is only a number ("7", "7/10"), otherwise None."""
    whole = _BARE.fullmatch(text)
    return None if whole is None else _value(whole, scale, decimal_comma=whole["top"] is not None)


def _mentions(text: str, scales: Mapping[str, Scale]) -> Iterator[Statement | None]:
    """Yield each passage that looks like a score of one of the names; None for a passage that cannot be read."""
    for name, scale in scales.items():
        if len(scales) > 1:
            yield from _of_tag(text, name, scale, _own(name))
            yield from _of_label(text, name, scale, _own(name), decimal_comma=False)
            continue
        yield from _without_figure(text, rf"{_own(name)}|{_FINAL}")
        yield from _of_tag(text, name, scale, rf"{_own(name)}|{_TAGS}")
        yield from _of_label(text, name, scale, rf"{_own(name)}|{_FINAL}", decimal_comma=False)
        yield from _of_label(text, name, scale, _FOREIGN, decimal_comma=True)


def _of_tag(text: str, name: str, scale: Scale, label: str) -> Iterator[Statement | None]:
    tag = compiled(rf"<\s*(?P<tag>{label})\s*>\s*{_FIGURE}\s*<\s*/\s*(?P=tag)\s*>", re.IGNORECASE)
    for opening in compiled(rf"<\s*(?:{label})\s*>", re.IGNORECASE).finditer(text):
        whole = tag.match(text, opening.start())
        value = None if whole is None else _value(whole, scale, decimal_comma=False)
        yield None if whole is None or value is None else Statement(name, value, whole.start(), whole.end())


def _without_figure(text: str, label: str) -> Iterator[None]:
    """Yield None for every label without a number: "Score: TBD", or "Final score:" at the end of a truncated text."""
    for _ in compiled(rf"(?<!\w)(?:{label})\s*[:：=](?!\s*[0-9])", re.IGNORECASE).finditer(text):
        yield None


def _of_label(text: str, name: str, scale: Scale, label: str, *, decimal_comma: bool) -> Iterator[Statement | None]:
    line = rf"(?<!\w)(?:{label}){_BOUNDS}(?P<sign>\s*(?:[:：=]|\b(?:is|of)\b)?\s*){_FIGURE}{_UNIT}"
    for match in compiled(line, re.IGNORECASE).finditer(text):
        numbered = _NUMBERED.match(text, match.start()) or ("\n" in match["sign"] and _LISTED.match(text, match.start("figure")))
        value = None if numbered else _value(match, scale, decimal_comma=decimal_comma)
        ends = _TAIL.match(text, _figure_end(match)) is not None
        signed = match["sign"].strip().lower() in (":", "：", "=", "is")
        if value is None or not ends or not signed or not _fits(match["bounds"], scale):
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


def _fits(bounds: str | None, scale: Scale) -> bool:
    """Return whether the scale that the text names, "(0-10)" or "(out of 10)", is the requested scale."""
    if bounds is None:
        return True
    figures = [float(figure) for figure in _NUMBERS.findall(bounds)]
    return figures in ([scale.high], [scale.low, scale.high])


def _opens(text: str, start: int, after: int) -> bool:
    """Return whether a statement begins its line or sentence, and is not a quotation that the sentence before it introduces."""
    before = text[:start]
    if after and _JOINED.fullmatch(text[after:start]):
        return True
    begins = _BULLETED.fullmatch(before[before.rfind("\n") + 1 :]) is not None or _SENTENCE_END.search(before[-80:]) is not None
    follows = after > 0 and "\n" not in before[after:].strip(" \t").strip("\n")  # the previous line states another score
    return begins and (follows or leads_to_own_score(before[: len(before) - len(_last_bullet(before))]))


def _last_bullet(before: str) -> str:
    line = before[before.rfind("\n") + 1 :]
    return line if _BULLETED.fullmatch(line) else ""


def _stands(text: str, mentions: list[Statement]) -> bool:
    """Return whether the text around and after the statements does not invalidate them: no other number, and no retraction."""
    first = min(one.start for one in mentions)
    rest = list(text)
    for one in mentions:
        rest[one.start : one.end] = " " * (one.end - one.start)
    after = "".join(rest[first:])
    after = _BULLETS.sub("", after)
    return not any(sign.isnumeric() for sign in after) and not is_retracted(after)


def _own(name: str) -> str:
    """Return a pattern for spellings of a name: instruction_following, "Instruction Following", "Instruction-following score"."""
    return r"[\s_\-]+".join(re.escape(part) for part in _SEPARATORS.split(name)) + r"(?:\s+(?:score|rating))?"
