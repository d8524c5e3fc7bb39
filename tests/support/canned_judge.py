"""A judge whose answers are defined by a test, with the real forms and parsers but no model. An image's colour is its number."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from retouch.types import Sample
from retouch_bench.suite import Suite, SuiteItem
from retouch_judge.base import Panel
from retouch_judge.kinds import InProcess
from retouch_judge.questions import Answer, JudgeReply, Question

JUDGE = InProcess(path="not loaded")


class CannedClient:
    """Answers each question with ``reply(question, number)``: a text, an object that is encoded as JSON, or the probability of yes.

    ``number``: the number of the judged image.
    """

    identity = "canned"

    def __init__(self, reply: Callable[[Question, int], Any]) -> None:
        self.reply = reply
        self.asked: list[Question] = []

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        self.asked += questions
        return [self._answer(question) for question in questions]

    def _answer(self, question: Question) -> Answer:
        assert isinstance(question.parts[-1], Image.Image)
        given = self.reply(question, number_of(question.parts[-1]))
        first: Mapping[str, float] = {}
        if isinstance(given, float):
            first = {"yes": math.log(max(given, 1e-12)), "no": math.log(max(1 - given, 1e-12))}
        text = given if isinstance(given, str) else json.dumps(given)
        scores = question.form.read(JudgeReply(text, "stop", first=first))
        return Answer(scores, text=text) if scores else Answer(fault="the answer cannot be read", text=text)


def numbered_image(number: int, size: tuple[int, int] = (8, 8)) -> Image.Image:
    """Make an image whose colour encodes its number."""
    return Image.new("RGB", size, (number, 100, 200))


def number_of(image: Image.Image) -> int:
    """Return the number of an image that ``numbered_image`` made."""
    red = image.convert("RGB").getpixel((0, 0))
    assert isinstance(red, tuple)
    return int(red[0])


def save_numbered_image(path: Path, number: int, size: tuple[int, int] = (8, 8)) -> Path:
    """Save an image of ``numbered_image`` at ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    numbered_image(number, size).save(path)
    return path


def scored(
    suite: Suite, items: Sequence[SuiteItem], reply: Callable[[Question, int], Any], *, turns: int = 1
) -> dict[str, dict[str, float]]:
    """Score each item with the suite's judge, which answers with ``reply``; item i has image number i + 1 in every turn."""
    client = CannedClient(reply)
    reward: Any = suite.reward(JUDGE)
    reward = reward.with_model(Panel(client))
    found = {}
    for number, item in enumerate(items, 1):
        for turn in range(min(turns, item.turns)):
            previous = numbered_image(100 + number) if turn else None
            sample = Sample(suite.task_for(item, turn=turn, previous=previous), numbered_image(number))
            given = {name: column.item() for name, column in reward([sample]).items()}
            result = suite.score(item, given)
            assert not isinstance(result, str), result
            found[item.id if turn == 0 else f"{item.id}/{turn}"] = dict(result)
    return found


def headline(suite: Suite, items: Sequence[SuiteItem], scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the suite's headline figures of these scores, with one image per item."""
    columns = list(next(iter(scores.values())))
    values = {name: np.array([scores[item.id][name] for item in items]) for name in columns}
    return {name: float(each[0]) for name, each in suite.headline(items, values, np.ones((1, len(items)))).items()}
