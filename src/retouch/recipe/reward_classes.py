"""Which class a reward's section is of, and the columns that it will have; known without loading a weight."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from retouch.config.imports import import_class
from retouch.recipe import judges
from retouch.recipe import reward_local as local
from retouch.recipe.reward import Part, RemoteReward, Reward, Several
from retouch.recipe.reward_section import RewardSection
from retouch.types import Column

if TYPE_CHECKING:
    from retouch.recipe.keys import RecipeKeys

# By name, since some of them import transformers. A section's own keys are its class's arguments.
_CLASSES: Mapping[type[RewardSection], str] = {
    local.PlaygroundReward: "retouch.playground.judges.judge:PlaygroundJudge",
    local.PaintingReward: "retouch.playground.judges.painting_judge:PaintingJudge",
    local.SignReward: "retouch.playground.judges.sign_judge:SignJudge",
    local.PhotosReward: "retouch.rewards.scorers.photos:PhotosReward",
    local.ShareReward: "retouch.rewards.scorers.share:ShareReward",
    local.CompressibilityReward: "retouch.rewards.scorers.compressibility:CompressibilityReward",
    local.ClipReward: "retouch.rewards.scorers.clip:ClipReward",
    local.PickScoreReward: "retouch.rewards.scorers.pickscore:PickScoreReward",
    local.AestheticReward: "retouch.rewards.scorers.aesthetic:AestheticReward",
    local.DinoReward: "retouch.rewards.scorers.preservation:DinoPreservation",
    local.LpipsReward: "retouch.rewards.scorers.lpips:LpipsPreservation",
    local.HpsReward: "retouch.rewards.scorers.hps:HpsReward",
    local.ImageRewardScore: "retouch.rewards.scorers.image_reward:ImageRewardScore",
    local.GenEvalReward: "retouch.rewards.scorers.geneval:GenEvalReward",
    local.AppearanceReward: "retouch.rewards.scorers.appearance:AppearanceReward",
    local.PaintedTextReward: "retouch.rewards.text.painted_text:PaintedTextReward",
    local.OcrReward: "retouch.rewards.text.ocr:OcrReward",
    local.ThinkReward: "retouch.rewards.text.thinking:ThinkReward",
    local.PromptQualityReward: "retouch.rewards.text.prompt_quality:PromptQualityReward",
    judges.AspectsReward: "retouch.rewards.judges:AspectsReward",
    judges.VieScore: "retouch.rewards.judges:VieScore",
    judges.EditScore: "retouch.rewards.judges:EditScore",
    judges.ComplexEditReward: "retouch.rewards.judges:ComplexEditReward",
    judges.GroundReward: "retouch.rewards.judges:GroundReward",
    judges.YesReward: "retouch.rewards.judges:YesReward",
    judges.DigitReward: "retouch.rewards.judges:DigitReward",
    judges.WinRateReward: "retouch.rewards.judges:WinRateReward",
    RemoteReward: "retouch.rewards.client.client:RemoteReward",
}


def reward_class(section: Part) -> type:
    """The class of a reward. ValueError: one of the user's own that is not there."""
    return import_class(section.class_ if isinstance(section, local.ImportedReward) else _CLASSES[type(section)])


def parts_of(section: Reward, at: str = "reward") -> Iterator[tuple[str, str, Part]]:
    """Each reward of the section, which stands ``at`` a path of the recipe: its own path, what its columns' names begin with, and
    its own section."""
    if isinstance(section, Several):
        for name, part in section.rewards.items():
            yield f"{at}.rewards.{name}", f"{name}/", part
    else:
        yield at, "", section


def parts_of_all(recipe: "RecipeKeys") -> Iterator[tuple[str, str, Part]]:
    """The same of all that judges in a run: the reward, and what is held out."""
    yield from parts_of(recipe.reward)
    if recipe.watch is not None and recipe.watch.judge is not None:
        yield from parts_of(recipe.watch.judge.reward, "watch.judge.reward")


def columns_of(section: Reward) -> dict[str, Column] | None:
    """The columns that the reward will have; None where only it can say: one of the user's own, or a server's."""
    columns: dict[str, Column] = {}
    for _, prefix, part in parts_of(section):
        own = _columns(part)
        if own is None:
            return None
        columns |= {f"{prefix}{name}": column for name, column in own.items()}
    return columns


def _columns(part: Part) -> Mapping[str, Column] | None:
    match part:
        case local.ImportedReward() | RemoteReward(columns=None):
            return None
        case RemoteReward(columns=declared):
            assert declared is not None
            return {name: Column(low, high) for name, (low, high) in declared.items()}
        case judges.AspectsReward(aspects=aspects):
            return {aspect: Column(0.0, 1.0) for aspect in aspects}
    columns: Mapping[str, Column] = vars(reward_class(part))["columns"]
    return columns
