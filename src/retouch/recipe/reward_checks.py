"""What a recipe's reward and the rest of it mean together, each with what to do about it."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from retouch.config.imports import nearest
from retouch.playground.world.paintings import PaintingData
from retouch.playground.world.tasks import PlaygroundData
from retouch.playground.world.words import WordData
from retouch.recipe import judges
from retouch.recipe import reward_local as local
from retouch.recipe.phases import ResolvedPhase
from retouch.recipe.reward import Several
from retouch.recipe.reward_classes import columns_of, parts_of, parts_of_all
from retouch.recipe.writer import AutoregressivePolicy
from retouch.rewards.combine.combination import Combination, Combine, combination
from retouch.rewards.combine.formula_parser import read_formula
from retouch.types import Column

if TYPE_CHECKING:
    from retouch.recipe.keys import RecipeKeys

_COMPARE = (local.PhotosReward, local.DinoReward, local.LpipsReward, judges.EditScore, judges.ComplexEditReward, judges.DigitReward)


def reward_problems(recipe: "RecipeKeys") -> Iterator[str]:
    """What is wrong with the reward, and with what evaluation makes of it."""
    combined, columns = None, columns_of(recipe.reward)
    try:
        combined = _combined(recipe.reward.combine, columns)
    except ValueError as error:
        yield f"reward.combine: {str(error).removeprefix('combine ').removeprefix('combine: ')}"
    if columns is not None and recipe.eval.column is not None and recipe.eval.column not in columns:
        near = nearest(recipe.eval.column, columns)
        meant = f"; did you mean {near!r}?" if near else f"; it gives {', '.join(columns)}"
        yield f"eval.column: the reward gives no {recipe.eval.column!r}{meant}"
    for path, prefix, part in parts_of(recipe.reward):
        if isinstance(recipe.reward, Several) and part.model_fields_set & {"combine", "max_missing"}:
            yield f"{path}: combine and max_missing stand above several rewards, for all of them together; move them there"
        if isinstance(part, local.ThinkReward | local.PromptQualityReward) and not isinstance(recipe.policy, AutoregressivePolicy):
            yield f"{path}.kind: {part.kind} judges what a policy wrote, and this one makes pictures; take another reward"
        if isinstance(part, local.OcrReward) and part.reader is not None and part.line_width is not None:
            yield f"{path}.line_width: RapidOCR's alone, and {part.reader.kind} reads here; leave it out"
        if isinstance(part, judges.JudgeReward):
            yield from _judge(recipe, path, prefix, part, combined)


def _combined(combine: Combine, columns: Mapping[str, Column] | None) -> Combination | None:
    """What the columns make together; None where they are not known yet, and then only what is written is checked."""
    if not combine:
        raise ValueError('empty; name at least one column and its weight, {"overall": 1.0} say')
    if columns is not None:
        return combination(combine, columns)
    if isinstance(combine, str):
        read_formula(combine)
    elif not any(combine.values()):
        raise ValueError("all weights are 0, so nothing would be learnt; give one column a weight")
    return None


def _judge(recipe: "RecipeKeys", path: str, prefix: str, part: judges.JudgeReward, combined: Combination | None) -> Iterator[str]:
    if part.n_evals > 1 and part.temperature == 0:
        yield f"{path}.n_evals: {part.n_evals} answers at temperature 0 are one answer; give a temperature, 0.7 say, or n_evals 1"
    match part.judge:
        case judges.Endpoint(prices=None, quota=judges.Quota(cost=float())):
            yield f"{path}.judge.quota.cost: counted by prices, and there are none; give judge.prices"
    if isinstance(part, judges.WinRateReward):
        if combined is not None and f"{prefix}win_rate" in combined.columns and recipe.eval.column is None:
            yield "eval.column: win_rate compares pictures of one task, of which evaluation has one; name another column"
        for phase in recipe.resolved_phases():
            if phase.rollout.chunk < phase.rows and phase.rollout.chunk % phase.group_size:
                cut = f"{phase.rollout.chunk} cuts groups of {phase.group_size}"
                yield f"rollout.chunk: {cut}, which win_rate compares whole; take a multiple"


def reward_data_problems(recipe: "RecipeKeys", phase: ResolvedPhase, at: str) -> Iterator[str]:
    """Whether a phase's tasks, whose section is at ``at``, have what the rewards look at."""
    for path, _, part in parts_of_all(recipe):
        has, kind = phase.data.contents(), f"{at}.kind {phase.data.label!r}"
        other = f"{at}.kind is {phase.data.label!r}; take photos or import"
        if isinstance(part, local.PlaygroundReward) and not isinstance(phase.data, PlaygroundData):
            yield f"{path}.kind: playground judges its own edits only, and {other}"
        if isinstance(part, local.PaintingReward) and not isinstance(phase.data, PaintingData):
            yield f"{path}.kind: playground-paintings judges its own scenes only, and {other}"
        if isinstance(part, local.SignReward) and not isinstance(phase.data, WordData):
            yield f"{path}.kind: playground-signs judges signs of playground-words only, and {other}"
        compares = isinstance(part, _COMPARE) or (isinstance(part, judges.AspectsReward) and "identity" in part.aspects)
        if compares and has.images is False:
            what = "aspects: identity" if isinstance(part, judges.AspectsReward) else f"kind: {part.kind}"
            yield f"{path}.{what} compares with a source picture, and {kind} has none; leave it out"
        if isinstance(part, judges.GroundReward) and has.target is False:
            yield f"{path}.kind: ground compares with a target picture, and {kind} has none; take folder or hub data"
