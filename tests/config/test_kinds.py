"""Open sets of kinds: the table, plugins, imported classes, their errors, and serialisation; lists in sections."""

import json
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal

import pytest
import rjsonnet
from pydantic import ValidationError

import retouch
from retouch.config import consent
from retouch.config.consent import GROUP
from retouch.config.errors import unknown_keys, wrong_values
from retouch.config.section import Count, Kinds, Section, expected
from retouch.objectives.kinds import OBJECTIVES
from retouch.recipe.recipe import load
from retouch.rewards import Remote


class Shape(Section):
    """What all shapes derive from."""


class Circle(Shape):
    kind: Literal["circle", "disc"] = "circle"
    radius: Count
    centre: tuple[int, ...] = (0, 0)


class Custom(Shape):
    side: Count = 1


class OtherSection(Section):
    side: Count = 1


SHAPES = Kinds("shape", {"circle": f"{__name__}:Circle", "disc": f"{__name__}:Circle"})


class Drawing(Section):
    shape: Annotated[Shape, SHAPES]
    more: tuple[Annotated[Shape, SHAPES], ...] = ()
    under: Annotated[Shape, SHAPES] | None = None


def read(document):
    import json

    lines = unknown_keys(document, Drawing)
    try:
        return Drawing.model_validate_json(json.dumps(document))
    except ValidationError as error:
        raise ValueError("\n".join(lines + wrong_values(error, document, Drawing))) from None


def imported(name, **args):
    return {"kind": "import", "class": f"{__name__}:{name}", "args": args}


def test_the_kind_selects_the_class_in_single_list_and_optional_fields():
    drawing = read({"shape": {"kind": "disc", "radius": 2, "centre": [1, 2]}, "more": [imported("Custom", side=3)], "under": None})
    assert drawing.shape == Circle(kind="disc", radius=2, centre=(1, 2))
    assert drawing.more == (Custom(side=3),)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"kind": "circel", "radius": 1}, "shape.kind: 'circel' is not one of 'circle', 'disc', 'import'; did you mean 'circle'"),
        ({"radius": 1}, "shape.kind: missing: one of 'circle'"),
        ({"kind": "circle", "radius": "a"}, "shape.radius: should be a valid integer, not 'a'"),
        ({"kind": "circle", "radius": 1, "radios": 2}, r"shape.radios: unknown key; did you mean shape.radius\?"),
        ({"kind": "circle", "radius": 0}, "shape.radius: should be greater than or equal to 1, not 0"),
        (3, "shape: should be an object with a kind, not 3"),
        ({"kind": [], "radius": 1}, r"shape.kind: \[\] is not one of 'circle', 'disc', 'import'"),
        (imported("Custom", side=0), "shape.args.side: should be greater than or equal to 1, not 0"),
        (imported("Custom", sides=1), r"shape.args.sides: unknown key; did you mean shape.args.side\?"),
        (imported("OtherSection"), "shape: .*OtherSection is no shape: derive the class from .*Shape"),
        (imported("Nobody"), "shape: .* has no class Nobody"),
        ({"kind": "import", "class": "no_such_module_of_mine:Thing"}, "there is no module no_such_module_of_mine"),
        ({**imported("Custom"), "side": 3}, "shape.side: unknown key; the fields of your class go into shape.args"),
        (
            {"kind": "import", "class": "my_module.Circle"},
            r"shape\.class: 'my_module\.Circle' is not the path of a class; write package\.module:Class",
        ),
    ],
)
def test_invalid_kinds_and_values_raise_with_their_path(shape, message):
    with pytest.raises(ValueError, match=message):
        read({"shape": shape})


def test_an_installed_package_adds_a_kind_of_its_own(monkeypatch):
    class Square(Shape):
        kind: Literal["square"] = "square"
        side: Count

    plugin = ModuleType("a_plugin")
    plugin.Square = Square
    Square.__module__ = "a_plugin"
    monkeypatch.setitem(sys.modules, "a_plugin", plugin)
    entries = [EntryPoint("shape.square", "a_plugin:Square", GROUP), EntryPoint("other.square", "a_plugin:None", GROUP)]
    monkeypatch.setattr(consent, "plugins", lambda: entries)
    drawing = read({"shape": {"kind": "square", "side": 2}})
    assert drawing.shape == Square(side=2)
    assert drawing.model_dump(mode="json")["shape"] == {"kind": "square", "side": 2}
    assert list(SHAPES) == ["circle", "disc", "square", "import"]
    with pytest.raises(ValueError, match=r"shape\.side: missing"):
        read({"shape": {"kind": "square"}})


def test_an_installed_class_that_no_recipe_can_select_is_refused_with_what_to_change(monkeypatch):
    """It can be loaded by its name: a suite, for example, is named outside of recipes and needs no kind."""
    for path, message in (
        ("pathlib:Path", r"Path is installed as the kind 'square', but is no section; derive it from .* a shape"),
        (f"{__name__}:Custom", r"Custom is installed as the kind 'square', but has no field kind; add to the class: kind: "),
    ):
        entries = [EntryPoint("shape.square", path, GROUP)]
        monkeypatch.setattr(consent, "plugins", lambda entries=entries: entries)
        with pytest.raises(ValueError, match=message):
            read({"shape": {"kind": "square", "side": 2}})
    assert SHAPES.load("square") is Custom


@pytest.mark.parametrize(
    ("base", "name"),
    [
        *(("playground/grpo", name) for name in OBJECTIVES.other_names),
        *(("playground/writer-blind", name) for name in OBJECTIVES.other_names if "nft" not in name),  # NFT is only for denoising
    ],
)
def test_the_settings_suggested_for_an_algorithm_name_are_accepted(base, name):
    writes = base == "playground/writer-blind"
    with pytest.raises(ValueError, match=r"objective\.kind: .* is not a kind; write ") as caught:
        load(base, [f'objective={{"kind":"{name}"}}'])
    advice = str(caught.value).partition("; write ")[2]
    own, *others = re.split(r"(?:, and|;) advantage: ", advice)
    if for_tokens := re.search(r" \(for tokens, (.*)\)", own):
        own = for_tokens[1] if writes else own.replace(for_tokens[0], "")
    for bound in ("clip_low", "clip_high"):
        own = re.sub(rf",? and {bound}", f", {bound}: {0.2 if writes else 1e-5}", own)
    changes = {"objective": own, **({"advantage": others[0].removesuffix(" adds a value head").strip("{} ")} if others else {})}
    load(base, [f"{key}={json.dumps(json.loads(rjsonnet.evaluate_snippet(key, f'{{{keys}}}')))}" for key, keys in changes.items()])


def test_a_line_about_a_value_has_the_whole_message_and_the_start_of_the_value():
    for message, shown in (("Invalid JSON", "Invalid JSON, not 'x"), ("Input should be a list", "should be a list, not 'x")):
        line = expected({"msg": message, "input": "x" * 1000})
        assert line.startswith(shown)
        assert len(line) < 300


GRPO = Path(__file__).parents[2] / "recipes" / "playground" / "grpo.jsonnet"


class Boxes(Section):
    corners: tuple[tuple[int, int], ...] | None = None


def test_a_list_that_is_too_short_too_long_or_has_wrong_values_raises_with_its_key():
    for override, message in (
        ("policy.model.size=[48]", r"policy\.model\.size\.1: missing"),
        ("policy.model.size=[]", r"policy\.model\.size\.0: missing"),
        ('data={"kind": "folder", "path": "photos", "size": []}', r"data\.size\.0: missing"),
        ('data={"kind": "folder", "path": "photos", "size": [1, 2, 3]}', r"data\.size: should "),
    ):
        with pytest.raises(ValueError, match=message):
            load(GRPO, [override])
    with pytest.raises(ValueError, match=r"^Boxes: corners\.1\.0: should be a valid integer, not 'a'$"):
        Boxes(corners=[[0, 1], ["a", 3]])
    # In Python, a list may be passed where a section has a tuple.
    assert Boxes(corners=[[0, 1], [2, 3]]).corners == ((0, 1), (2, 3))
    assert Remote(endpoints=["http://127.0.0.1:1"]).endpoints == ("http://127.0.0.1:1",)
    assert retouch.Lora(rank=4, alpha=8, targets=["to_q"]).targets == ("to_q",)
