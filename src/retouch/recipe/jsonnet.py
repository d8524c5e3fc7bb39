"""Evaluation of Jsonnet in a child process: a recipe that recurses without end overflows the stack of whoever evaluates it."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

SECONDS = 60
BYTES = 4 << 30
_MOST_LINES = 24
_PROGRAM = """
import json, resource, sys
asked = json.load(sys.stdin)
for limit, value in ((resource.RLIMIT_AS, asked.pop("bytes")), (resource.RLIMIT_CORE, 0)):
    try:
        resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))
    except (ValueError, OSError):
        pass  # a stricter limit holds already, or the system has none
import rjsonnet
try:
    answer = {"text": rjsonnet.evaluate_file(asked.pop("file"), **asked)}
except RuntimeError as error:
    answer = {"error": str(error)}
json.dump(answer, sys.stdout)
"""


class JsonnetError(ValueError):
    """The file could not be evaluated; the message is for the user."""


def evaluate_jsonnet(file: Path, *, folders: Sequence[Path], variables: Mapping[str, str]) -> str:
    """The JSON text that a Jsonnet file evaluates to.

    ``folders``: where imports are looked for besides the file's own folder. ``variables``: the external variables. Raises
    JsonnetError for a mistake in the file, and if the evaluation recurses without end or needs more than 60 s or 4 GiB.
    """
    asked = {"file": str(file), "jpathdir": [str(each) for each in folders], "ext_vars": dict(variables), "bytes": BYTES}
    try:
        command = [sys.executable, "-P", "-c", _PROGRAM]
        done = subprocess.run(command, input=json.dumps(asked).encode(), capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise JsonnetError(f"evaluating the recipe took more than {SECONDS} s: look for an endless recursion") from None
    if done.returncode < 0:
        raise JsonnetError(
            "evaluating the recipe overflowed the stack or the memory: look for an object or a function that contains itself"
        )
    if done.returncode:
        raise JsonnetError(f"evaluating the recipe failed, perhaps for memory: {_last_line(done.stderr)}")
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise JsonnetError(_shortened(answer["error"]))
    text: str = answer["text"]
    return text


def _shortened(message: str) -> str:
    """Without the hundreds of frames of an endless recursion."""
    lines = message.strip().splitlines()
    more = len(lines) - _MOST_LINES
    return "\n".join([*lines[:_MOST_LINES], f"    ... and {more} more lines"] if more > 0 else lines)


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it gave no reason"
