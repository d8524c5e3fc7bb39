"""Regular expressions in linear time: every repeat is bounded, and long runs of white space are shortened.

An unbounded repeat that is tried at every position of a text takes quadratic time or worse. If a text exceeds a bound, the repeat
ends there; the remaining text then matches no pattern, so that the text has no score.
"""

import re
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
