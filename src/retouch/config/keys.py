"""Which API key may be sent to which server. The user decides this by binding keys to addresses; a recipe never does.

A recipe names the address of a judge, a reward server or an engine, and for a judge the environment variable of its key. A recipe
from somebody else could thus send any variable to any address. Therefore a key is sent only to addresses that it is bound to:

* in the environment variable RETOUCH_KEYS: ``OPENAI_API_KEY=https://api.openai.com JUDGE_KEY=https://judge.example:8443``;
* in ``~/.config/retouch/keys.toml``: ``OPENAI_API_KEY = "https://api.openai.com"``, or a list of addresses;
* for a variable that is in neither, the provider's own address (``KNOWN``).

An address is a scheme, a host and a port. It is https, except on this machine (loopback), where the port may be ``*``, and except
for the tokens of servers that users start themselves (``OWN_SERVERS``), which may be bound to http in a network of one's own.

Keys are also removed from text before it leaves the process (``redacted``): standard output and error, logs, run files, ledgers,
pages. The secrets of this process are the values of variables that are named like secrets (``..._KEY``) or bound to an address, and
the passwords in the addresses of proxies. A secret is also found if only ten of its letters and digits appear in a row, in either
direction, in any case, with other characters between them, or encoded (base64, hexadecimal, percent and escape sequences, decimal
codes).
"""

import base64
import functools
import logging
import os
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

from retouch.config.consent import user_folder

VARIABLE = "RETOUCH_KEYS"
_LOCAL = ("http://127.0.0.1:*", "http://localhost:*", "http://[::1]:*")
_OPENAI = ("https://api.openai.com",)
KNOWN: Mapping[str, tuple[str, ...]] = {
    "OPENAI_API_KEY": _OPENAI,
    "OPENAI_CUSTOM_HEADERS": _OPENAI,
    "OPENAI_ORG_ID": _OPENAI,
    "OPENAI_PROJECT_ID": _OPENAI,
    "ANTHROPIC_API_KEY": ("https://api.anthropic.com",),
    "DASHSCOPE_API_KEY": ("https://dashscope.aliyuncs.com", "https://dashscope-intl.aliyuncs.com"),
    "DEEPSEEK_API_KEY": ("https://api.deepseek.com",),
    "FIREWORKS_API_KEY": ("https://api.fireworks.ai",),
    "GEMINI_API_KEY": ("https://generativelanguage.googleapis.com",),
    "GROQ_API_KEY": ("https://api.groq.com",),
    "MISTRAL_API_KEY": ("https://api.mistral.ai",),
    "OPENROUTER_API_KEY": ("https://openrouter.ai",),
    "TOGETHER_API_KEY": ("https://api.together.xyz",),
}
"""The addresses of keys that the user has not bound: those of their providers."""
TOKEN = "RETOUCH_TOKEN"
VLLM_KEY = "VLLM_API_KEY"
OWN_SERVERS = frozenset({TOKEN, VLLM_KEY})
"""The keys of servers that users start themselves. They may always be sent to this machine."""
_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"[A-Za-z0-9._:-]+")
_LOOPBACK = re.compile(r"localhost|127(\.\d{1,3}){3}|::1")
_FORM = "write it as https://host or https://host:port, without a user, a password or a key"
_NOT_SECRET = "without https everybody on the network path can read it; use https, or a tunnel to 127.0.0.1"
_BINDING = re.compile(r"(?P<variable>[A-Za-z_]\w*)=(?P<url>\S+)")
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
_MASKED = re.compile(r"((?:(?<![\w-])[\w-]+)?)(?:[*•]{2,}|\.{3,}|…)([\w-]*)")
_HEADER = re.compile(r"(\S+)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Address:
    """An address that a key may be sent to. ``port``: None allows any port."""

    scheme: str
    host: str
    port: int | None

    @property
    def is_local(self) -> bool:
        """Whether it is this machine's loopback interface."""
        return _LOOPBACK.fullmatch(self.host) is not None

    def covers(self, other: "Address") -> bool:
        """Whether a key that is bound to this address may go to the other one."""
        return (self.scheme, self.host) == (other.scheme, other.host) and self.port in (None, other.port)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "*" if self.port is None else self.port
        return f"{self.scheme}://{host}" + ("" if port == _PORTS[self.scheme] else f":{port}")


def address_of(url: str) -> Address:
    """Scheme, host and port of a URL; the rest of the URL is ignored. Raises ValueError if it has no such address."""
    any_port = re.fullmatch(r"(\w+://[^/@]+):\*/?", url)
    try:
        parts = urlsplit(any_port[1] if any_port else url)
        port = parts.port
    except ValueError:
        raise ValueError(f"this is not an address; {_FORM}") from None
    host = parts.hostname or ""
    if parts.scheme not in _PORTS or not _HOST.fullmatch(host) or parts.username is not None:
        raise ValueError(f"this is not an address; {_FORM}")
    return Address(parts.scheme, host.rstrip("."), None if any_port else port or _PORTS[parts.scheme])


def is_bound(variable: str, url: str) -> bool:
    """Whether the value of this variable may go to this address. Raises ValueError for an address that cannot be read, and for an
    invalid binding."""
    wanted = address_of(url)
    own: tuple[Address, ...] = ()
    for number, word in enumerate(_words(), start=1):
        binding = _BINDING.fullmatch(word)
        if binding is None:  # the word may be a key, so the message does not contain it
            raise ValueError(f"{VARIABLE}: word {number} needs an address: VARIABLE=https://host")
        address = _checked(binding["variable"], binding["url"], VARIABLE)  # also of other variables, to find every mistake
        own += (address,) if binding["variable"] == variable else ()
    own += _from_file().get(variable, ())
    known = _LOCAL if variable in OWN_SERVERS else () if own else KNOWN.get(variable, ())
    return any(bound.covers(wanted) for bound in (*own, *map(address_of, known)))


def require_bound(variable: str, url: str) -> None:
    """Raise ValueError, with the command that binds the key, unless the key in this variable may be sent to this address."""
    if is_bound(variable, url):
        return
    address = address_of(url)
    said = f"{variable} is not sent to {address}: you have not bound this key to this address"
    if address.scheme == "http" and not address.is_local and variable not in OWN_SERVERS:
        raise ValueError(f"{said}, and {_NOT_SECRET}")
    raise ValueError(f"{said}. If that server may have the key: {binding_command(variable, url)}")


def binding_command(variable: str, url: str) -> str:
    """The shell command that binds the key to this address."""
    before = f"${VARIABLE} " if os.environ.get(VARIABLE) else ""
    return f'export {VARIABLE}="{before}{variable}={address_of(url)}"'


def _words() -> list[str]:
    return os.environ.get(VARIABLE, "").replace(",", " ").split()


def _from_file() -> dict[str, tuple[Address, ...]]:
    folder = user_folder("XDG_CONFIG_HOME", ".config")
    if folder is None or not (file := folder / "keys.toml").is_file():
        return {}
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    found: dict[str, tuple[Address, ...]] = {}
    for variable, urls in content.items():
        urls = [urls] if isinstance(urls, str) else urls
        if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
            raise ValueError(f'{file}: {variable} must be an address or a list of them: {variable} = "https://host"')
        found[variable] = tuple(_checked(variable, url, str(file)) for url in urls)
    return found


def _checked(variable: str, url: str, where: str) -> Address:
    """The address of a binding. Raises ValueError for an address of another machine with any port, or without https (which is
    allowed for ``OWN_SERVERS``)."""
    try:
        address = address_of(url)
    except ValueError:  # the value may be a key, so the message does not contain it
        raise ValueError(f"{where}: the value of {variable} is not an address; {_FORM}") from None
    if not address.is_local and address.scheme != "https" and variable not in OWN_SERVERS:
        raise ValueError(f"{where}: {variable}={url}: {_NOT_SECRET}")
    if not address.is_local and address.port is None:
        raise ValueError(f"{where}: {url}: only an address of this machine may have the port *")
    return address


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


@dataclass(eq=False, repr=False)
class RedactingStream:
    """A text stream that writes to ``inner`` without the secrets of this process."""

    inner: TextIO

    def write(self, text: str) -> int:
        """Write the redacted text; returns the number of characters that were given."""
        self.inner.write(redacted(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def redact_output() -> None:
    """Redact what this process writes to its standard output and error from now on, tracebacks included."""
    for name in ("stdout", "stderr"):
        if not isinstance(stream := getattr(sys, name), RedactingStream):
            setattr(sys, name, RedactingStream(stream))


def _bound_values() -> Iterator[str]:
    """The values of bound variables, of bad words in RETOUCH_KEYS (a key instead of its address), and passwords of addresses."""
    names = {*KNOWN, *OWN_SERVERS}
    for word in _words():
        binding = _BINDING.fullmatch(word)
        if binding is not None and "://" in binding["url"]:
            names.add(binding["variable"])
        elif len(bad := word if binding is None else binding["url"]) >= _RUN:
            yield bad
    with suppress(ValueError):  # an invalid file; where its bindings matter, the user is told
        names |= _from_file().keys()
    for name in names:
        value = os.environ.get(name, "")
        if name not in os.environ and (file := os.environ.get(f"{name}_FILE")) is not None:
            try:
                value = Path(file).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
        yield from (word for word in _HEADER.findall(value) if len(word) >= _RUN)
    for name, value in os.environ.items():
        if "://" in value and name != VARIABLE:
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
