"""What tests of runs share: a tiny writer on disk, and a recipe that trains it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny_writer_runs


@pytest.fixture(scope="session")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder, which no test writes to."""
    folder = tmp_path_factory.mktemp("writer")
    tiny_writer_runs.save_writer(folder)
    return folder


@pytest.fixture
def make(tmp_path: Path, writer: Path) -> Callable[..., dict[str, Any]]:
    """The recipe of its training, changed as ``tiny_writer_runs.recipe`` takes it."""
    return lambda **changes: tiny_writer_runs.recipe(tmp_path, writer, **changes)
