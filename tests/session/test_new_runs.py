"""New runs: correcting a recipe that failed before the first step, and the held-out table of any reward."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from PIL import ImageStat

from folder_faults import six_step_recipe
from retouch.recipe.recipe import Recipe, parse
from retouch.records.folder import RunFolder
from retouch.run.evaluation import RunEvaluations
from retouch.run.session import run
from retouch.types import Column, Sample, Scores


class Bright:
    """A reward whose columns are known only when it has been built."""

    columns: ClassVar[dict[str, Column]] = {"bright": Column(0.0, 1.0)}

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        return {"bright": torch.tensor([ImageStat.Stat(sample.image.convert("L")).mean[0] / 255 for sample in samples])}


def judged_by_brightness(out: Path, column: str | None) -> Recipe:
    document = six_step_recipe(out, "corrected").document()
    document["reward"] = {"kind": "import", "class": "test_new_runs:Bright", "combine": {"bright": 1}}
    evaluation = {**document["eval"], "column": column, "best_of_k": 2}
    return parse({**document, "steps": 1, "eval": evaluation}, allow_imports=["test_new_runs"])


def test_a_recipe_that_failed_before_its_first_step_can_be_corrected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETOUCH_ALLOW_IMPORTS", "test_new_runs")
    wrong, right = (judged_by_brightness(tmp_path, column) for column in ("overall", None))
    folder = RunFolder(wrong.folder)
    with pytest.raises(ValueError, match=r"no column 'overall', only bright; name one of them, or give null for the combined"):
        run(wrong, fresh=False)
    assert folder.recipe.exists()
    assert not folder.has_steps()
    assert run(right, fresh=False) == 0
    assert folder.has_steps()
    log = folder.log(0).read_text()
    stages = ["evaluating", "held-out tasks after step 0", "baselines: the best of 2 samples", "step 1/1"]
    assert sorted(stages, key=log.index) == stages
    changed = r"a run of another recipe:\n  eval\.column: None in the run, overall in the recipe\nGive .* with --set name=NAME,"
    with pytest.raises(ValueError, match=changed):
        run(wrong, fresh=False)


def test_run_folder_with_a_recipe_of_another_version_raises_and_is_not_changed(tmp_path: Path) -> None:
    recipe = six_step_recipe(tmp_path, "older")
    folder = RunFolder(recipe.folder)
    folder.write_recipe({**recipe.document(), "data": {**recipe.document()["data"], "vain": 0.1}})  # type: ignore[dict-item]
    before = folder.recipe.read_bytes()
    with pytest.raises(ValueError, match=r"(?s)older contains a run whose recipe this version cannot read:.*data.vain.*--fresh"):
        run(recipe, fresh=False)
    assert folder.recipe.read_bytes() == before


def test_columns_of_the_held_out_table_are_aligned_and_separated() -> None:
    def line(step: int, lum: float) -> dict[str, Any]:
        cells = {"n": 3, "edges": 0.25, "lum": lum}
        return {"step": step, "table": {"all": cells, "kinds=move+recolour+reshape": cells}}

    evaluations = SimpleNamespace(
        folder=SimpleNamespace(read_evals=lambda: [line(0, 123.25), line(9, 122.5)]),
        parts=SimpleNamespace(judge=SimpleNamespace(combination=SimpleNamespace(columns=("edges",)))),
        _column="edges",
        _split_label="held-out",
        _first_step=lambda step: 0,
    )
    title, head, *rows = RunEvaluations.format_table(cast("RunEvaluations", evaluations), 9)
    assert title == "held-out tasks after step 9 (before -> after)"
    assert head.split() == ["n", "edges", "lum"]
    assert [row.split() for row in rows] == [
        [name, "3", "0.25", "->", "0.25", "123.25", "->", "122.50"] for name in ("all", "kinds=move+recolour+reshape")
    ]
    assert len({len(row) for row in (head, *rows)}) == 1
