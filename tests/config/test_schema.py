"""The messages for lists of a recipe whose length is wrong."""

from pathlib import Path

import pytest

from retouch.recipe.recipe import load

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
