"""Votes without images, and groups of images that wait for votes."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from retouch.votes.log import Side, Vote


@pytest.fixture
def vote() -> Callable[..., Vote]:
    """Makes a vote; each has a number as its id and as its time."""
    numbers = itertools.count()

    def make(
        choice: str,
        *,
        task: str = "t",
        left: str = "a",
        right: str = "b",
        arms: tuple[str, str] | None = None,
        scores: tuple[Mapping[str, float], Mapping[str, float]] = ({}, {}),
        **more: Any,
    ) -> Vote:
        number = next(numbers)
        arms = (left, right) if arms is None else arms
        sides = [
            Side(arm=arm, image=f"{task}/{image}", file="", scores=given)
            for arm, image, given in zip(arms, (left, right), scores, strict=True)
        ]
        known = {"id": f"{number:016x}", "at": float(number), "voter": "ann", "instruction": "make it red", **more}
        return Vote(task=task, left=sides[0], right=sides[1], choice=choice, **known)  # type: ignore[arg-type]

    return make
