"""The open set of data sources: what a parse imports, classes of one's own, and what shared code asks of a source."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import pytest
from PIL import Image

from retouch.config.packaged import packaged_recipes
from retouch.data.base import DataContext, DataSets, DataSource
from retouch.data.kinds import DATA
from retouch.data.playground.tasks import PlaygroundData
from retouch.recipe.derived.differences import differences
from retouch.recipe.document import evaluate
from retouch.recipe.recipe import parse
from retouch.testing import check_data_source
from retouch.types import Task, TaskContents


class Numbers(DataSource):
    """Tasks made from numbers."""

    path_keys: ClassVar[tuple[str, ...]] = ("path",)

    path: str = "anywhere"
    """A place."""
    shared: bool = False
    """Whether held-out tasks are training tasks."""

    def contents(self) -> TaskContents:
        return TaskContents(images=True, mask=False, reference=False, target=False)

    def build(self, context: DataContext) -> DataSets:
        return DataSets(_tasks(range(4)), _tasks(range(1 if self.shared else 4, 6)))


class Changing(Numbers):
    """Gives other tasks each time."""

    made: ClassVar[list[int]] = []

    def build(self, context: DataContext) -> DataSets:
        self.made.append(1)
        return DataSets(_tasks(range(len(self.made))), _tasks(range(100, 102)))


class SharesItsSecondImages(Numbers):
    """Its held-out tasks have source images of training tasks, in another place."""

    def build(self, context: DataContext) -> DataSets:
        first, second = (Image.new("RGB", (8, 8), (255, k, 0)) for k in range(2))
        train = [replace(task, images=(*task.images, first)) for task in _tasks(range(2))]
        return DataSets(
            train, [replace(task, images=(first if k else second, *task.images)) for k, task in enumerate(_tasks((4, 5)))]
        )


class Wrong(Numbers):
    """Says that its tasks have targets."""

    def contents(self) -> TaskContents:
        return TaskContents(target=True)


def _tasks(numbers: Sequence[int]) -> list[Task]:
    return [Task(f"n/{k}", f"make it {k}", images=(Image.new("RGB", (8, 8), (k, 0, 0)),)) for k in numbers]


def imported(name: str, **args: object) -> dict[str, object]:
    return {"kind": "import", "class": f"{__name__}:{name}", "args": args}


def photos(**data: object) -> dict[str, object]:
    return {**evaluate(packaged_recipes() / "photos.jsonnet"), "data": data}


def test_no_source_imports_torch_or_datasets_when_a_recipe_is_parsed() -> None:
    code = (
        "import sys; from retouch.data.kinds import DATA; DATA.classes(); "
        "print([name for name in ('torch', 'numpy', 'datasets', 'pyarrow', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_each_kind_of_the_table_is_the_class_of_its_kind() -> None:
    for kind in DATA:
        if kind != "import":
            found = DATA.load(kind)
            assert issubclass(found, DataSource)
            assert found.model_fields["kind"].default == kind


def test_a_source_of_ones_own_is_a_source_like_ours() -> None:
    document = photos(**imported("Numbers", path="here"))
    recipe = parse(document)
    assert recipe.data == Numbers(path="here")
    assert recipe.data.label == "Numbers"
    assert recipe.document()["data"] == imported("Numbers", path="here", allow_test_sets=False, shared=False)
    assert parse(recipe.document()) == recipe
    # Where the data are may change when a run is resumed, and nothing else.
    assert differences(recipe, parse(photos(**imported("Numbers", path="there")))) == []
    assert differences(recipe, parse(photos(**imported("Numbers", path="here", shared=True)))) == [
        "data.args.shared: False in the run, True in the recipe"
    ]
    with pytest.raises(ValueError, match=r"data\.args\.pth: unknown key; did you mean data\.args\.path"):
        parse(photos(**imported("Numbers", pth="here")))
    with pytest.raises(ValueError, match=r"is no data: derive the class from retouch\.data\.base\.DataSource"):
        parse(photos(kind="import", **{"class": f"{__name__}:Task"}))
    with pytest.raises(ValueError, match=r"retouch\.types:Task is not a class of Retouch that a recipe can name"):
        parse(photos(kind="import", **{"class": "retouch.types:Task"}))


def test_the_contract_finds_what_is_broken() -> None:
    check_data_source(Numbers())
    check_data_source(PlaygroundData(count=8, complexity={1: 1.0, 2: 1.0}))
    for source, message in (
        (Numbers(shared=True), "ids of training tasks"),
        (Changing(), "the tasks differ"),
        (Wrong(), "contents says target True"),
        (SharesItsSecondImages(), r"held-out tasks have the source images of training tasks: \['n/5'\]"),
    ):
        with pytest.raises(AssertionError, match=message):
            check_data_source(source)


def test_a_class_that_a_test_has_imported_needs_no_further_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RETOUCH_ALLOW_IMPORTS")
    check_data_source(Numbers())
