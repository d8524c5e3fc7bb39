"""Parse the scores in a judge's answer. An ambiguous answer has no score.

An answer has no score if it is out of range, on another scale, truncated, refused, hedged, contradicted, or quoted from the image.
Nothing is clamped, repaired or filled with a default: an unreadable score is missing.
"""

import re
from collections.abc import Mapping

from retouch.rewards.vlm.answers.json_scores import parse, scores_of
from retouch.rewards.vlm.answers.labelled_scores import bare, stated, unboxed, unmarked
from retouch.rewards.vlm.answers.other_scales import is_elsewhere
from retouch.rewards.vlm.answers.patterns import compiled, squeezed
from retouch.rewards.vlm.answers.retractions import is_retracted
from retouch.rewards.vlm.answers.scales import Scale
from retouch.rewards.vlm.answers.unseen_images import is_blind
from retouch.rewards.vlm.answers.visible_text import is_refusal, leads_to_own_score, without_quotes, without_reasoning
from retouch.types import Json

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
    said = _undelimited(said)
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


def _undelimited(text: str) -> str:
    """Replace VIEScore's delimiters by line breaks if there are two with JSON between them; otherwise return the text unchanged."""
    before, *insides = text.split(_DELIMITER)
    if len(insides) != 2 or not insides[0].strip().startswith(("{", "[", "```")):
        return text
    return "\n".join((before, insides[0].strip(), insides[1])).strip()


def _free(text: str, scales: Mapping[str, Scale]) -> dict[str, float] | None:
    blocks = _blocks(text)
    if blocks is None:
        return None
    objects, prose = blocks
    words = without_quotes(prose)
    if words is None or is_refusal(words) or is_blind(words) or is_elsewhere(words, scales.values()):
        return None
    words = squeezed(unmarked(unboxed(words)))
    if re.search(r"[{}]|<\|", words):
        return None
    if not objects:
        (name, scale), *others = scales.items()
        alone = None if others else bare(words, scale)
        return {name: alone} if alone is not None else stated(words, scales)
    readings = [scores_of(value, scales) for value in objects]
    first = readings[0]
    if first is None or any(reading != first for reading in readings):
        return None
    said = stated(words, scales)
    labels = re.search(r"\b(?:scores?|rating|grade)\b|[0-9]", words, re.IGNORECASE) is not None
    return first if said == first or (said is None and not labels) else None


def _blocks(text: str) -> tuple[list[Json], str] | None:
    """Return the JSON values that are on lines of their own, and the text without them.

    Returns None if a value is not valid JSON, if a fence is not closed, if there is other text both before and after the values, or
    if the text introduces the values as a quotation or retracts them.
    """
    if not _fences_hold_answers(text):
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


def _fences_hold_answers(text: str) -> bool:
    """Return whether every fence is closed, and contains JSON or the whole answer; other fences contain code or a quotation."""
    fences = list(_FENCE.finditer(text))
    if len(fences) % 2 or text.count("```") != len(fences):
        return False
    insides = [text[one.end() : other.start()].lstrip() for one, other in zip(fences[::2], fences[1::2], strict=True)]
    whole = len(fences) == 2 and not text[: fences[0].start()].strip() and not text[fences[1].end() :].strip()
    return whole or all(inside.startswith(("{", "[")) for inside in insides)
