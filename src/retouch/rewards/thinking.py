"""Whether a completion thinks first and answers then: a check of form, as a function of the text."""


def think_format(completion: str, *, opening: str = "<think>", closing: str = "</think>") -> float:
    """1.0 where the completion is ``opening``, a thought, ``closing`` and an answer, each mark once; else 0.0.

    Neither the thought nor the answer may be blank. A completion whose opening mark was part of the prompt is given with the mark
    put before it. ValueError: marks that are empty or equal.
    """
    if not opening or not closing or opening == closing:
        raise ValueError(f"the marks {opening!r} and {closing!r} must be two texts that differ")
    text = completion.strip()
    if not text.startswith(opening) or text.count(opening) != 1 or text.count(closing) != 1:
        return 0.0
    thought, _, answer = text.removeprefix(opening).partition(closing)
    return float(bool(thought.strip()) and bool(answer.strip()))
