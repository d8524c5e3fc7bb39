"""What a judge says to us: its answer without its thoughts, without what it quotes, and not at all where it declines.

Every function gives None if that cannot be told; none of them raises on any text.
"""

import re

from retouch.rewards.vlm.answers.retractions import disowns

_NAMES = "think|thinking|thought|thoughts|reasoning|analysis|reflection|scratchpad|rationale|justification|explanation"
_THOUGHT = re.compile(
    rf"<\s*(?P<a>/?)\s*(?P<name>{_NAMES})\s*>|\[(?P<b>/?)(?P<mistral>think|reasoning)\]|◁(?P<c>/?)(?P<kimi>think)▷"
    r"|<\|(?P<edge>start|end)[ _](?P<emu>thinking)\|>|<\|(?P<side>begin|end)_of_(?P<deep>thought)\|>",
    re.IGNORECASE,
)
_LAST_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end|>", "<|end_of_text|>", "</s>", "<eos>")
_QUOTED = re.compile(
    r"“[^”]*”|„[^“”]*[“”]|«[^»]*»|「[^」]*」|『[^』]*』|《[^》]*》|‹[^›]*›|\"[^\"]*\"|`+[^`]*`+"
    r"|(?<![^\s(\[:,])['‘](?=\S)[^'‘’\n]{2,}['’](?![a-zA-Z0-9])"
)
_QUOTE_MARKS = re.compile(r"[\"“”„«»「」『』`‹›]")
_DECLINES = re.compile(
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
_OWN_FORMAT = re.compile(r"\bin (?:the |a )?(?:\w+ ){0,2}format\b", re.IGNORECASE)
_REPORTS = re.compile(
    r"\b(?:reads?|says?|saying|states?|texts?|words?|written|writing|sign|caption|watermark|painted|quotes?|contains?|instructs?|tells?"
    r"|claims?|asks?|shows?|displays?|overlay|prompt|example|format|template|ocr)\b[^.!?\n]*(?::|\Z)",
    re.IGNORECASE,
)
_TELLS = re.compile(
    r"\b(?:says?|said|saying|reads?|writes?|wrote|written|tells?|told|claims?|instructs?|states?|stating|demands?|orders?|asks?|commands?)\b"
    r"|\bas follows\b|\bthe following\b",
    re.IGNORECASE,
)
_SPEAKER = re.compile(r"^\W*(?:system|user|human|developer|instructions?|prompt|note to \w+)\s*[:：]", re.IGNORECASE | re.MULTILINE)
_ABBREVIATED = re.compile(r"\b(?:e\.g|i\.e|cf|vs|no|approx|ca|z\.b|p\.ex)\.\Z", re.IGNORECASE)
_HEADING = re.compile(
    r"\b(?:evaluation|assessment|verdict|answers?|ratings?|scores?|analysis|results?|summary|conclusion|reasoning|judge?ment|json|output"
    r"|response)\b",
    re.IGNORECASE,
)
_FOREIGN_TO = re.compile(
    r"\b(?:expected|example|sample|template|drafts?|naive|not|never|wrong|source|original|previous|target)\b", re.IGNORECASE
)


def spoken(text: str) -> str | None:
    """The text without marked thoughts and closing tokens. None if a thought does not end, or its marks do not pair.

    A closing mark whose opening stands in the prompt (thinking models' templates) ends a thought that began with the text; it must
    then end its line.
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
        elif len(kept) == 1 and re.match(r"[ \t]*\n", text[mark.end() :]):
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
    """The text with what it quotes blanked out, length kept. None if a quotation does not end."""
    text = re.sub(r"^[ \t]*>.*$", lambda line: " " * len(line[0]), text, flags=re.MULTILINE)
    text = _QUOTED.sub(lambda quote: "".join("\n" if sign == "\n" else "\x00" for sign in quote[0]), text)
    return None if _QUOTE_MARKS.search(text) else text


def declines(text: str) -> bool:
    """Whether the text refuses, or asks for what it was given, in English or one of a few more languages."""
    return _DECLINES.search(text) is not None


def leads_to_own_score(before: str) -> bool:
    """Whether a score may follow this text as the judge's own: its last line is a whole sentence, a quotation or a heading.

    Not so where its paragraph gives somebody else's words without quoting them ("the sign reads: well done!"), or the line goes on
    ("at most").
    """
    if _SPEAKER.search(before):
        return False
    before = _OWN_FORMAT.sub(" ", before.rstrip())
    paragraph = re.split(r"\n[ \t]*\n", before)[-1]
    told = any(_TELLS.search(sentence) and "\x00" not in sentence for sentence in re.split(r"[.!?。\n](?=\s|\Z)", paragraph))
    if told or _REPORTS.search(paragraph):
        return False
    lines = [line.strip() for line in before.split("\n") if re.search(r"[\w\x00]", line)]
    if not lines:
        return True
    last = lines[-1]
    if last.startswith("#"):
        return _FOREIGN_TO.search(last) is None
    if _ABBREVIATED.search(last) or disowns(last):
        return False
    return last[-1] in ".!?。！？)）…\x00" or (
        _HEADING.search(last) is not None and len(last.split()) <= 9 and not _FOREIGN_TO.search(last)
    )
