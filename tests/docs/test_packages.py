"""The docstring of every package of the source tree describes its contents and which packages it may import."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
PACKAGES = sorted(
    file.relative_to(SOURCE).parent.as_posix() for file in SOURCE.rglob("__init__.py") if file.parent != SOURCE / "retouch"
)


def test_the_list_of_packages_contains_known_packages():
    assert {"retouch/core", "retouch_models/flux", "retouch_plan"} < set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_package_docstrings_have_at_least_15_words_and_mention_imports(package):
    text = ast.get_docstring(ast.parse((SOURCE / package / "__init__.py").read_text(encoding="utf-8")))
    assert text is not None, f"{package}/__init__.py has no docstring"
    assert len(text.split()) >= 15, f"{package}/__init__.py: the docstring is too short to say what belongs in it"
    assert "import" in text.lower(), f"{package}/__init__.py: the docstring does not say what the package may import"
