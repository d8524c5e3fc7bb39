"""The part of a judge's text that is its own answer, without reasoning and quotations; and the detection of refusals.

A function that returns a text returns None if the text is ambiguous. No function raises an error, for any text.
"""

import re
from collections.abc import Iterator

from retouch.rewards.vlm.answers.patterns import compiled
from retouch.rewards.vlm.answers.retractions import is_quoted

_NAMES = "think|thinking|thought|thoughts|reasoning|analysis|reflection|scratchpad|rationale|justification|explanation"
_THOUGHT = compiled(
    rf"<\s*(?P<a>/?)\s*(?P<name>{_NAMES})\s*>|\[(?P<b>/?)(?P<mistral>think|reasoning)\]|◁(?P<c>/?)(?P<kimi>think)▷"
    r"|<\|(?P<edge>start|end)[ _](?P<emu>thinking)\|>|<\|(?P<side>begin|end)_of_(?P<deep>thought)\|>",
    re.IGNORECASE,
)
_LAST_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end|>", "<|end_of_text|>", "</s>", "<eos>")
_CLOSING = {
    **{"“": "”", "„": "“”", "«": "»", "「": "」", "『": "』", "《": "》", "‹": "›"},
    **{'"': '"', "'": "'‘’\n", "‘": "'‘’\n", "`": "`"},
}
_OPENINGS = compiled(f"[{''.join(_CLOSING)}]")
_CLOSINGS = {opening: compiled(f"[{closing}]") for opening, closing in _CLOSING.items()}
_QUOTE_MARKS = compiled(r"[\"“”„«»「」『』`‹›]")
_DECLINES = compiled(
    "|".join(
        (
            r"\b(?:i['’]?m|i am|we are|we['’]re)\s+(?:very\s+|so\s+)?(?:sorry|unable|not able)\b",
            r"\bas an ai\b|\bas a (?:large )?language model\b|\bn/a\b|\bnot applicable\b|\berror\b",
            r"\bi (?:cannot|can['’]?t|can not|could not|couldn['’]t|won['’]t|will not)\b",
            r"\bi (?:do not|don['’]t) (?:have|feel|see (?:the|any|an|either|both)? ?(?:\w+ )?(?:image|picture|photo))",
            r"\b(?:unable|impossible|not possible) to\b",
            r"\b(?:cannot|can['’]?t|could not) be (?:rated|scored|evaluated|assessed|judged|determined)\b",
            r"\bplease (?:provide|upload|share|attach|send)\b|\bignore (?:all |any |the )?(?:previous|prior|above)\b",
            r"\blo siento\b|\bno puedo\b|\bdésolé|\bje ne peux\b|\bimpossible de\b|\btut mir leid\b|\bich kann\b",
            r"\bmi dispiace\b|\bnon posso\b|\bdesculpe\b|\bnão posso\b|\bизвините\b|\bне могу\b",
            r"抱歉|无法|無法|不能|對不起|对不起|申し訳|できません|죄송|할 수 없",
        )
    ),
    re.IGNORECASE,
)
_OWN_FORMAT = compiled(r"\bin (?:the |a )?(?:\w+ ){0,2}format\b", re.IGNORECASE)
_REPORTS = compiled(
    r"\b(?:reads?|says?|saying|states?|texts?|words?|written|writing|sign|caption|watermark|painted|quotes?|contains?|instructs?|tells?"
    r"|claims?|asks?|shows?|displays?|overlay|prompt|example|format|template|ocr)\b",
    re.IGNORECASE,
)
_TELLS = compiled(
    r"\b(?:says?|said|saying|reads?|writes?|wrote|written|tells?|told|claims?|instructs?|states?|stating|demands?|orders?|asks?|commands?)\b"
    r"|\bas follows\b|\bthe following\b",
    re.IGNORECASE,
)
_SENTENCE_ENDS = compiled(r"[.!?\n]")
_LINE_END = compiled(r"[ \t]*\n")
_BLANK_LINE = compiled(r"\n[ \t]*\n")
_SPEAKER = compiled(r"^\W*(?:system|user|human|developer|instructions?|prompt|note to \w+)\s*[:：]", re.IGNORECASE | re.MULTILINE)
_ABBREVIATED = compiled(r"\b(?:e\.g|i\.e|cf|vs|no|approx|ca|z\.b|p\.ex)\.\Z", re.IGNORECASE)
_HEADING = compiled(
    r"\b(?:evaluation|assessment|verdict|answers?|ratings?|scores?|analysis|results?|summary|conclusion|reasoning|judge?ment|json|output"
    r"|response)\b",
    re.IGNORECASE,
)
_FOREIGN_TO = compiled(
    r"\b(?:expected|example|sample|template|drafts?|naive|not|never|wrong|source|original|previous|target)\b", re.IGNORECASE
)


def without_reasoning(text: str) -> str | None:
    """Return the text without marked reasoning and end tokens. None if the reasoning is not closed, or its marks do not match.

    The prompt template of a thinking model may contain the opening mark. A closing mark without an opening mark therefore ends
    reasoning that began with the text; the closing mark must then be at the end of its line.
    """
    text = _without_last_tokens(text)
    kept: list[str] = []
    opened: list[str] = []
    place = 0
    for mark in _THOUGHT.finditer(text):
        name = (mark["name"] or mark["mistral"] or mark["kimi"] or mark["emu"] or mark["deep"]).lower()
        closing = bool(mark["a"] or mark["b"] or mark["c"]) or "end" in ((mark["edge"] or "").lower(), (mark["side"] or "").lower())
        if not opened:
            kept.append(text[place : mark.start()])
        if not closing:
            opened.append(name)
        elif opened:
            if opened.pop() != name:
                return None
        elif len(kept) == 1 and _LINE_END.match(text, mark.end()):
            kept.clear()
        else:
            return None
        place = mark.end()
    return None if opened else "\n".join([*kept, text[place:]]).strip()


def _without_last_tokens(text: str) -> str:
    text = text.strip()
    while text.endswith(_LAST_TOKENS):
        text = text[: text.rindex("<")].rstrip()
    return text


def without_quotes(text: str) -> str | None:
    """Blank out all quotations; the length of the text does not change. None if a quotation is not closed."""
    text = "\n".join(" " * len(line) if line.lstrip(" \t").startswith(">") else line for line in text.split("\n"))
    parts: list[str] = []
    place = 0
    for start, end in _quotations(text):
        parts += [text[place:start], "".join("\n" if sign == "\n" else "\x00" for sign in text[start:end])]
        place = end
    text = "".join([*parts, text[place:]])
    return None if _QUOTE_MARKS.search(text) else text


def _quotations(text: str) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each quotation, including its marks, in order. The closing mark of an unclosed quotation is
    searched only once."""
    endless: set[str] = set()
    opening = _OPENINGS.search(text)
    while opening is not None:
        start = opening.start()
        end = None if opening[0] in endless else _quotation_end(text, start, endless)
        if end is not None:
            yield start, end
        opening = _OPENINGS.search(text, start + 1 if end is None else end)


def _quotation_end(text: str, start: int, endless: set[str]) -> int | None:
    """Return the end of the quotation that opens at ``start``, or None. A mark without a closing mark is added to ``endless``."""
    mark, after = text[start], start + 1
    if mark == "`":
        while text[after : after + 1] == "`":
            after += 1
    closing = _CLOSINGS[mark].search(text, after)
    if mark == "`":
        end = None if closing is None else closing.end()
        while end is not None and text[end : end + 1] == "`":
            end += 1
        return end or (after if after > start + 1 else None)
    if closing is None:
        endless.add(mark)
        return None
    if mark in "'‘" and not _is_single_quotation(text, start, closing):
        return None
    return closing.end()


def _is_single_quotation(text: str, start: int, closing: re.Match[str]) -> bool:
    """Return whether single marks enclose a quotation: after a space or bracket, at least two characters, on one line, and not
    inside a word."""
    before, first, after = text[start - 1 : start], text[start + 1], text[closing.end() : closing.end() + 1]
    opens = (not before or before.isspace() or before in "([:,") and not first.isspace()
    return opens and closing[0] in "'’" and closing.start() - start > 2 and not (after.isascii() and after.isalnum())


def is_refusal(text: str) -> bool:
    """Return whether the text is a refusal, or asks for images that the judge has received, in English or a few other languages."""
    return _DECLINES.search(text) is not None


def _reports(paragraph: str) -> bool:
    """Return whether a sentence introduces a quoted text or names its source, and a colon follows, or it is the last sentence."""
    *sentences, last = _SENTENCE_ENDS.split(paragraph)
    for sentence in sentences:
        named = _REPORTS.search(sentence)
        if named is not None and ":" in sentence[named.end() :]:
            return True
    return _REPORTS.search(last) is not None


def leads_to_own_score(before: str) -> bool:
    """Return whether a score after this text is the judge's own: the last line is a whole sentence, a quotation or a heading.

    It is not if the paragraph reports other words without quotation marks ("the sign reads: well done!"), or if the last line is
    incomplete ("at most").
    """
    if _SPEAKER.search(before):
        return False
    before = _OWN_FORMAT.sub(" ", before.rstrip())
    paragraph = _BLANK_LINE.split(before)[-1]
    told = any(_TELLS.search(sentence) and "\x00" not in sentence for sentence in re.split(r"[.!?。\n](?=\s|\Z)", paragraph))
    if told or _reports(paragraph):
        return False
    lines = [line.strip() for line in before.split("\n") if re.search(r"[\w\x00]", line)]
    if not lines:
        return True
    last = lines[-1]
    if last.startswith("#"):
        return _FOREIGN_TO.search(last) is None
    if _ABBREVIATED.search(last) or is_quoted(last):
        return False
    return last[-1] in ".!?。！？)）…\x00" or (
        _HEADING.search(last) is not None and len(last.split()) <= 9 and not _FOREIGN_TO.search(last)
    )
