"""The libraries of a run: checks that they are installed, records their versions, and silences their output."""

import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "safetensors", "numpy", "pillow")


def require_trackers(names: Iterable[str]) -> None:
    """Raise ValueError, with the package to install, if one of these trackers is not installed. Call it before expensive work.

    ``names``: the ``trackers`` of a recipe; TensorBoard is always installed.
    """
    for name in names:
        if name != "tensorboard" and find_spec(name) is None:
            raise ValueError(f"tracker {name!r} is not installed: run `pip install 'retouch[track]'`, or remove it from the recipe")


def versions(folder: Path) -> dict[str, str]:
    """Return the versions of Python, Retouch and the libraries, the platform, and the git commit checked out in ``folder``.

    Packages that are not installed are left out, and so is the commit if ``folder`` is not in a git checkout. The suffix "+changes"
    marks a checkout with uncommitted changes.
    """
    found = {"python": platform.python_version()}
    for package in ("retouch", *PACKAGES):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    found["platform"] = platform.platform()
    commit = _git(folder, "rev-parse", "HEAD")
    if commit:
        found["git"] = commit + ("+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
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


def _git(folder: Path, *arguments: str) -> str:
    """Return the output of git; empty if git is not installed or ``folder`` is not in a checkout."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
