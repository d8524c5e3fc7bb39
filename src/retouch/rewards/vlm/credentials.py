"""The API key of a judge: it is read from the environment, or from a file that the environment names."""

import os
from pathlib import Path

VARIABLE = "OPENAI_API_KEY"


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
