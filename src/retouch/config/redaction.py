"""Removes keys and passwords from text before it leaves the process: standard output and error, logs, run files, ledgers, pages.

The secrets of this process are the values of variables that are named like secrets (``..._KEY``) or bound to an address in
``retouch.config.keys``, and the passwords in the addresses of proxies. A secret is also found if only ten of its letters and digits
appear in a row, in either direction, in any case, with other characters between them, or encoded (base64, hexadecimal, percent and
escape sequences, decimal codes).
"""

import base64
import functools
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from retouch.config import keys

_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$")
_SHORTEST = 12
_RUN = 10
"""Letters and digits of a secret in a row that count as the secret."""
_KEY = "[key]"
# `?token=` alone is not among the shapes: `retouch view` prints it, and it must be usable.
_SHAPES = (
    (re.compile(r"\b(?:sk|sess)-[A-Za-z0-9_\-]{6,}|\b(?:hf|gsk|ghp)_[A-Za-z0-9]{20,}"), _KEY),
    (re.compile(r"(?i)\bbearer\s+(?=[^\s'\",]*\d)[^\s'\",]+"), _KEY),
    (re.compile(r"(?<=://)[^\s/@'\"]+@"), f"{_KEY}@"),
    (
        re.compile(r"(?i)([?&;](?:(?:[\w-]*[_-])?(?:key|secret|password|passwd|signature|sig)|[\w-]+[_-]token)=)[^\s&'\"#]+"),
        rf"\1{_KEY}",
    ),
)
_IN_ADDRESS = re.compile(r"://[^/@:\s]*:([^/@\s]+)@")
_MASKED = re.compile(r"([\w-]*)(?:[*•]{2,}|\.{3,}|…)([\w-]*)")
_HEADER = re.compile(r"(\S+)\s*$", re.MULTILINE)


def secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the values of the variables whose names end in KEY, TOKEN or a similar word, by name.

    A value counts as a secret if it has at least 12 characters, contains a digit and is no file, so that ordinary words do not
    count.
    """
    found = {name: value.strip() for name, value in environment.items() if _SECRET.search(name) and not os.path.isfile(value)}
    return {name: value for name, value in found.items() if len(value) >= _SHORTEST and any(sign.isdigit() for sign in value)}


def redacted(text: str) -> str:
    """Replace the secrets of this process, and everything that looks like a key or a password in an address, by ``[key]``."""
    for shape, replacement in _SHAPES:
        text = shape.sub(replacement, text)
    return without_secrets(text)


def without_secrets(text: str) -> str:
    """Replace the secrets of this process by ``[key]``, also in the forms in which a server may repeat them."""
    if len(text) < _RUN or not (own := tuple(sorted({*secrets(os.environ).values(), *_bound_values()}))):
        return text
    for secret in own:
        text = text.replace(secret, _KEY)
    text = _MASKED.sub(lambda found: _KEY if _masks(found[1], found[2], own) else found[0], text)
    runs = _runs(own)
    signs = [(found.start(), found[0]) for found in re.finditer("[A-Za-z0-9]", text)]
    plain = "".join(sign for _, sign in signs).lower()
    parts, end = [], 0
    for first in range(len(plain) - _RUN + 1):
        if plain[first : first + _RUN] in runs:
            start = signs[first][0]
            if start >= end:
                parts += [text[end:start], _KEY]
            end = signs[first + _RUN - 1][0] + 1
    return "".join([*parts, text[end:]])


class RedactingFormatter(logging.Formatter):
    """Formats log records without the secrets of this process, tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the redacted text of the record."""
        return redacted(super().format(record))


class RedactingStream:
    """A text stream that writes to ``inner`` without the secrets of this process."""

    def __init__(self, inner: TextIO) -> None:
        self._inner = inner

    def write(self, text: str) -> int:
        """Write the redacted text; returns the number of characters that were given."""
        self._inner.write(redacted(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def redact_output() -> None:
    """Redact what this process writes to its standard output and error from now on, tracebacks included."""
    for name in ("stdout", "stderr"):
        if not isinstance(stream := getattr(sys, name), RedactingStream):
            setattr(sys, name, RedactingStream(stream))


def _bound_values() -> Iterator[str]:
    """The values of bound variables, of bad words in RETOUCH_KEYS (a key instead of its address), and passwords of addresses."""
    names, others = keys.bound_variables()
    yield from (word for word in others if len(word) >= _RUN)
    for name in names:
        value = os.environ.get(name, "")
        if name not in os.environ and (file := os.environ.get(f"{name}_FILE")) is not None:
            try:
                value = Path(file).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
        yield from (word for word in _HEADER.findall(value) if len(word) >= _RUN)
    for name, value in os.environ.items():
        if "://" in value and name != keys.VARIABLE:
            yield from _IN_ADDRESS.findall(value)


def _masks(head: str, tail: str, secrets: tuple[str, ...]) -> bool:
    """Whether a masked text (``sk-ab****yz``) begins or ends like a secret, with at least three of its characters."""
    return any((len(head) > 2 and one.startswith(head)) or (len(tail) > 2 and one.endswith(tail)) for one in secrets)


@functools.lru_cache(maxsize=8)
def _runs(secrets: tuple[str, ...]) -> frozenset[str]:
    """All runs of letters and digits of the secrets and of their encodings."""
    found = set()
    for one in secrets:
        for data in (one.encode(), one[::-1].encode()):
            codes = list(data)
            forms = [data.decode(errors="replace"), data.hex()]
            forms += ["".join(form.format(code) for code in codes) for form in ("{}", "x{:02x}", "0x{:02x}", "u{:04x}")]
            forms += [base64.b64encode(b"\0" * shift + data).decode()[2 * shift : -4] for shift in range(3)]
            for form in forms:
                plain = "".join(re.findall("[A-Za-z0-9]", form)).lower()
                found |= {plain[first : first + _RUN] for first in range(len(plain) - _RUN + 1)}
    return frozenset(found)
