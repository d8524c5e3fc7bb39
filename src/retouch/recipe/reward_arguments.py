"""Reads the text by which a command line names a reward.

The text is one of these: a kind (``playground``, ``ocr``, ``clip``), with its most important key after a colon or ``=``
(``clip:FOLDER``, ``photos:red`` or ``photos:#c81e1e``, ``share:blue``, ``lpips:FILE``, ``aesthetic:HEAD``,
``remote:http://host:8700``); ``package.module:Class`` for a class of the user; the JSON of a recipe's ``reward`` section, or a file
that contains it; a recipe or a run, which stands for its reward.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from retouch.config import consent
from retouch.config.errors import mistakes
from retouch.config.imports import CLASS_PATH, module_of
from retouch.config.packaged import SUFFIXES, find
from retouch.config.section import Section
from retouch.recipe.document import evaluate, value_of
from retouch.recipe.recipe import parse
from retouch.records.folder import RunFolder
from retouch.rewards.base import NoReward, RewardSection
from retouch.rewards.kinds import KINDS, AnyReward

_COMBINED = ("combine", "max_missing")


class _Holder(Section):
    reward: AnyReward


def parse_reward(document: Mapping[str, Any], *, allow_imports: Iterable[str] = ()) -> RewardSection:
    """Read a reward section. ``allow_imports``: as in ``recipe.parse``. Raises ValueError with a line for each mistake."""
    held = {"reward": dict(document)}
    with consent.reading(held, source=document, allow=consent.module_names(allow_imports)):
        try:
            return _Holder.model_validate_json(json.dumps(held)).reward
        except ValidationError as error:
            raise mistakes(error, held, _Holder) from None


def modules_in_argument(text: str) -> list[str]:
    """The modules of the classes that ``text`` itself names; the user has consented to them by typing it. Classes that are named in
    a file or in a run are not included."""
    if text.lstrip().startswith("{"):
        return consent.named_in_words([f"={text}"], value_of)
    is_file = text.endswith(SUFFIXES) or RunFolder(Path(text)).recipe.is_file()
    path = {} if is_file or not CLASS_PATH.fullmatch(text) else read_combined(text)
    return [module_of(path["class"])] if path.get("kind") == "import" else []


def default_name(words: str) -> str:
    """A short name of the reward ``words``, for a file or folder: ``clip:/models/b`` becomes ``clip-b``."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", re.sub(r"[^:=]*/", "", words)).strip("-.")[:40]


def read_reward(text: str) -> dict[str, Any]:
    """The reward section that ``text`` names, as JSON, without ``combine`` and ``max_missing``. Raises ValueError if there is no
    such reward, file or run."""
    return {key: value for key, value in read_combined(text).items() if key not in _COMBINED}


def read_combined(text: str) -> dict[str, Any]:
    """Like ``read_reward``, but with ``combine`` and ``max_missing`` if the section has them."""
    if text.lstrip().startswith("{"):
        try:
            return _section(json.loads(text), text)
        except json.JSONDecodeError:
            raise ValueError(f"{text!r} is not JSON; use a reward section as in a recipe, or a name") from None
    run = RunFolder(Path(text))
    if run.recipe.is_file():
        return _section(run.read_recipe()["recipe"], text)
    if text.endswith(SUFFIXES):
        return _section(evaluate(find(text)), text)
    kind, sign, argument = text.partition("=")
    if not sign or _with_shorthand(kind) is None:
        kind, sign, argument = text.partition(":")
    if not sign:
        return {"kind": kind}
    found = _with_shorthand(kind)
    if found is None:
        return {"kind": "import", "class": text.replace(".py:", ":", 1)}
    return {"kind": kind, str(found.cli_key): found.from_cli(argument)}


def _with_shorthand(kind: str) -> type[RewardSection] | None:
    """The class of a kind that accepts a value after a colon; None for any other text."""
    found = KINDS.load(kind)
    return found if found is not None and issubclass(found, RewardSection) and found.cli_key is not None else None


def _section(document: Any, text: str) -> dict[str, Any]:
    """The reward section of a document: the ``reward`` of a recipe, or the document itself."""
    if isinstance(document, dict) and "reward" in document:
        reward = parse(document).reward
        if isinstance(reward, NoReward):
            raise ValueError(f"{text}: this run has no reward; name one")
        return KINDS.document(reward)
    if not isinstance(document, dict) or "kind" not in document:
        raise ValueError(f"{text!r} has no kind; use a reward section as in a recipe")
    return document
