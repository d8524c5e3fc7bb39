"""The settings that all tests share: Hypothesis without a deadline, environment variables, and fixtures for whole runs.

The environment variables are: the variables that packaged recipes read; the consent to import the modules that tests and pages
name, and the keys that may be sent to servers on this machine (``tests/config/test_consent.py`` and ``tests/config/test_keys.py``
remove both); and temporary folders for the user's configuration and state, so that the tests do not use the folders of the person
who runs them. The fixtures import their modules when a test requests them.
"""

import gc
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

# The garbage collector would look at the hundreds of thousands of objects of torch, diffusers and transformers again and again.
gc.disable()

settings.register_profile("retouch", deadline=None)
settings.load_profile("retouch")

TESTS = Path(__file__).parent
SOURCES, RECIPES = TESTS.parent / "src", TESTS.parent / "recipes"

# Shapes and types are checked in modules that compute with tensors and name their shapes. Tests of other packages, such as `data`,
# pass wrong values on purpose and expect Retouch's own errors; and checking every call of the others would cost 9 % of the time.
SHAPED = ("core/*", "models/*", "policies/*", "objectives/*", "renderers/*", "run/step")
_files = [*SOURCES.glob("retouch_models/**/*.py"), *SOURCES.glob("retouch_worlds/pretraining/*.py")]
_files += [file for names in SHAPED for file in SOURCES.glob(f"retouch/{names.replace('*', '**/*')}.py")]
install_import_hook(
    [
        ".".join(file.relative_to(SOURCES).with_suffix("").parts)
        for file in _files
        if re.search(r"(Float|Int|Bool)\[", file.read_text(encoding="utf-8"))
    ],
    "typechecker.checked",
)
NAMED_IN_TESTS = [
    *sorted(file.stem for file in TESTS.rglob("*.py")),
    *("a", "bright", "flawed_judges", "judges", "mine", "no_such_module_of_mine", "nowhere", "scorers"),
    *("my_data", "my_reward", "my_model", "my_objective", "my_sampling"),
]
USER = tempfile.TemporaryDirectory(prefix="retouch-tests-")
os.environ |= {"XDG_CONFIG_HOME": f"{USER.name}/config", "XDG_STATE_HOME": f"{USER.name}/state"}

os.environ |= {"RETOUCH_ALLOW_IMPORTS": ",".join(NAMED_IN_TESTS), "RETOUCH_KEYS": "OPENAI_API_KEY=http://127.0.0.1:*"}

for name, value in {
    "APP__DATA_DIR": "data",
    "APP__BASE_EXP_DIR": "runs",
    "APP__REWARD_FUNCTION_API_BASE": "http://127.0.0.1:4877",
    "APP__RUN_NAME": "named",
}.items():
    os.environ.setdefault(name, value)


LONG = ("run", "distributed", "models", "measurements", "training", "pretraining", "trainer", "plan", "serving")
"""Folders with the longest files."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the folders of ``LONG`` first, so that no process is left with a long file while the others have nothing to do."""
    places = {folder: place for place, folder in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.relative_to(TESTS).parts[0], len(LONG)))


def pytest_collection_finish() -> None:
    """Collect garbage from here on, but only that of the tests."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _each_packaged_recipe_is_evaluated_once() -> Iterator[None]:
    """In the process of the tests: evaluating one takes a process, and no test changes these files."""
    from retouch.recipe import document

    evaluate, kept = document.evaluate_jsonnet, {}

    def evaluate_once(file: Path, **options: Any) -> str:
        key = (Path(file).resolve(), str(options))
        if key not in kept or RECIPES not in key[0].parents:
            kept[key] = evaluate(file, **options)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document, "evaluate_jsonnet", evaluate_once)
        yield


@pytest.fixture(scope="session")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny vision-language model. No test may write to it."""
    import tiny_writer_runs

    folder = tmp_path_factory.mktemp("writer")
    tiny_writer_runs.save_writer(folder)
    return folder


@pytest.fixture
def make(tmp_path: Path, writer: Path) -> Callable[..., dict[str, Any]]:
    """Make a recipe that trains the ``writer``; takes the changes that ``tiny_writer_runs.recipe`` takes."""
    import tiny_writer_runs

    return lambda **changes: tiny_writer_runs.recipe(tmp_path, writer, **changes)
