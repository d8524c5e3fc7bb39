"""Requests to a run while it trains: stop after this step, save a checkpoint now, store samples more or less often.

Each request is a file in the run's ``control`` folder, which says who made it and when. Rank 0 of the run reads new files at the
end of a step, and adds its answer to the file. A request is only a file: nothing is sent to the process that trains.
"""

import getpass
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from retouch.records import files
from retouch.records.folder import RunFolder
from retouch.records.ownership import current_owner

Action: TypeAlias = Literal["stop", "checkpoint", "samples"]
MOST_PENDING = 20
MOST_STEPS = 1_000_000
_MOST_BYTES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRequest:
    """A request to a run. ``action``: what the run should do. ``value``: for ``samples``, the steps between stored samples (0:
    store no more); otherwise None.

    ``by`` and ``at``: who made the request, and when (ISO 8601, UTC). ``taken``: None until the run answers; False if it refused.
    ``step`` and ``answer``: the step after which the run answered, and the text of its answer.
    """

    action: Action
    value: int | None
    by: str
    at: str
    taken: bool | None = None
    step: int | None = None
    answer: str | None = None


def check(action: object, value: object) -> tuple[Action, int | None]:
    """Return the action and the value of a request. Raises ValueError if a run could not carry it out."""
    if action not in get_args(Action):
        raise ValueError(f"a run can be asked for {', '.join(get_args(Action))}, not for {str(action)[:100]!r}")
    if action != "samples":
        if value is not None:
            raise ValueError(f"{action} takes no value")
    elif type(value) is not int or not 0 <= value <= MOST_STEPS:
        raise ValueError(f"samples needs the steps between stored samples, a number from 0 to {MOST_STEPS}; 0 stores no more")
    return action, value  # type: ignore[return-value]


def make_request(folder: RunFolder, action: object, value: object = None, *, via: str) -> str:
    """Store a request, and return its id. ``via``: how it was made, for example "command line".

    Raises ValueError if the request is not valid, if no process is training in the folder, or if too many requests are pending.
    """
    checked = check(action, value)
    if current_owner(folder.root) is None:
        raise ValueError(f"run {folder.name} is not training, so nothing would take the request")
    waiting = sum(request.taken is None for request in read_requests(folder).values())
    if waiting >= MOST_PENDING:
        raise ValueError(f"{waiting} requests already wait for the end of the step")
    folder.control.mkdir(exist_ok=True)
    name = f"{time.time_ns():020d}-{secrets.token_hex(4)}"
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = f"user {os.getuid()}"
    made = ControlRequest(
        action=checked[0],
        value=checked[1],
        by=f"{user}@{socket.gethostname()} ({via})",
        at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    files.write_json(folder.control / f"{name}.json", asdict(made))
    return name


def read_requests(folder: RunFolder) -> dict[str, ControlRequest]:
    """Return all requests by id, the oldest first. Files that are not requests are left out."""
    found = {path.stem: _read(path) for path in sorted(folder.control.glob("*.json"))}
    return {name: request for name, request in found.items() if request is not None}


def answer_request(folder: RunFolder, name: str, request: ControlRequest, *, taken: bool, step: int, answer: str) -> None:
    """Add the run's answer to the file of a request."""
    folder.require_owner()
    answered = replace(request, taken=taken, step=step, answer=answer)
    files.write_json(folder.control / f"{name}.json", asdict(answered))


def _read(path: Path) -> ControlRequest | None:
    try:
        found = json.loads(files.read_bytes(path, most=_MOST_BYTES))
        if not isinstance(found, Mapping):
            return None
        action, value = check(found.get("action"), found.get("value"))
    except (OSError, ValueError, RecursionError):
        return None
    by, at, taken, step, answer = (found.get(name) for name in ("by", "at", "taken", "step", "answer"))
    if not isinstance(by, str) or not isinstance(at, str) or not isinstance(taken, bool | None):
        return None
    if not isinstance(step, int | None) or not isinstance(answer, str | None):
        return None
    return ControlRequest(action=action, value=value, by=by, at=at, taken=taken, step=step, answer=answer)
