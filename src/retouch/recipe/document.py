"""Reads a file as a JSON document: evaluates Jsonnet, applies ``a.b=value`` overrides, and refuses secrets of the environment.

A recipe can read only those environment variables whose names begin with ``APP__``, through ``std.extVar``. Jsonnet is evaluated in
a child process, because an endless recursion in a recipe overflows the stack of the evaluating process.
"""

import copy
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from retouch.config import imports
from retouch.config.keys import secrets
from retouch.config.packaged import packaged_recipes

PREFIX = "APP__"
_UNDEFINED = re.compile(r"external variable is not defined: (\w+)")
_MEANING = re.compile(r"^\s*// (\w+__\w+): (.+)$", re.MULTILINE)


def evaluate(file: Path) -> dict[str, Any]:
    """Evaluate a Jsonnet (or JSON) file to an object. Imports are searched next to the file, then among the packaged recipes.

    Raises ValueError if the file cannot be evaluated, or does not describe an object.
    """
    variables = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    try:
        document = json.loads(evaluate_jsonnet(file, folders=[packaged_recipes()], variables=variables))
    except JsonnetError as error:
        missing = _missing_variables(file, variables, str(error))
        raise ValueError("\n".join(missing) if missing else str(error)) from None
    except RecursionError:
        raise ValueError("the recipe is nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError("a recipe is an object with keys: { name: 'mine', ... }")
    return document


def _missing_variables(file: Path, variables: Mapping[str, str], error: str) -> list[str]:
    """A line for each environment variable that a recipe reads and that is not set; empty if ``error`` has another cause.

    The meaning of a variable is in a comment of the recipe, or of a library that comes with the package: ``// APP__NAME: meaning``.
    """
    missing: dict[str, str] = {}
    while (found := _UNDEFINED.search(error)) and found[1] not in missing:
        missing[found[1]] = ""
        try:
            evaluate_jsonnet(file, folders=[packaged_recipes()], variables={**variables, **missing})
            error = ""
        except JsonnetError as another:
            error = str(another)
    if not missing:
        return []
    texts = [each.read_text(encoding="utf-8") for each in (file, *(packaged_recipes() / "lib").glob("*.libsonnet"))]
    meanings = {name: meaning for text in texts for name, meaning in _MEANING.findall(text)}
    lines = [f"  {name}: {meanings.get(name, 'the recipe has no comment about it')}" for name in missing]
    foreign = any(not name.startswith(PREFIX) for name in missing)
    return [
        "the recipe reads environment variables that are not set:",
        *lines,
        f"set them with: export {' '.join(f'{name}=...' for name in missing)}",
        *([f"only environment variables that begin with {PREFIX} are seen"] if foreign else []),
    ]


def apply(document: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The document after each ``path=value`` was set, in this order. Entries of a list have numbers (``phases.0.steps=3``).

    Only the schema checks whether the recipe has such a key. Raises ValueError for an override without ``=``, for an entry that a
    list does not have, for a key below a plain value, and for an unpaired surrogate, which no file can contain.
    """
    if isinstance(overrides, str):
        raise ValueError(f"overrides: {overrides!r:.80} is a text; give a list: [{overrides!r:.80}]")
    changed: dict[str, Any] = copy.deepcopy(dict(document))
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise ValueError(f"--set {override}: write it as --set some.key=value")
        value = value_of(text)
        try:
            json.dumps([keys, value], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError(f"--set {override!a:.80}: not UTF-8 text") from None
        node = changed
        for depth, key in enumerate(keys):
            here = ".".join(keys[:depth])
            if isinstance(node, list):
                if not key.isdecimal() or int(key) >= len(node):
                    legal = f"0 to {len(node) - 1}" if node else "none: it is empty"
                    raise ValueError(f"--set {override}: {here} is a list, and {key!r} is not the number of an entry ({legal})")
                place: Any = int(key)
            elif isinstance(node, dict):
                place = key
            else:
                raise ValueError(f"--set {override}: {here} is {json.dumps(node)}, which has no keys")
            if depth == len(keys) - 1:
                node[place] = value
            else:
                if isinstance(node, dict) and node.get(place) is None:
                    node[place] = {}
                node = node[place]
    return changed


def for_card(document: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The document after the overrides. In a recipe with ``cards``, the values of its ``card`` are set before them.

    ``cards``: the name of a GPU's memory, such as ``24gb``, to values by path: ``{"24gb": {"microbatch": 4, "rollout.chunk": 8}}``.
    Raises ValueError as ``apply``, and for a card that the recipe does not have.
    """
    changed = apply(document, overrides)
    if not isinstance(cards := changed.get("cards"), dict):
        return changed
    if changed.get("card") not in cards:
        raise ValueError(f"card: {changed.get('card')!r}; this recipe has values for {', '.join(cards)}")
    of_card = [f"{path}={json.dumps(value)}" for path, value in cards[changed["card"]].items()]
    changed = apply(apply(document, of_card), overrides)
    return {key: value for key, value in changed.items() if key not in ("card", "cards")}


def value_at(document: Any, key: str) -> Any:
    """The value of a key such as ``policy.model.path`` in a recipe's document; None if the document has no such key."""
    for part in key.split("."):
        document = document.get(part) if isinstance(document, Mapping) else None
    return document


def value_of(text: str) -> Any:
    """The JSON value of a text, or the text itself if it is not JSON."""
    try:
        # Python's reader takes NaN and Infinity for numbers; JSON has no such values, so they stay text.
        return json.loads(text, parse_constant=str)
    except json.JSONDecodeError:
        return text


def refuse_secrets(document: Any, environment: Mapping[str, str]) -> None:
    """Raise ValueError if a text contains the value of a secret variable (``..._KEY`` and the like). The message has the place and
    the name of the variable, not its value."""
    known = secrets(environment)
    lines = [
        f"{path}: contains the value of {name}, but recipes are stored and displayed; keep it in the environment only"
        for path, text in _texts(document, "")
        for name, value in known.items()
        if value in text
    ]
    if lines:
        raise ValueError("\n".join(lines))


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every text in the document, keys included, with its path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _texts(inner, f"{path}.{index}" if path else str(index))
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield path or "the top", str(key)
            yield from _texts(inner, f"{path}.{key}" if path else str(key))


SECONDS = 60
SUFFIXES = (".jsonnet", ".libsonnet", ".json")
BYTES = 1 << 30
"""The memory that an evaluation may take; the packaged recipes need less than 64 MiB."""
TEXT_BYTES = 16 << 20
"""The size of the JSON text of a recipe."""
_MOST_LINES = 24
_SYNTAX_ERROR = re.compile(
    r'^syntax error: expected (?P<expected>.*), got "(?P<token>.*)"\n +(?P<file>.+):(?P<line>\d+):(?P<column>\d+)$', re.MULTILINE
)
_BLANK = re.compile(rb"\s*((//|#).*)?")
_PROGRAM = """
import json, os, resource, sys
asked = json.load(sys.stdin)
most = asked.pop("text_bytes")
limits = ((resource.RLIMIT_AS, asked.pop("bytes")), (resource.RLIMIT_CPU, asked.pop("seconds")), (resource.RLIMIT_CORE, 0))
for limit, value in limits:
    try:
        resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))
    except (ValueError, OSError):
        pass  # a stricter limit holds already, or the system has none
main, folders, suffixes = asked["file"], asked.pop("folders"), tuple(asked.pop("suffixes"))
home = os.path.dirname(os.path.realpath(main))
def is_hidden(path):
    inside = any(path.startswith(os.path.realpath(base) + os.sep) for base in folders)
    return not inside and any(part.startswith(".") and part != ".." for part in os.path.relpath(path, home).split(os.sep))
def text_of(path):
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise RuntimeError(f"{path}: the byte at offset {error.start} is not UTF-8; save the file as UTF-8")
def read(folder, name):
    if (folder, name) == ("", main):
        return main, text_of(main)
    for path in (os.path.realpath(os.path.join(base, name)) for base in (folder or home, *folders)):
        if os.path.isfile(path):
            if is_hidden(path) or not path.endswith(suffixes):
                raise RuntimeError(f"{path}: a recipe may import only files named {', '.join(suffixes)} that are not hidden")
            return path, text_of(path)
    raise RuntimeError(f"can't resolve {name} from {folder or main}")
try:
    import rjsonnet
    text = rjsonnet.evaluate_file(asked.pop("file"), import_callback=read, **asked)
    answer = {"text": text} if len(text) <= most else {"error": f"the recipe has more than {most >> 20} MiB of JSON"}
except (RuntimeError, ImportError) as error:
    answer = {"error": str(error)[:100_000]}
json.dump(answer, sys.stdout)
"""


class JsonnetError(ValueError):
    """The file could not be evaluated; the message is for the user."""


def evaluate_jsonnet(file: Path, *, folders: Sequence[Path], variables: Mapping[str, str]) -> str:
    """Evaluate a Jsonnet file to JSON text.

    ``folders``: searched for imports after the file's own folder. Only files named ``.jsonnet``, ``.libsonnet`` or
    ``.json`` can be imported, and no hidden ones outside of ``folders``, so that somebody else's recipe cannot read keys and send
    them to a server that it names. ``variables``: the external variables. Raises JsonnetError for a mistake in the file, for a file
    that cannot be imported, and if the evaluation recurses without end or needs more than 60 s, 1 GiB of
    memory, or 16 MiB for its result.
    """
    asked = {
        "file": str(file),
        "folders": [str(each) for each in folders],
        "suffixes": SUFFIXES,
        "ext_vars": dict(variables),
        "bytes": BYTES,
        "text_bytes": TEXT_BYTES,
        "seconds": SECONDS + 1,  # of CPU time: it also ends a child whose parent was killed
    }
    try:
        # The child limits what it writes to standard output; std.trace writes any amount of text to standard error.
        done = subprocess.run(
            imports.python("-c", _PROGRAM),
            env=imports.environment(),
            input=json.dumps(asked).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise JsonnetError(f"evaluating the recipe took more than {SECONDS} s: look for an endless recursion") from None
    if done.returncode:
        raise JsonnetError(
            f"evaluating the recipe overflowed the stack or its {BYTES >> 20} MiB of memory: look for an object or a function that "
            "contains itself, and for very long texts and lists"
        )
    answer = json.loads(done.stdout)
    if "error" in answer:
        lines = answer["error"].replace("import_callback error: RuntimeError: ", "").strip().splitlines()
        if (more := len(lines) - _MOST_LINES) > 0:  # the hundreds of frames of an endless recursion
            lines = [*lines[:_MOST_LINES], f"    ... and {more} more lines"]
        message, missing = "\n".join(lines), ""
        # The parser lists every token that could follow, so the list shows where in a recipe the error is.
        if (found := _SYNTAX_ERROR.search(message)) is not None:
            missing = _missing(found["expected"], found["token"], Path(found["file"]), int(found["line"]), int(found["column"]))
        raise JsonnetError(f"{message}\n    perhaps {missing}" if missing else message)
    text: str = answer["text"]
    return text


def _missing(expected: str, token: str, file: Path, line: int, column: int) -> str:
    """What is missing, as a sentence; empty if that is not known. ``line`` and ``column`` count from 1, columns in bytes."""
    if r'"\\u"' in expected:
        return "a closing quote is missing"
    if '":::"' in expected:
        return "the colon after a key is missing, or the key needs quotes"
    if '";"' in expected:
        return "the semicolon after a `local` is missing"
    if token == "EOF":
        return "a closing bracket is missing" if file.read_bytes().strip() else "the file is empty"
    if "<binary op>" in expected and "EOF" not in expected and (token.isalnum() or token in "_'\" "):
        lines = file.read_bytes().splitlines()[:line]
        lines[-1] = lines[-1][: column - 1]
        ends = max(number for number, each in enumerate(lines, start=1) if not _BLANK.fullmatch(each))
        return f"a comma is missing after the value that ends in line {ends}"
    return ""
