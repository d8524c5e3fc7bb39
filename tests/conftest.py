"""What all tests share: Hypothesis without a deadline, environment variables that packaged recipes read, fixtures of whole runs.

The fixtures import what they need when a test asks for them.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("retouch", deadline=None)
settings.load_profile("retouch")

for name, value in {
    "APP__DATA_DIR": "data",
    "APP__BASE_EXP_DIR": "runs",
    "APP__REWARD_FUNCTION_API_BASE": "http://127.0.0.1:4877",
    "APP__RUN_NAME": "named",
}.items():
    os.environ.setdefault(name, value)


@pytest.fixture(scope="session")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny vision-language model. No test writes to it."""
    import tiny_writer_runs

    folder = tmp_path_factory.mktemp("writer")
    tiny_writer_runs.save_writer(folder)
    return folder


@pytest.fixture
def make(tmp_path: Path, writer: Path) -> Callable[..., dict[str, Any]]:
    """The recipe that trains it, changed as ``tiny_writer_runs.recipe`` takes it."""
    import tiny_writer_runs

    return lambda **changes: tiny_writer_runs.recipe(tmp_path, writer, **changes)
