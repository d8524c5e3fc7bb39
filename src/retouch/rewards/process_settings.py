"""The settings of the process that a run depends on, and which reward changed them.

A reward runs in a thread of the run, next to the rollouts. If it changes the current folder or torch's default dtype, the run
writes its files elsewhere, or its own code fails with an error that does not name the reward.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from sys import exception
from typing import Any

import torch

_SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "the current folder": (os.getcwd, os.chdir),
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's deterministic debug mode": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "torch's float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "cudnn.benchmark": (lambda: torch.backends.cudnn.benchmark, lambda value: setattr(torch.backends.cudnn, "benchmark", value)),
}
_lock = threading.Lock()
_running: list[Callable[[], str]] = []
_before: dict[str, Any] = {}
"""The settings before the first of the running calls."""
_reported: list[str] = []


@contextmanager
def unchanged_settings(label: Callable[[], str]) -> Iterator[None]:
    """Raise ValueError if a setting is another one after the block, a call of a reward; it is set back first.

    ``label``: returns the reward's name for the message.

    If calls of several rewards overlap, the message names all that may have changed it. torch's gradient mode and default device,
    which belong to the thread, are only set back.
    """
    outer, device = exception(), torch.get_default_device()
    with _lock:
        if not _running:
            _before.update(_settings())
        _running.append(label)
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)
        with _lock:
            text = _set_back()
            _running.remove(label)
        if text:
            error = exception()
            raise ValueError(text if error is outer else f"{text}\n  it then raised {type(error).__name__}: {error}")


@contextmanager
def explained_by_settings() -> Iterator[None]:
    """Name the cause of an error that ends the block, a run, after a reward changed a setting in the background."""
    outer = exception()
    _reported.clear()
    try:
        yield
    finally:
        error = exception()
        if error is not outer and isinstance(error, Exception):
            with _lock:
                _set_back()
            if _reported and not any(text in str(error) for text in _reported):
                raise ValueError(f"{_reported[-1]}\n  the run then failed with {type(error).__name__}: {error}") from error


def _settings() -> dict[str, Any]:
    """The present settings, without those that cannot be read: a deleted folder, a precision that is set in two ways."""
    found = {}
    for name, (read, _) in _SETTINGS.items():
        with suppress(OSError, RuntimeError):
            found[name] = read()
    return found


def _set_back() -> str:
    """Set back what differs from ``_before`` while a reward is running. Returns the message for the user, empty if nothing does."""
    now, changes = _settings(), []
    for name, value in _before.items() if _running else ():
        if now.get(name) != value:
            _SETTINGS[name][1](value)
            changes.append(f"{name} from {value} to {now.get(name, 'one that cannot be read')}")
    if not changes:
        return ""
    names = list(dict.fromkeys(label() for label in _running))
    who = names[0] if len(names) == 1 else f"one of {' and '.join(names)}, which ran at the same time,"
    text = f"{who} changed {' and '.join(changes)}, which the whole process shares; set it back before the reward returns"
    _reported.append(text)
    return text
