"""What the words of a judge's answer mean: its scales, and what is quoted, retracted, refused, or said of an image that the judge
did not see.

The patterns are English, with a few words of the other languages in which scores are read. They take linear time: every repeat is
bounded, and long runs of white space are shortened. An unbounded repeat that is tried at every position of a text takes quadratic
time or worse. If a text exceeds a bound, the repeat ends there; the remaining text then matches no pattern, so that the text has no
score. A function that returns a text returns None if the text is ambiguous. No function raises an error, for any text.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

_MOST = 500  # repeats
_LONGEST_RUN = 32  # characters of white space
_OPEN_END = re.compile(r"\{([0-9]{1,3}),\}")
_RUN = re.compile(rf"\s{{{_LONGEST_RUN + 1},}}")


def bounded(pattern: str) -> str:
    """Return the pattern with every ``*``, ``+`` and ``{n,}`` limited to 500 repeats."""
    parts: list[str] = []
    in_class = escaped = False
    for sign in pattern:
        if escaped:
            escaped = False
        elif sign == "\\":
            escaped = True
        elif in_class:
            in_class = sign != "]"
        elif sign == "[":
            in_class = True
        elif sign in "*+":
            sign = f"{{{'0' if sign == '*' else '1'},{_MOST}}}"
        parts.append(sign)
    return _OPEN_END.sub(rf"{{\1,{_MOST}}}", "".join(parts))


@cache
def compiled(pattern: str, flags: re.RegexFlag = re.NOFLAG) -> re.Pattern[str]:
    """Compile the bounded pattern."""
    return re.compile(bounded(pattern), flags)


def squeezed(text: str) -> str:
    """Replace every run of more than 32 white-space characters by a blank line, a line break or a space."""
    return _RUN.sub(lambda run: "\n\n" if run[0].count("\n") > 1 else "\n" if "\n" in run[0] else " ", text)


_PLAIN = re.compile(r"(?:0|[1-9][0-9]{0,5})(?:\.[0-9]{1,8})?")
_COMMA = re.compile(r"(?:0|[1-9][0-9]{0,2}),[0-9]{1,2}")


@dataclass(frozen=True, slots=True)
class Scale:
    """The numbers from ``low`` to ``high``; only whole numbers if ``whole``.

    Raises ValueError if ``low`` is not below ``high``, a bound is not finite, or a bound of a whole scale is not whole.

    Example: ``Scale(0, 10, whole=True)``
    """

    low: float
    high: float
    whole: bool = False

    def __post_init__(self) -> None:
        if not -math.inf < self.low < self.high < math.inf:
            raise ValueError(f"a scale from {self.low} to {self.high}: low must be below high, and both finite")
        if self.whole and not (float(self.low).is_integer() and float(self.high).is_integer()):
            raise ValueError(f"a scale of whole numbers from {self.low} to {self.high}: its bounds must be whole")

    def admit(self, value: float) -> float | None:
        """Return the value, or None if it is not on the scale; a value is never clamped."""
        if not math.isfinite(value) or not self.low <= value <= self.high:
            return None
        return None if self.whole and value != math.floor(value) else value

    def read(self, figure: str, *, decimal_comma: bool = False) -> float | None:
        """Parse a number of ASCII digits with a decimal point, or with a comma if ``decimal_comma``. None for other texts, and for
        numbers that are not on the scale."""
        if _PLAIN.fullmatch(figure):
            return self.admit(float(figure))
        if decimal_comma and _COMMA.fullmatch(figure):
            return self.admit(float(figure.replace(",", ".")))
        return None

    def is_top(self, figure: str) -> bool:
        """Return whether a fraction's denominator is the maximum of the scale: 7/10 is not an answer on a scale up to 5."""
        return _PLAIN.fullmatch(figure) is not None and float(figure) == self.high


_FIGURE = r"([0-9]+(?:\.[0-9]+)?)"
_MEASURE = r"(?:scor(?:es?|ed|ing)|rat(?:es?|ed|ings?)|grad(?:es?|ed|ing)|points?|marks?|scale[sd]?|maximum)"
_RANGE = rf"(?<![0-9.,:/-])[01]\s*(?:-|–|—|\bto\b|\bthrough\b|\.\.)\s*{_FIGURE}(?![0-9.]*[0-9:/-])"
# Each pattern has a group with the maximum of the scale that the text names.
_TOPS = compiled(
    "|".join(
        (
            rf"\b(?:{_MEASURE}|use|using)\b[^.\n]{{0,30}}?{_RANGE}",
            rf"{_RANGE}[^.\n]{{0,15}}\b{_MEASURE}\b",
            rf"\b{_FIGURE}[-\s](?:points?|stars?|steps?)[-\s](?:scale|system|rubric|rating|likert)",
            rf"\b{_MEASURE}\b[^.\n]{{0,60}}?\bout\s+of\s+{_FIGURE}",
            rf"\b(?:scale|maximum|top|max)\b\s*(?:score\s*)?(?:of|is|=|:)\s*{_FIGURE}",
        )
    ),
    re.IGNORECASE,
)
_TURNED = compiled(
    r"\b(?:lower|less|smaller) (?:\w+ )?(?:is|are|means?|=) better\b|\b(?:higher|more|larger) (?:\w+ )?(?:is|are|means?|=) worse\b"
    rf"|\b{_MEASURE}\b[^.\n]{{0,20}}\b(?:inverted|reversed)\b|\b(?:inverted|reversed?|inverse) {_MEASURE}\b"
    r"|\b(?:as|in) (?:an? )?(?:percent(?:ages?)?|tenths|permille)\b",
    re.IGNORECASE,
)


def is_elsewhere(text: str, scales: Iterable[Scale]) -> bool:
    """Return whether the text says that its scores are on a scale other than ``scales``, or that lower scores are better."""
    tops = {scale.high for scale in scales}
    named = (float(next(filter(None, match.groups()))) for match in _TOPS.finditer(text))
    return _TURNED.search(text) is not None or any(top not in tops for top in named)


_PICTURE = r"(?:image|picture|photo)s?"
_CANNOT = r"(?:cannot|can['’]?t|could not|couldn['’]t|unable to|not able to)"
_LOOK = r"(?:see|view|access|open|load|process|evaluate|assess|analy[sz]e|rate|score|judge|compare)"
_WHICH = r"(?:(?:the|any|an|either|both|your|these|those|two|of|edited|source|original|actual) )*"
_BLIND = compiled(
    "|".join(
        (
            # No image was received.
            rf"\bno (?:edited |source |second )?{_PICTURE}\b(?! (?:art[ei]facts?|noise|quality|defects?|issues?|changes?))"
            r"[^.]{0,20}\b(?:provided|attached|visible|shown|given|found|loaded)\b",
            rf"\b(?:no|without any) (?:(?:second|first|edited|source|other) )?{_PICTURE} "
            r"(?:was|were|is|are|came|has|have|arrived|received|here|to (?:see|judge|evaluate|compare))\b",
            rf"\b(?:i|we) (?:see|have|got|find|received) no {_PICTURE}",
            rf"\bthere (?:is|are|was|were) no (?:(?:second|edited|source) )?{_PICTURE}\b"
            r"(?=[^.]*\b(?:judge|evaluate|rate|score|compare|assess)|\s*[.,;)!]|\s*\Z)",
            rf"\((?:no|missing) (?:(?:second|edited|source) )?{_PICTURE}\)",
            rf"\b{_PICTURE} (?:is |are |was |were )?"
            r"(?:missing\b|not (?:provided|attached|visible|loaded|available|received|given)\b)",
            rf"\b{_PICTURE} (?:did not|didn['’]t|failed to|never|does not|doesn['’]t) (?:load|open|arrive|come through)\b",
            rf"\b{_PICTURE} (?:could not|couldn['’]t|cannot|can['’]?t) be "
            r"(?:loaded|opened|viewed|accessed|analy[sz]ed|processed|decoded|read)\b",
            r"\b(?:second|edited|source|other) (?:(?:one|image|picture|photo) )?(?:never|did not|didn['’]t) (?:arrive|come|load)",
            r"\bonly (?:see|have|got|received|given|was given) (?:one|a single)\b",
            r"\bonly (?:one|a single) (?:image|picture|photo) (?:was|is|has been|came)\b",
            # The judge cannot or will not look at the images.
            rf"\b{_CANNOT} {_LOOK} {_WHICH}{_PICTURE}",
            rf"\b(?:i|we) (?:{_CANNOT}|(?:wasn['’]t|was not|were not) able to|(?:was|were) unable to) {_LOOK}\b",
            rf"\A\W*(?:cannot|can['’]?t) {_LOOK}\b",
            r"\bas an ai\b|\bi['’]m sorry\b|\bi am sorry\b|\b(?:cannot|can['’]?t) (?:assist|help|comply)\b",
            # The number is a placeholder.
            r"\bplaceholder\b|\b(?:default|dummy|arbitrary|random) (?:score|value|rating|grade|number|answer)\b",
            r"\b(?:score|value|rating) by default\b|\bthis is (?:just |only )?a (?:default|guess|dummy)\b",
            r"\bassuming (?:average|neutral|a neutral|an average)\b",
        )
    ),
    re.IGNORECASE,
)


def is_blind(text: str) -> bool:
    """Return whether the text says that the judge could not see the images, or that its score is a placeholder."""
    return _BLIND.search(text) is not None


# Signs of a revision anywhere after a score: single words first, then phrases.
_REVISED_WORDS = r"""
    actually correction instead reconsider\w* revis\w+ wait meant naive claim\w* says drafts? wrong unless if maybe perhaps
    painted lower higher half percent fewer couple dozen hundred thousand scaled? hexadecimal opposite deduct\w* subtract\w*
    kidding joking zero two three four five six seven eight nine ten eleven twelve twenty thirty fifty disagree\w* withdrawn?
    retract\w* disregard\w* ignore void cancel\w* crossed preliminary provisional\w* tentativ\w* pending hypothetical\w*
    pretend\w* fiction\w* nein eigentlich korrektur moment eher plutôt corrección anzi aliás нет точнее вернее хотя скорее
    skala échelle escala oops whoops sorry apolog\w* err hmm+ umm* nope nah strike misread mistake\w*
    re-?\w*(?:evaluat|check|read|think|thought)\w* double-?check\w* minus plus penal\w* bonus joke sarcas\w* ironic\w* jest
    lenient\w* generous\w* harsh\w* hardly points? only alone when\w* provided except until dock\w* knock\w* shav\w*
    tak(?:e|es|en|ing) unsure uncertain tbd i my me let
"""
_REVISED_PHRASES = (
    r"on second thou\w*|on reflection|scratch that|change (?:my|this|that|it)|(?:should|would|could|might) be"
    r"|what (?:the|a|an)|so less|were it|but for|too (?:high|low|generous|harsh|kind)|wants me|told to"
    r"|had (?:it|the|this|they)|non?(?=[:,.])|en fait|mejor dicho"
    r"|en realidad|in realtà|na verdade|not (?:the|my|a|your) (?:own |final |real )?(?:score|grade|rating|verdict|answer)"
)
_REVISED_SIGNS = (
    r"[%‰?？↓→⇒]|[-=]>|\A\W*not\b|\bnot\W*\Z|\bno\W*\Z|\b(?:corrected|amended|updated?|edit)\s*[:：]|[:：]\s*\Z"
    r"|不对|不對|更正|修正|其实|其實|應該|应该|いや|訂正|やはり|実は|아니|정정|사실"
)
# Every sentence after a score must contain one of these words: it must be about images or edits.
_PICTURED = r"""
    edit\w* images? pictures? photos? photographs? colou?r\w* light\w* shad\w* reflection\w* edges? art[ei]fact\w*
    backgrounds? foreground instruct\w* requested objects? details? shapes? textures? faces? fingers? hands? hair sky scenes?
    subjects? identity styles? compositions? blur\w* sharp\w* noise realis\w* natural\w* quality consisten\w* preserv\w*
    chang\w* remov\w* adds? added replac\w* follow\w* match\w* kept keeps? unchanged lettering halos? seams? blend\w*
    distort\w* perspective proportions? skin execution overexposed underexposed asked clean(?:ly)? crisp
"""
# Qualifications directly after a score: "(source image)", ", per the caption", "- the threshold".
_LEADING = r"for of from per the an? as on in by text at to my is was are were this these those it they both all"
_QUALIFYING = r"""
    source original unedited unmodified input first reference previous prior old initial earlier before other another target
    threshold cut-?off average mean median max(?:imum)? min(?:imum)? upper lower best worst top annotator model user caption
    watermark sign banner image picture photo painted written printed requested instructed according assum\w* default guess\w*
    random dummy example sample sic deleted redacted removed approx\w* roughly about binary hex\w* base roman percent\w*
    stars? votes? likes
"""
# Words in the sentence directly before a score.
_UNMEANT = r"""
    example joke joking kidding ignore disregard fiction\w* pretend\w* hypothetical\w* placeholder dummy template opposite
"""
# A fragment directly before a score that names text in an image or a prompt, and has none of the verbs in _SAYING.
_SEEN = r"ocr prompt message transcript\w* caption banner watermark overlay quotation subtitle signboard"
_SAYING = r"""
    is are was were has have had does do did looks? reads? match(?:es)? seems? appears? remains? stays? keeps? changed works?
"""


def _any(words: str) -> str:
    return "|".join(words.split())


def _compiled(pattern: str) -> re.Pattern[str]:
    return compiled(pattern, re.IGNORECASE)


_ABOUT_PICTURES = _compiled(rf"\b(?:{_any(_PICTURED)})\b")
_SAYS_NOTHING = compiled(r"[\s.!,;:()（）。！；，|…–—-]*")
_GOES_ON = compiled(r"[ \t]*\n\s*[a-z]")
_COURTESY = _compiled(
    r"\b(?:i hope (?:this|that|it) helps|(?:please )?let me know if you (?:need|have|want|would)\b[^.!?\n]*)[.!]?"
)
_REVISED = _compiled(rf"\b(?:{_any(_REVISED_WORDS)}|{_REVISED_PHRASES})\b|{_REVISED_SIGNS}")
_QUALIFIED = _compiled(
    rf"\A[\s(\[,;|–—-]*(?:(?:{_any(_LEADING)})\b[\s(]*)*(?:{_any(_QUALIFYING)}|or so|or thereabouts|give or take)\b"
)
_NOT_MEANT = _compiled(rf"\b(?:{_any(_UNMEANT)}|not my|not the|next line|line below|sample output)\b|\b(?:follows?|below)\W*\Z")
_SENTENCE_GAP = compiled(r"(?<=[.!?。！？])\s+")
_SEEN_TEXT = _compiled(rf"\b(?:{_any(_SEEN)}|text (?:in|on|found|within|visible))\b")
_VERB = _compiled(rf"\b(?:{_any(_SAYING)})\b")


def is_retracted(after: str) -> bool:
    """Return whether the text after a score revises it, attaches a condition, or attributes it to somebody else.

    There are more ways to retract a score than can be listed. Therefore the text must consist of English sentences about images,
    without a word of doubt and without the first person ("I ..."). Polite phrases are ignored.
    """
    after = _COURTESY.sub("", after)
    if after.rfind("(") > after.rfind(")"):  # an unclosed parenthesis
        return True
    if _REVISED.search(after) or _QUALIFIED.search(after) or _GOES_ON.match(after):
        return True
    sentences = re.split(r"[.!?\n](?=\s|\Z)", after)
    return any(not (_SAYS_NOTHING.fullmatch(one) or _ABOUT_PICTURES.search(one)) for one in sentences)


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
    text = text.strip()
    while text.endswith(_LAST_TOKENS):
        text = text[: text.rindex("<")].rstrip()
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


def without_quotes(text: str) -> str | None:
    """Blank out all quotations; the length of the text does not change. None if a quotation is not closed."""
    text = "\n".join(" " * len(line) if line.lstrip(" \t").startswith(">") else line for line in text.split("\n"))
    parts: list[str] = []
    endless: set[str] = set()  # the closing mark of an unclosed quotation is searched only once
    place = searched = 0
    while (opening := _OPENINGS.search(text, searched)) is not None:
        start = opening.start()
        end = None if opening[0] in endless else _quotation_end(text, start, endless)
        searched = start + 1 if end is None else end
        if end is not None:
            parts += [text[place:start], "".join("\n" if sign == "\n" else "\x00" for sign in text[start:end])]
            place = end
    text = "".join([*parts, text[place:]])
    return None if _QUOTE_MARKS.search(text) else text


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
    if mark in "'‘":
        # Single marks enclose a quotation after a space or bracket: at least two characters, on one line, and not inside a word.
        before, first, following = text[start - 1 : start], text[start + 1], text[closing.end() : closing.end() + 1]
        opens = (not before or before.isspace() or before in "([:,") and not first.isspace()
        closes = closing[0] in "'’" and closing.start() - start > 2 and not (following.isascii() and following.isalnum())
        return closing.end() if opens and closes else None
    return closing.end()


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
    # The line says that the next text is not a judgement, or is quoted from an image or a prompt.
    quoted = _NOT_MEANT.search(_SENTENCE_GAP.split(last)[-1]) or (_SEEN_TEXT.search(last) and not _VERB.search(last))
    if _ABBREVIATED.search(last) or quoted:
        return False
    return last[-1] in ".!?。！？)）…\x00" or (
        _HEADING.search(last) is not None and len(last.split()) <= 9 and not _FOREIGN_TO.search(last)
    )
