"""Detect text around a score that invalidates it: a revision, a condition, the score of another image, or text in an image.

The patterns are English, with a few words of the other languages in which scores are read.
"""

import re

from retouch.rewards.vlm.answers.patterns import compiled

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


def is_quoted(line: str) -> bool:
    """Return whether the line before a score says that the next text is not a judgement, or is quoted from an image or a prompt."""
    sentence = _SENTENCE_GAP.split(line)[-1]
    return _NOT_MEANT.search(sentence) is not None or (_SEEN_TEXT.search(line) is not None and _VERB.search(line) is None)
