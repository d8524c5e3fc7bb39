"""Keys and passwords in text that leaves the process: whatever form a server or a message gives them."""

import base64
import io
import logging
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest

from retouch.config.keys import RedactingFormatter, redacted
from retouch.records.files import append_line, read_lines

KEY = "jk-Xy7/Qw91zLm+4TtRbV0n3Kd8"
PROXY = "Tr0ub4dor-and-3"
FORMS = {
    "verbatim": KEY,
    "upper case": KEY.upper(),
    "reversed": KEY[::-1],
    "the first 16 characters": KEY[:16],
    "the last 14 characters": KEY[-14:],
    "masked in the middle": f"{KEY[:6]}********{KEY[-4:]}",
    "masked by dots": f"{KEY[:5]}...{KEY[-5:]}",
    "base64": base64.b64encode(KEY.encode()).decode(),
    "base64 of user and password": base64.b64encode(f"me:{KEY}".encode()).decode(),
    "base64 in a bearer token": base64.urlsafe_b64encode(f"Bearer {KEY}".encode()).decode(),
    "hexadecimal": KEY.encode().hex(),
    "percent-encoded": quote(KEY, safe=""),
    "percent-encoded as a whole": "".join(f"%{code:02X}" for code in KEY.encode()),
    "escaped as JSON": "".join(f"\\u{code:04x}" for code in KEY.encode()),
    "repr of bytes": str(list(KEY.encode())),
    "one character per line": "\n".join(KEY),
    "separated by spaces": " ".join(KEY),
    "split by zero-width spaces": "\u200b".join(KEY),
    "in a header": f"Authorization: Bearer {KEY}",
    "another bearer": "authorization: bearer eyJhbGciOiJIUzI1NiJ9.e30.abc",
    "in a query": f"https://judge.example/v1?api_key={KEY}&n=1",
    "another query": "GET https://judge.example/v1?n=1&access_token=abc-def",
    "a password in a URL": "http://me:letmein@judge.example/v1",
    "the password of a proxy": f"proxy refused {PROXY}",
    "a token of the Hub": "hf_" + "aB3" * 11,
}
HIDDEN = (KEY, KEY[-5:], PROXY, "letmein", "eyJhbGci", "abc-def", "aB3aB3", *FORMS.values())


@pytest.fixture
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key in a variable that is not named like one, but is bound to an address."""
    monkeypatch.setenv("JUDGE_OF_MINE", KEY)
    monkeypatch.setenv("RETOUCH_KEYS", "JUDGE_OF_MINE=https://judge.example")
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:{PROXY}@proxy.example:3128")


def shows_a_secret(text: str) -> list[str]:
    return [secret for secret in HIDDEN if secret.strip().lower() in text.lower()]


@pytest.mark.usefixtures("_key")
@pytest.mark.parametrize("form", FORMS)
def test_point_3_8_no_form_of_a_key_is_left_in_a_text(form: str) -> None:
    cleaned = redacted(f"HTTP 401: you sent {FORMS[form]} for nothing")
    assert shows_a_secret(cleaned) == []
    assert cleaned.startswith("HTTP 401: you sent ")
    assert cleaned.endswith(" for nothing")
    assert "[key]" in cleaned


@pytest.mark.usefixtures("_key")
def test_ordinary_texts_are_not_changed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "credentials-2024.json").touch()
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "credentials-2024.json"))
    for text in (
        "the flag bearer of the parade, ask-me-anything, 2 * 3 ** 4 ... none",
        f"{tmp_path}/images/0001.png?size=3&key",
        "hf-internal-testing/tiny-sd3-pipe at https://huggingface.co/org/name@main, hf://datasets/a/b@1f0",
        '{"score": 5, "reasoning": "jk - a judge of mine"}',
    ):
        assert redacted(text) == text


@pytest.mark.parametrize(
    "bindings", [KEY, f"OPENAI_API_KEY={KEY}", f"OPENAI_API_KEY=https://me:{PROXY}@judge.example", f"OPENAI_API_KEY:{KEY}"]
)
def test_point_3_8_a_key_in_retouch_keys_is_neither_in_the_message_nor_in_a_text(
    bindings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from retouch.config import keys

    monkeypatch.setenv("RETOUCH_KEYS", bindings)
    with pytest.raises(ValueError, match="address") as raised:
        keys.require_bound("OPENAI_API_KEY", "https://judge.example")
    assert shows_a_secret(str(raised.value)) == []
    if PROXY not in bindings:
        assert shows_a_secret(redacted(f"echo {KEY}")) == []


def test_point_3_8_keys_from_files_are_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY + "\n")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY_FILE", str(tmp_path / "key"))
    assert shows_a_secret(redacted(f"echo {KEY[::-1]}")) == []


@pytest.mark.usefixtures("_key")
def test_point_3_8_logs_with_tracebacks_and_run_files_contain_no_key(tmp_path: Path) -> None:
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.setFormatter(RedactingFormatter())
    log = logging.Logger("judge")
    log.addHandler(handler)
    try:
        raise RuntimeError(KEY) from ValueError(f"http://me:letmein@h {base64.b64encode(KEY.encode()).decode()}")
    except RuntimeError:
        log.exception("refused: %s", KEY)
    assert "ValueError: http://[key]@h [key]" in lines.getvalue()
    assert shows_a_secret(lines.getvalue()) == []
    append_line(tmp_path / "alarms.jsonl", {"step": 3, "text": f'it said "{KEY}"\n', "also": [KEY[::-1]]})
    assert read_lines(tmp_path / "alarms.jsonl") == [{"step": 3, "text": 'it said "[key]"\n', "also": ["[key]"]}]


def test_point_3_8_what_a_command_prints_contains_no_key() -> None:
    """Neither its output nor the traceback of a chain of exceptions."""
    code = """
import os, sys
import retouch.cli.parser as parser
key = os.environ["A_KEY"]
def fail(arguments):
    print("printed", key)
    try:
        raise KeyError(key[::-1])
    except KeyError as error:
        raise RuntimeError(f"header {key}") from error
parser._run = fail
sys.argv = ["retouch", "recipes"]
parser.main()
"""
    environment = {**os.environ, "A_KEY": KEY}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "printed [key]\n"
    assert "RuntimeError: header [key]" in done.stderr
    assert shows_a_secret(done.stdout + done.stderr) == []
