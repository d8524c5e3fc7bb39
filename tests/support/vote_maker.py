"""Votes without images, for tests of the statistics of votes."""

import itertools
from collections.abc import Mapping
from typing import Any

from retouch_view.votes.log import Side, Vote


class VoteMaker:
    """Makes votes with consecutive numbers as ids and times."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def __call__(
        self,
        choice: str,
        *,
        task: str = "t",
        left: str = "a",
        right: str = "b",
        arms: tuple[str, str] | None = None,
        scores: tuple[Mapping[str, float], Mapping[str, float]] = ({}, {}),
        **more: Any,
    ) -> Vote:
        number = next(self._numbers)
        arms = (left, right) if arms is None else arms
        sides = [
            Side(arm=arm, image=f"{task}/{image}", file="", scores=given)
            for arm, image, given in zip(arms, (left, right), scores, strict=True)
        ]
        known = {"id": f"{number:016x}", "at": float(number), "voter": "ann", "instruction": "make it red", **more}
        return Vote(task=task, left=sides[0], right=sides[1], choice=choice, **known)  # type: ignore[arg-type]
