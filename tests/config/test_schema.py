"""Lists in sections: the messages if their length is wrong, and lists from Python."""

from pathlib import Path

import pytest

import retouch
from retouch.config.section import Section
from retouch.recipe.recipe import load
from retouch.rewards import Remote

GRPO = Path(__file__).parents[2] / "recipes" / "playground" / "grpo.jsonnet"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.model.size=[48]", r"policy\.model\.size\.1: missing"),
        ("policy.model.size=[]", r"policy\.model\.size\.0: missing"),
        ('data={"kind": "folder", "path": "photos", "size": []}', r"data\.size\.0: missing"),
        ('data={"kind": "folder", "path": "photos", "size": [1, 2, 3]}', r"data\.size: should "),
    ],
)
def test_a_list_that_is_too_short_or_too_long_raises_with_its_key(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(GRPO, [override])


class Boxes(Section):
    corners: tuple[tuple[int, int], ...] | None = None


def test_python_may_pass_a_list_where_a_section_has_a_tuple() -> None:
    assert Remote(endpoints=["http://127.0.0.1:1"]).endpoints == ("http://127.0.0.1:1",)
    assert retouch.Lora(rank=4, alpha=8, targets=["to_q"]).targets == ("to_q",)
    assert Boxes(corners=[[0, 1], [2, 3]]).corners == ((0, 1), (2, 3))


def test_a_list_with_wrong_values_raises_with_the_position() -> None:
    with pytest.raises(ValueError, match=r"^Boxes: corners\.1\.0: should be a valid integer, not 'a'$"):
        Boxes(corners=[[0, 1], ["a", 3]])
