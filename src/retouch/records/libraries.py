"""The libraries of a run: checks that they are installed, records their versions, and silences their output."""

import platform
import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from retouch.records.files import read_bytes

PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "safetensors", "numpy", "pillow", "torchao", "bitsandbytes")
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_MOST_BYTES = 64 * 2**20


def require_trackers(names: Iterable[str]) -> None:
    """Raise ValueError, with the package to install, if one of these trackers is not installed. Call it before expensive work.

    ``names``: the ``trackers`` of a recipe; a run goes on without TensorBoard.
    """
    for name in names:
        if name != "tensorboard" and find_spec(name) is None:
            raise ValueError(f"tracker {name!r} is not installed: run `pip install 'retouch[track]'`, or remove it from the recipe")


def versions(folder: Path) -> dict[str, str]:
    """Return the versions of Python, Retouch and the libraries, the platform, and the git commit checked out in ``folder``.

    Packages that are not installed are left out, and so is the commit if ``folder`` is not in a git checkout. Changes that are not
    committed are not recorded: only git could find them, and git runs programs that a folder's ``.git/config`` names.
    """
    found = {"python": platform.python_version()}
    for package in ("retouch", *PACKAGES):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    found["platform"] = platform.platform()
    if commit := _commit(folder):
        found["git"] = commit
    return found


def silence_libraries() -> None:
    """Turn off the progress bars of weight loading, and the warnings of transformers.

    One of these warnings is wrong: it says that sliding windows are not implemented for the attention in use, although the
    attention mask contains them (a test in tests/pretraining checks this).
    """
    import diffusers.utils.logging
    import transformers.utils.logging

    transformers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def _commit(folder: Path) -> str:
    """Return the commit that is checked out in ``folder``, read from git's files; empty if they do not name one."""
    home = folder.resolve()
    git = next((place / ".git" for place in (home, *home.parents) if (place / ".git").exists()), None)
    if git is None:
        return ""
    try:
        if git.is_file():  # a worktree or a submodule
            git = git.parent / _text(git).removeprefix("gitdir: ")
        found = _text(git / "HEAD")
        name = found.removeprefix("ref: ")
        if name != found:  # a branch
            shared = git / _text(git / "commondir") if (git / "commondir").exists() else git
            loose = [
                path for path in (git / name, shared / name) if ".." not in name and name.startswith("refs/") and path.exists()
            ]
            packed = shared / "packed-refs"
            lines = [line.partition(" ") for line in _text(packed).splitlines()] if not loose and packed.exists() else []
            found = _text(loose[0]) if loose else next((commit for commit, _, branch in lines if branch == name), "")
    except (OSError, ValueError):
        return ""
    return found if _COMMIT.fullmatch(found) else ""


def _text(path: Path) -> str:
    return read_bytes(path.resolve(), most=_MOST_BYTES).decode().strip()
