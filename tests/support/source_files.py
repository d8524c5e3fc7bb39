"""The Python files of the core and of the wings, by the names that docs and tests use for them."""

from pathlib import Path

import retouch

SOURCE = Path(retouch.__file__).parents[1]


def source_files() -> dict[str, Path]:
    """Every file: its path relative to ``retouch``, or, in a wing, relative to the folder that contains the wings."""
    files = {path.relative_to(SOURCE).as_posix(): path for path in sorted(SOURCE.glob("retouch*/**/*.py"))}
    return {name.removeprefix("retouch/"): path for name, path in files.items()}
