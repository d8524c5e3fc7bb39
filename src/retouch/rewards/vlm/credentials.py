"""A judge's key: read from the environment, or from a file that it names, and never repeated in any text."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "OPENAI_API_KEY"
_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$")
_SHORTEST = 12
_LOOKS_LIKE_ONE = re.compile(r"\b(?:sk|sess)-[A-Za-z0-9_\-]{6,}|(?i:\bbearer\s+)[^\s'\",]+")


def api_key(variable: str | None = VARIABLE) -> str:
    """The key in the environment variable, or in the file that the variable with ``_FILE`` after its name names; None: no key.

    Raises ValueError if there is none of the two, or no such file.
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
        raise ValueError(f"{variable} is not set; export the judge's key there, or say key: null for a server that asks for none")
    return key


def secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The values of variables that are called ..._KEY, ..._TOKEN or the like, by name.

    A value counts as a secret from 12 characters on and with a digit in it, so that a plain word is none.
    """
    found = {name: value.strip() for name, value in environment.items() if _SECRET.search(name)}
    return {name: value for name, value in found.items() if len(value) >= _SHORTEST and any(sign.isdigit() for sign in value)}


def redacted(text: str, key: str) -> str:
    """The text without the key and without what looks like one."""
    if len(key) >= 4:
        text = text.replace(key, "[key]")
    return _LOOKS_LIKE_ONE.sub("[key]", text)
