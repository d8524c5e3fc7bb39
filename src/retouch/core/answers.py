"""Extracts the answer from a completion: the text without thoughts, tags, labels and quotation marks."""

import re

_THINKS = re.compile(r"<think(?:ing)?>", re.IGNORECASE)
_THOUGHT = re.compile(r"</think(?:ing)?>", re.IGNORECASE)
_ANSWERS = re.compile(r"<answer>", re.IGNORECASE)
_ANSWERED = re.compile(r"</answer>", re.IGNORECASE)
_FENCE = re.compile(r"```[^\S\n]*\w*[^\S\n]*\n(.*?)```", re.DOTALL)
_ADJECTIVE = r"(?:enhanced|improved|refined|rewritten|revised|expanded|detailed|optimi[sz]ed|final|new|better)"
_LABEL = re.compile(
    r"^[ \t>#]*(?P<bold>\*\*|__)?"
    rf"(?:(?:{_ADJECTIVE}[ -])+(?:image |text-to-image )?(?:prompt|version|description)|prompt|answer|output|response)"
    r"[ \t]*(?(bold)(?:[:：][ \t]*(?P=bold)|(?P=bold)[ \t]*[:：])|[:：])\s*",
    re.IGNORECASE | re.MULTILINE,
)
_OPENER = re.compile(
    r"^\s*(?:sure|certainly|of course|absolutely|okay|ok|here)\b[^\n:]{0,120}?"
    r"(?:(?:prompt|version|description)[^\n:]{0,40}[:：]|[:：][^\S\n]*\n)\s*",
    re.IGNORECASE,
)
_POLITE = re.compile(r"^\s*(?:sure|certainly|of course|absolutely)\s*[!.,]\s+", re.IGNORECASE)
_QUOTES = (('"', '"'), ("'", "'"), ("`", "`"), ("“", "”"), ("‘", "’"), ("„", "“"), ("«", "»"), ("「", "」"), ("**", "**"))


def answer_in(text: str) -> str | None:
    """The answer (a prompt) in a completion, on one line; None if the completion has no answer with a letter or digit.

    The answer follows the last ``</think>``; if a thought is not closed, there is no answer. Of several ``<answer>`` tags or code
    fences, the last closed one is used. If one tag of the pair is missing, the answer is everything after ``<answer>``, or
    everything before ``</answer>``. Then these parts are removed: a label with the text before it ("Enhanced prompt:", at the
    beginning of any line) or, without a label, an introduction ("Sure! Here is ...:"); and quotation marks around the whole answer.
    """
    text = _THOUGHT.split(text)[-1]
    if _THINKS.search(text):
        return None
    ended = _ANSWERED.split(text)
    text = _ANSWERS.split(ended[-2] if len(ended) > 1 else text)[-1]
    fenced = _FENCE.findall(text)
    text = _unquoted((fenced[-1] if fenced else text).strip())
    labels = list(_LABEL.finditer(text))
    text = text[labels[-1].end() :] if labels else _OPENER.sub("", _POLITE.sub("", text), count=1)
    text = _unquoted(" ".join(text.split()))
    return text if any(sign.isalnum() for sign in text) else None


def _unquoted(text: str) -> str:
    for opens, closes in _QUOTES:
        inside = text[len(opens) : -len(closes)]
        whole = text.startswith(opens) and text.endswith(closes) and len(text) >= len(opens) + len(closes)
        if whole and opens not in inside and closes not in inside:
            return _unquoted(inside.strip())
    return text
