"""The API key of a judge: it is read from the environment, or from a file that the environment names, and removed from texts."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "OPENAI_API_KEY"
_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$")
_SHORTEST = 12
_LOOKS_LIKE_ONE = re.compile(r"\b(?:sk|sess)-[A-Za-z0-9_\-]{6,}|(?i:\bbearer\s+)[^\s'\",]+")


def api_key(variable: str | None = VARIABLE) -> str:
    """Return the key in the environment variable, or else in the file whose path is in the variable ``{variable}_FILE``.

    ``variable``: None for a server without a key; the result is then the text ``none``. Raises ValueError if neither variable is
    set, or if the file cannot be read.
    """
    if variable is None:
        return "none"
    file = os.environ.get(f"{variable}_FILE")
    if file is not None and variable not in os.environ:
        try:
            key = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            raise ValueError(f"{variable}_FILE names {file}, which cannot be read") from None
    else:
        key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(f"{variable} is not set; export the judge's key there, or set key: null for a server without a key")
    return key


def secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the values of the variables whose names end in KEY, TOKEN or a similar word, by name.

    A value counts as a secret if it has at least 12 characters and contains a digit, so that ordinary words do not count.
    """
    found = {name: value.strip() for name, value in environment.items() if _SECRET.search(name)}
    return {name: value for name, value in found.items() if len(value) >= _SHORTEST and any(sign.isdigit() for sign in value)}


def redacted(text: str, key: str) -> str:
    """Replace the key, and everything that looks like a key, by ``[key]``."""
    if len(key) >= 4:
        text = text.replace(key, "[key]")
    return _LOOKS_LIKE_ONE.sub("[key]", text)
