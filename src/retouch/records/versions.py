"""What a run ran on: the versions that its numbers may depend on."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "safetensors", "numpy", "pillow")


def versions(folder: Path) -> dict[str, str]:
    """Versions of Python, Retouch and the libraries under it, the platform, and the git commit that ``folder`` stands at.

    What is not installed, and the commit outside a git checkout, is left out. "+changes" marks a checkout with uncommitted changes.
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


def _git(folder: Path, *arguments: str) -> str:
    """What git says, or nothing where there is no git or no checkout."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
