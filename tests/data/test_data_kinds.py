"""The kinds of data sources: what their classes import, user-defined classes, and `check_data_source`."""

from dataclasses import replace
from typing import ClassVar

import pytest
from PIL import Image

from retouch.config.packaged import packaged_recipes
from retouch.data.base import DataSets, DataSource
from retouch.data.images import EncodedImage
from retouch.data.rows import Row
from retouch.recipe.derived_facts import differences
from retouch.recipe.document import evaluate
from retouch.recipe.recipe import parse
from retouch.types import Task, TaskContents
from retouch_worlds.data import PlaygroundData
from retouch_worlds.testing import check_data_source


class Numbers(DataSource):
    """Tasks made from numbers."""

    path_keys: ClassVar[tuple[str, ...]] = ("path",)

    path: str = "anywhere"
    """A place."""
    shared: bool = False
    """Whether held-out tasks are training tasks."""

    def contents(self):
        return TaskContents(images=True, mask=False, reference=False, target=False)

    def build(self, context):
        return DataSets(_tasks(range(4)), _tasks(range(1 if self.shared else 4, 6)))


def test_a_row_with_a_decoded_image_is_refused_with_the_class_to_use():
    image = Image.new("RGB", (4, 4))
    with pytest.raises(ValueError, match=r"image of the row 'a' is of type Image; give .* as retouch\.data\.images\.EncodedImage"):
        Row("rows", 1, "a", "blue", (EncodedImage("a", b""),), target=image)


class NonDeterministic(Numbers):
    """Builds different tasks each time."""

    made: ClassVar[list[int]] = []

    def build(self, context):
        self.made.append(1)
        return DataSets(_tasks(range(len(self.made))), _tasks(range(100, 102)))


class SharesItsSecondImages(Numbers):
    """Its held-out tasks have source images of training tasks, at another position."""

    def build(self, context):
        first, second = (Image.new("RGB", (8, 8), (255, k, 0)) for k in range(2))
        train = [replace(task, images=(*task.images, first)) for task in _tasks(range(2))]
        return DataSets(
            train, [replace(task, images=(first if k else second, *task.images)) for k, task in enumerate(_tasks((4, 5)))]
        )


class MissingTargets(Numbers):
    """Declares targets that its tasks do not have."""

    def contents(self):
        return TaskContents(target=True)


def _tasks(numbers):
    return [Task(f"n/{k}", f"make it {k}", images=(Image.new("RGB", (8, 8), (k, 0, 0)),)) for k in numbers]


def imported(name, **args):
    return {"kind": "import", "class": f"{__name__}:{name}", "args": args}


def photos(**data):
    return {**evaluate(packaged_recipes() / "photos.jsonnet"), "data": data}


def test_a_user_defined_data_source_is_parsed_stored_and_compared_like_a_built_in_one():
    document = photos(**imported("Numbers", path="here"))
    recipe = parse(document)
    assert recipe.data == Numbers(path="here")
    assert recipe.data.label == "Numbers"
    assert recipe.document()["data"] == imported("Numbers", path="here", allow_test_sets=False, shared=False)
    assert parse(recipe.document()) == recipe
    # When a run is resumed, the path of the data may differ, but no other key.
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


def test_check_data_source_accepts_valid_sources_and_rejects_faulty_ones():
    check_data_source(Numbers())
    check_data_source(PlaygroundData(count=8, complexity={1: 1.0, 2: 1.0}))
    for source, message in (
        (Numbers(shared=True), "ids of training tasks"),
        (NonDeterministic(), "the tasks differ"),
        (MissingTargets(), "contents says target True"),
        (SharesItsSecondImages(), r"held-out tasks have the source images of training tasks: \['n/5'\]"),
    ):
        with pytest.raises(AssertionError, match=message):
            check_data_source(source)
