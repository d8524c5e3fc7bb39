"""The key of a judge: from the environment alone, and never in a text that we write."""

import os
import re

VARIABLE = "OPENAI_API_KEY"
_LOOKS_LIKE_ONE = re.compile(r"\b(?:sk|sess)-[A-Za-z0-9_\-]{6,}|(?i:\bbearer\s+)[^\s'\",]+")


def api_key() -> str:
    """The key. ValueError where the environment has none."""
    key = os.environ.get(VARIABLE, "").strip()
    if not key:
        raise ValueError(f"{VARIABLE} is not set; export the judge's key, or any word for a server that asks for none")
    return key


def redacted(text: str, key: str) -> str:
    """The text without the key and without what looks like one."""
    if len(key) >= 4:
        text = text.replace(key, "[key]")
    return _LOOKS_LIKE_ONE.sub("[key]", text)
