"""``retouch score``: the scores of one reward for one image file."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from retouch.data.images import load_image, load_mask
from retouch.distributed.ranks import scoring_device
from retouch.recipe.reward_arguments import modules_in_argument, parse_reward, read_combined
from retouch.records.files import jsonable
from retouch.rewards.base import close
from retouch.rewards.combination import Combination, combination
from retouch.rewards.function import range_text
from retouch.rewards.scoring import score
from retouch.types import Column


@dataclass(frozen=True, kw_only=True)
class ImageScores:
    """``scores``: by column, NaN if missing. ``reward``: the combined reward, None if the reward has no combination."""

    columns: dict[str, Column]
    scores: dict[str, float]
    combined: Combination | None
    reward: float | None

    @property
    def missing(self) -> list[str]:
        """The columns without a score, except diagnostics."""
        return [name for name, value in self.scores.items() if math.isnan(value) and not self.columns[name].diagnostic]

    def to_json(self) -> str:
        """One line of JSON, with null if a score is missing."""
        combined = {} if self.combined is None else {"reward": self.reward}
        return json.dumps(jsonable({"scores": self.scores, **combined, "missing": self.missing}), allow_nan=False)

    def __str__(self) -> str:
        ranges = {name: (column.low, column.high) for name, column in self.columns.items()}
        values = dict(self.scores)
        if self.combined is not None and self.reward is not None:
            values["reward"], ranges["reward"] = self.reward, (self.combined.low, self.combined.high)
        width = max(map(len, values))
        lines = []
        for name, value in values.items():
            low, high = ranges[name]
            placeholder = "missing" if name in self.missing or name == "reward" else "none"
            text = placeholder if math.isnan(value) else f"{value:.4f}"
            formula = f" = {self.combined}" if name == "reward" and self.combined is not None else ""
            lines.append(f"{name:<{width}}  {text:>8}  ({range_text(low, high)}){formula}")
        return "\n".join(lines)


def score_files(
    reward: str,
    *,
    image: Path,
    sources: Sequence[Path] = (),
    mask: Path | None = None,
    reference: Path | None = None,
    target: Path | None = None,
    instruction: str = "",
    text: str | None = None,
    completion: str | None = None,
    meta: str | None = None,
) -> ImageScores:
    """Score the image in the file ``image`` with the reward that ``reward`` names (see ``recipe/reward_arguments.py``).

    ``completion``: the completion that a policy wrote. ``meta``: JSON. Raises ValueError if a file cannot be read, there is no such
    reward, or the reward needs something that is not given.
    """
    try:
        given = json.loads(meta or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"--meta is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError('--meta must be a JSON object, for example {"operations": [...]}')
    document = read_combined(reward)
    section = parse_reward(document, allow_imports=modules_in_argument(reward))
    built = section.build(device=scoring_device())
    try:
        columns = dict(built.columns)
        combined = combination(section.combine, columns) if document.get("combine") else None
        scores = score(
            built,
            load_image(image),
            instruction=instruction,
            source=[load_image(source) for source in sources],
            mask=None if mask is None else load_mask(mask),
            reference=None if reference is None else load_image(reference),
            target=None if target is None else load_image(target),
            text=text,
            completion=completion,
            meta=given,
        )
    finally:
        close(built)
    total = None if combined is None else combined({name: torch.tensor([value]) for name, value in scores.items()}).item()
    return ImageScores(columns=columns, scores=scores, combined=combined, reward=total)
