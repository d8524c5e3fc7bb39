"""Evaluates Jsonnet in a child process, because an endless recursion in a recipe overflows the stack of the evaluating process."""

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from retouch.config import imports

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
        message = _shortened(answer["error"].replace("import_callback error: RuntimeError: ", ""))
        raise JsonnetError(message + _syntax_advice(message))
    text: str = answer["text"]
    return text


def _shortened(message: str) -> str:
    """The first lines of the message, without the hundreds of frames of an endless recursion."""
    lines = message.strip().splitlines()
    more = len(lines) - _MOST_LINES
    return "\n".join([*lines[:_MOST_LINES], f"    ... and {more} more lines"] if more > 0 else lines)


def _syntax_advice(message: str) -> str:
    """What may be missing at the place of a syntax error; empty for other errors.

    The parser lists every token that could follow there, so the list shows where in a recipe the error is.
    """
    found = _SYNTAX_ERROR.search(message)
    if found is None:
        return ""
    missing = _missing(found["expected"], found["token"], Path(found["file"]), int(found["line"]), int(found["column"]))
    return f"\n    perhaps {missing}" if missing else ""


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
