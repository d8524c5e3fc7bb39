"""The parser of formulas: ``0.6*alignment + 0.4*quality``, ``sqrt(semantic * perceptual)``, ``min(a, b)``.

A formula has numbers, columns, ``+ - *``, division by a number, parentheses, and ``sqrt``, ``min``, ``max``, ``mean`` and ``gmean``
(the geometric mean). A column is written as its name, ``judge/alignment``; a name with characters other than letters, digits,
``_``, ``.`` and ``/`` is put in backquotes. Nothing is evaluated as Python.
"""

import math
import re
from collections.abc import Iterator
from typing import NoReturn

from retouch.rewards.combine.formulas import FUNCTIONS, PLAIN, Call, Name, Node, Number, Product, Sum

# The name that EARL uses for the square root of the product of two columns.
_ALIASES = {"sqrt(viescore_pqxground_score)": "sqrt(viescore_pq * ground_score)"}
_LONGEST = 1000
_DEEPEST = 50
_TOKEN = re.compile(
    rf"(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?P<name>{PLAIN})|`(?P<quoted>[^`]+)`|(?P<sign>[-+*/(),])", re.ASCII
)


def read_formula(text: str) -> Node:
    """Parse a formula into a tree. Raises ValueError with the position if the text is not a formula."""
    return _Parser(_ALIASES.get("".join(text.split()), text)).formula()


class _Parser:
    """A recursive descent parser, from left to right. ``deep``: the current depth of nested parentheses and signs."""

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > _LONGEST:
            raise ValueError(f"combine: the formula has {len(text)} characters; write at most {_LONGEST}")
        self.tokens = list(self._tokens())
        self.place = 0
        self.deep = 0

    def formula(self) -> Node:
        found = self._sum()
        if self._peek() is not None:
            self._fail("an operator (+, -, *) or the end")
        return found

    def _tokens(self) -> Iterator[tuple[str, str, int]]:
        place = 0
        while place < len(self.text):
            if self.text[place].isspace():
                place += 1
                continue
            found = _TOKEN.match(self.text, place)
            if found is None:
                raise ValueError(f"{self.text!r}: {self.text[place]!r} at character {place + 1} is not allowed in a formula")
            kind = str(found.lastgroup)
            yield ("name" if kind == "quoted" else kind), found[kind], place
            place = found.end()

    def _sum(self) -> Node:
        left = self._product()
        while (sign := self._take("+", "-")) is not None:
            left = Sum(left, self._product(), "+" if sign == "+" else "-")
        return left

    def _product(self) -> Node:
        left = self._factor()
        while (sign := self._take("*", "/")) is not None:
            right = self._factor()
            if sign == "/":
                if not isinstance(right, Number) or right.value == 0:
                    raise ValueError(f"{self.text!r}: divide only by a number other than 0, not by {right}")
                right = Number(1 / right.value)
            left = Product(left, right)
        return left

    def _factor(self) -> Node:
        self.deep += 1
        if self.deep > _DEEPEST:
            raise ValueError(f"combine: the formula has more than {_DEEPEST} nested parentheses; write a simpler formula")
        found = self._signed()
        self.deep -= 1
        return found

    def _signed(self) -> Node:
        if self._take("-") is not None:
            inner = self._factor()
            return Number(-inner.value) if isinstance(inner, Number) else Product(Number(-1.0), inner)
        if self._take("(") is not None:
            inside = self._sum()
            self._expect(")")
            return inside
        token = self._peek()
        if token is None or token[0] == "sign":
            self._fail("a number, a column or a parenthesis")
        kind, word, _ = token
        self.place += 1
        if kind == "number":
            return Number(self._finite(word))
        return self._call(word) if self._take("(") is not None else Name(word)

    def _call(self, function: str) -> Node:
        if function not in FUNCTIONS:
            raise ValueError(f"{self.text!r}: there is no function {function!r}; there are {', '.join(FUNCTIONS)}")
        arguments = [self._sum()]
        while self._take(",") is not None:
            arguments.append(self._sum())
        self._expect(")")
        if (len(arguments) == 1) != (function == "sqrt"):
            raise ValueError(
                f"{self.text!r}: {function} takes {'one' if function == 'sqrt' else 'two or more'}, not {len(arguments)}"
            )
        return Call(function, tuple(arguments))

    def _finite(self, word: str) -> float:
        if math.isinf(float(word)):
            raise ValueError(f"{self.text!r}: {word} is too large a number")
        return float(word)

    def _peek(self) -> tuple[str, str, int] | None:
        return self.tokens[self.place] if self.place < len(self.tokens) else None

    def _take(self, *signs: str) -> str | None:
        token = self._peek()
        if token is None or token[0] != "sign" or token[1] not in signs:
            return None
        self.place += 1
        return token[1]

    def _expect(self, sign: str) -> None:
        if self._take(sign) is None:
            self._fail(f"{sign!r}")

    def _fail(self, wanted: str) -> NoReturn:
        token = self._peek()
        found = "the formula ends" if token is None else f"there is {token[1]!r} at character {token[2] + 1}"
        raise ValueError(f"{self.text!r}: {found}, but {wanted} is expected")
