"""The notebooks run from top to bottom, in fewer steps, and are committed without outputs."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from slow_params import slow_after

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))
SHOWN = ("_repr_png_", "_repr_html_")


def execute(source: str, names: dict[str, Any], place: str) -> Any:
    """Run a cell; returns the value of its last line if that is an expression, as a notebook shows it."""
    tree = ast.parse(source, place)
    last = tree.body[-1]
    if isinstance(last, ast.Expr):
        tree.body[-1] = ast.copy_location(ast.Assign([ast.Name("_shown", ast.Store())], last.value), last)
    exec(compile(ast.fix_missing_locations(tree), place, "exec"), names)
    return names.pop("_shown", None)


@pytest.mark.parametrize("notebook", slow_after(1, NOTEBOOKS), ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] == "code":
            shown.append(execute("".join(cell["source"]), names, f"{notebook.name}:{cell['id']}"))
            if "STEPS" in names:
                names["STEPS"] = 2
    assert names["trainer"].state.step == 2
    drawn = [value for value in shown if any(getattr(value, name, lambda: None)() for name in SHOWN)]
    assert drawn, "it shows images or tables"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs(notebook: Path) -> None:
    """The fields of format 4.5, no outputs, and no other metadata."""
    document = json.loads(notebook.read_text())
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)
    assert set(document["metadata"]) == {"kernelspec", "language_info"}
    assert len({cell["id"] for cell in document["cells"]}) == len(document["cells"])
    for cell in document["cells"]:
        common = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            assert set(cell) == common | {"execution_count", "outputs"}
            assert (cell["execution_count"], cell["outputs"]) == (None, [])
        else:
            assert (cell["cell_type"], set(cell)) == ("markdown", common)
        assert cell["metadata"] == {}


def test_there_are_three_notebooks() -> None:
    assert [notebook.stem for notebook in NOTEBOOKS] == ["look_into_a_run", "own_reward_and_data", "quickstart"]
