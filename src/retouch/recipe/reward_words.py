"""Rewards as they are named on a command line.

``playground``, ``ocr``, ``clip``; with what they need most after a colon (or ``=``): ``clip:FOLDER``, ``photos:red`` or
``photos:#c81e1e``, ``share:blue``, ``lpips:FILE``, ``aesthetic:HEAD``, ``remote:http://host:8700``; ``package.module:Class`` for
one of the user's own; the JSON of a recipe's ``reward`` section, or a file that holds one; a recipe or a run, whose reward it is.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from retouch.config.errors import unknown_keys, wrong_values
from retouch.config.packaged import SUFFIXES, find
from retouch.config.section import Section
from retouch.recipe.document import evaluate
from retouch.recipe.recipe import parse
from retouch.recipe.reward import Reward
from retouch.records.folder import RunFolder

_COLOURS = {"red": [255, 0, 0], "green": [0, 255, 0], "blue": [0, 0, 255], "white": [255, 255, 255], "black": [0, 0, 0]}
_ARGUMENTS = {
    **{"photos": "colour", "share": "channel", "clip": "path", "pickscore": "path", "dino": "path"},
    **{"hps": "path", "image_reward": "weights", "geneval": "detector", "lpips": "weights", "aesthetic": "head"},
    "remote": "endpoints",
}
"""The key that stands after a kind's colon."""
_COMBINED = ("combine", "max_missing")


class _Holder(Section):
    reward: Reward


def parse_reward(document: Mapping[str, Any]) -> Reward:
    """A reward's section. ValueError with a line for each mistake."""
    held = {"reward": dict(document)}
    lines = unknown_keys(held, _Holder)
    try:
        return _Holder.model_validate_json(json.dumps(held)).reward
    except ValidationError as error:
        raise ValueError("\n".join(lines + wrong_values(error, held, _Holder))) from None


def read_reward(text: str) -> dict[str, Any]:
    """The section that a word names, as JSON, without what a run makes of its columns. ValueError: no such reward, file or run."""
    return {key: value for key, value in read_combined(text).items() if key not in _COMBINED}


def read_combined(text: str) -> dict[str, Any]:
    """The same with ``combine`` and ``max_missing``, where it says them."""
    if text.lstrip().startswith("{"):
        try:
            return _section(json.loads(text), text)
        except json.JSONDecodeError:
            raise ValueError(f"{text!r} is not JSON; give a reward section as in a recipe, or a name") from None
    run = RunFolder(Path(text))
    if run.recipe.is_file():
        return _section(run.read_recipe()["recipe"], text)
    if text.endswith(SUFFIXES):
        return _section(evaluate(find(text)), text)
    kind, sign, argument = text.partition("=")
    if not sign or kind not in _ARGUMENTS:
        kind, sign, argument = text.partition(":")
    if not sign:
        return {"kind": kind}
    if kind not in _ARGUMENTS:
        return {"kind": "import", "class": text}
    value: Any = {"photos": _colour, "remote": lambda address: [address]}.get(kind, str)(argument)
    return {"kind": kind, _ARGUMENTS[kind]: value}


def _section(document: Any, text: str) -> dict[str, Any]:
    """The reward of a recipe, or the section itself."""
    if isinstance(document, dict) and "reward" in document:
        return parse(document).reward.model_dump(mode="json", by_alias=True)
    if not isinstance(document, dict) or "kind" not in document:
        raise ValueError(f"{text!r} has no kind; give a reward section as in a recipe")
    return document


def _colour(text: str) -> list[int]:
    if re.fullmatch(r"#[0-9a-fA-F]{6}", text):
        return list(bytes.fromhex(text[1:]))
    if text not in _COLOURS:
        raise ValueError(f"photos:{text}: name a colour: {', '.join(_COLOURS)}, or #rrggbb")
    return _COLOURS[text]
